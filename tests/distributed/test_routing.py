"""Where requests go: the directory against a plain model of it, and the router's promises, on random histories."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.distributed import routing
from pagemill.distributed.block_directory import BlockDirectory
from pagemill.distributed.route import Asked
from pagemill.distributed.routing import Router

SIZE = 16
REPLICAS = 3


def chain(name: str, blocks: int) -> list[bytes]:
    return [f"{name}{number:04}".encode() for number in range(blocks)]


def asked(name: str, blocks: int, *, session=None, most=64) -> Asked:
    return Asked(blocks * SIZE + 1, chain(name, blocks), most, session)


def fleet(count: int = REPLICAS, policy="least-work") -> Router:
    router = Router(SIZE, policy, 0)
    for number in range(count):
        router.add(f"r{number}", 8, f"at{number}")
        router.note_times(f"r{number}", 1e-3, 1e-2)
    return router


def serve(router: Router, request_id: str, what: Asked, tokens: int = 4) -> str:
    """Runs a request to its end, and lets its replica say what it holds then."""
    route = router.route(request_id, what)
    router.note_events(route.replica, what.digests, [])
    router.note_tokens(request_id, tokens)
    router.end(request_id)
    return route.replica


DIGESTS = chain("d", 6)
SOME = st.lists(st.sampled_from(DIGESTS), max_size=6)
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "claim", "settle", "forget"]), st.integers(0, 2), SOME), max_size=40
)


@given(OPERATIONS)
def test_the_directory_finds_what_is_held_or_coming_and_nothing_else(operations):
    directory, held, claims = BlockDirectory(), [set() for _ in range(3)], [[] for _ in range(3)]
    for what, replica, digests in operations:
        if what == "store":
            directory.store(replica, digests)
            held[replica] |= {*digests}
        elif what == "remove":
            directory.remove(replica, digests)
            held[replica] -= {*digests}
        elif what == "claim":
            claims[replica].append(directory.claim(replica, digests))
        elif what == "settle" and claims[replica]:
            directory.settle(replica, claims[replica].pop())
        elif what == "forget":
            while claims[replica]:
                directory.settle(replica, claims[replica].pop())
            directory.forget(replica)
            held[replica] = set()
        have = [held[each] | {digest for one in claims[each] for digest in one} for each in range(3)]
        expected = {}
        for each in range(3):
            depth = next((at for at, digest in enumerate(DIGESTS) if digest not in have[each]), len(DIGESTS))
            if depth:
                expected[each] = depth
        assert directory.find(DIGESTS, 0b111) == expected
        assert len(directory) == len(set().union(*held))


BELOW = [digest.upper() for digest in DIGESTS]
HOLDINGS = st.lists(
    st.tuples(st.sampled_from(["store", "sink", "remove", "claim"]), st.integers(0, 2), SOME, st.booleans()),
    max_size=30,
)


@given(HOLDINGS, st.booleans(), st.integers(0, 0b111))
def test_the_directory_counts_what_a_replica_has_on_disk_alone(holdings, coming, asked_for):
    directory = BlockDirectory()
    memory, disk, claimed = ([set() for _ in range(3)] for _ in range(3))
    for what, replica, digests, on_disk in holdings:
        names = [digest.upper() for digest in digests] if on_disk else digests
        if what in ("store", "sink"):
            directory.store(replica, names)
            (disk if on_disk else memory)[replica] |= {*names}
        elif what == "remove":
            directory.remove(replica, names)
            (disk if on_disk else memory)[replica] -= {*names}
        else:
            directory.claim(replica, digests)
            claimed[replica] |= {*digests} - memory[replica]
    expected = {}
    for each in (each for each in range(3) if asked_for & 1 << each):
        here = memory[each] | (claimed[each] if coming else set())
        depth, loads = 0, 0
        for digest, below in zip(DIGESTS, BELOW, strict=True):
            if digest not in here and below not in disk[each]:
                break
            depth, loads = depth + 1, loads + (digest not in here)
        if loads:
            expected[each] = depth, loads
    assert directory.reach(DIGESTS, BELOW, asked_for, coming=coming) == expected


STEPS = st.lists(
    st.tuples(st.sampled_from(["route", "tokens", "end", "remove", "add"]), st.integers(0, 7), st.integers(0, 5)),
    max_size=60,
)


@given(STEPS, st.sampled_from(["least-work", "round-robin"]))
def test_work_is_zero_again_when_all_has_ended_whatever_happened(steps, policy):
    router = fleet(policy=policy)
    running, added = set(), REPLICAS
    for what, number, blocks in steps:
        request_id = f"q{number}"
        if what == "route" and request_id not in running:
            if router.route(request_id, asked(f"p{blocks}", blocks, session=number % 3 or None)) is not None:
                running.add(request_id)
            else:
                assert not router.replicas
        elif what == "tokens":
            router.note_tokens(request_id, blocks)
        elif what == "end":
            router.end(request_id)
            running.discard(request_id)
        elif what == "remove" and router.replicas:
            running -= {*router.remove(router.replicas[0])}
        elif what == "add" and len(router.replicas) < 5:
            router.add(f"r{added}", rows=2)
            added += 1
        assert all(router.work_s(name) >= -1e-9 for name in router.replicas)
    for request_id in running:
        router.end(request_id)
    assert all(router.work_s(name) == pytest.approx(0.0, abs=1e-9) for name in router.replicas)
    assert router.directory.find(DIGESTS, 0b11111) == {}


def test_a_request_goes_where_its_prefix_is_and_a_new_one_where_nobody_works():
    router = fleet()
    first = serve(router, "a", asked("a", 20))
    assert router.route("b", asked("b", 20)).replica != first
    again = router.route("c", asked("a", 20))
    assert (again.replica, again.found_tokens) == (first, 20 * SIZE)


def test_a_prefix_that_is_being_computed_counts_as_found_until_its_request_has_failed():
    router = fleet()
    home = router.route("a", asked("a", 60)).replica
    assert router.route("b", asked("a", 60), at=home).found_tokens == 60 * SIZE
    router.end("a")
    router.end("b")
    assert router.route("c", asked("a", 60), at=home).found_tokens == 0


def test_a_hot_prefix_spreads_and_a_cold_one_does_not():
    router = fleet()
    hot, cold = asked("hot", 30), asked("cold", 30)
    for what in (cold, hot):
        serve(router, what.digests[0].decode(), what)
    places = set()
    for number in range(12):  # all at once: its replica gets more to do than computing it a second time takes
        route = router.route(f"q{number}", hot)
        places.add(route.replica)
        router.note_events(route.replica, hot.digests, [])
    assert places == {"r0", "r1", "r2"}
    assert len(router.directory.find(hot.digests[:1], 0b111)) == 3
    assert len(router.directory.find(cold.digests[:1], 0b111)) == 1


def test_a_session_stays_where_nothing_says_its_blocks_are_and_moves_when_that_is_overloaded_or_gone():
    router = fleet()
    home = serve(router, "turn0", asked("s", 8, session="s"))
    router.note_events(home, [], chain("s", 8))
    assert serve(router, "turn1", asked("s", 8, session="s")) == home
    for number in range(6):
        assert router.route(f"load{number}", asked(f"l{number}", 20), at=home).replica == home
    moved = serve(router, "turn2", asked("s", 8, session="s"))
    assert moved != home
    assert serve(router, "turn3", asked("s", 8, session="s")) == moved
    router.remove(moved)
    assert router.route("turn4", asked("s", 8, session="s")).replica != moved


def test_a_slow_replica_gets_less():
    router = fleet(2)
    router.note_times("r0", 4e-3, 4e-2)
    went = [router.route(f"q{number}", asked(f"p{number}", 10)).replica for number in range(50)]
    assert 2.5 < went.count("r1") / went.count("r0") < 6


def test_what_few_tokens_have_shown_of_a_replica_hardly_counts():
    router = fleet(2)
    router.note_times("r0", 2e-3, 1e-2, tokens=routing.TRUSTED_TOKENS // 100)
    router.note_times("r1", 1e-3, 1e-2, tokens=routing.TRUSTED_TOKENS // 100)
    went = [router.route(f"q{number}", asked(f"p{number}", 10)).replica for number in range(50)]
    assert abs(went.count("r1") - went.count("r0")) <= 2
    router = fleet(2)
    router.note_times("r0", 2e-3, 1e-2, tokens=100 * routing.TRUSTED_TOKENS)
    router.note_times("r1", 1e-3, 1e-2, tokens=100 * routing.TRUSTED_TOKENS)
    went = [router.route(f"q{number}", asked(f"p{number}", 10)).replica for number in range(50)]
    assert 1.5 < went.count("r1") / went.count("r0") < 3


def test_with_many_prompts_under_way_a_prompt_is_computed_anew_less_readily():
    """An idle replica gets a prompt that a busy one has, unless others would have to wait for that."""
    for waiting, home_keeps in ((0, False), (12, True)):
        router, what = fleet(), asked("a", 30)
        home = serve(router, "first", what)
        router.note_events(home, what.digests, [])
        others = [name for name in router.replicas if name != home]
        for number in range(waiting):
            router.route(f"w{number}", asked(f"w{number}", 20), at=others[number % 2])
        router.route("long", asked("long", 40), at=home)
        assert (router.route("again", what).replica == home) is home_keeps


FETCH_S = dict.fromkeys(("at0", "at1", "at2"), (2e-3, 1e-3))
"""Of all blocks of a prompt, and of each: a sixteenth of what computing it takes."""


def test_a_request_learns_who_holds_more_of_its_prompt():
    router = fleet(2)
    what = asked("a", 20)
    assert router.route("q0", what).holder is None
    router.end("q0")
    router.note_events("r1", what.digests[:5], [])
    router.note_events("r0", what.digests, [])
    route = router.route("q1", what, at="r1")
    assert (route.holder, route.held_blocks, route.found_tokens) == ("r0", 20, 80)
    assert router.route("q2", what, at="r0").holder is None
    router.end("q1")
    router.end("q2")
    router.rest("r0")
    assert router.route("q3", asked("a", 20), at="r1").holder == "r0", "it gives what it has while it ends"
    router.end("q3")
    router.remove("r0")
    assert router.route("q4", asked("a", 20), at="r1").holder is None


def test_what_is_only_coming_is_not_fetched():
    router = fleet(2)
    first = router.route("q0", asked("a", 20))
    other = next(name for name in router.replicas if name != first.replica)
    assert router.route("q1", asked("a", 20), at=other).holder is None


def test_tokens_that_can_be_fetched_cost_less_than_those_to_be_computed():
    router, what = fleet(2), asked("a", 100, session="s")
    assert serve(router, "q0", what) == "r0"
    busy = router.route("busy", Asked(1000, [], 400), at="r0")
    assert busy.replica == "r0"
    assert router.route("q1", what).replica == "r0", "what it has saves more than the wait"
    router.end("q1")
    for name in router.replicas:
        router.note_times(name, 1e-3, 1e-2, FETCH_S)
    route = router.route("q2", what)
    assert (route.replica, route.holder) == ("r1", "r0")
    assert route.work_s < 0.2
    assert router.work_s("r1") < 0.3, "what is fetched is not counted as if it were computed"


def test_a_fetch_is_priced_by_who_holds_the_blocks_and_never_by_who_is_gone():
    router, what = fleet(4), asked("a", 100)
    router.note_events("r0", what.digests, [])
    router.note_times("r3", 1e-3, 1e-2, {"at1": (0.0, 9e-3), "at2": (0.0, 1e-3), "gone": (0.0, 0.0)})

    def price_s():
        route = router.route("q", what, at="r3")
        router.end("q")
        return route.work_s

    assert price_s() == pytest.approx(1e-3 + 100 * (9e-3 + 1e-3) / 2), "the mean of those that are there"
    router.remove("r1")
    assert price_s() == pytest.approx(1e-3 + 100 * 1e-3), "what was measured with one that is gone says nothing"
    router.note_times("r3", 1e-3, 1e-2, {"at0": (math.inf, 0.0), "at2": (0.0, 1e-3)})
    assert price_s() == pytest.approx(1601e-3), "its holder is left alone: it is computed"
    router.note_times("r3", 1e-3, 1e-2, {"at0": (0.0, 2e-3), "at2": (0.0, 1e-3)})
    assert price_s() == pytest.approx(1e-3 + 100 * 2e-3)
    router.remove("r2")
    router.note_times("r3", 1e-3, 1e-2, {"at1": (0.0, 1e-3), "at2": (0.0, 1e-3)})
    assert price_s() == pytest.approx(1601e-3), "all that it has measured are gone: it knows nothing"


def split(replicas=3, prefill=1) -> Router:
    router = Router(SIZE, "least-work", prefill)
    for number in range(replicas):
        router.add(f"r{number}", 8, f"at{number}")
    for number in range(replicas):
        router.note_times(f"r{number}", 1e-3, 1e-2, FETCH_S)
    return router


def test_prompts_go_to_replicas_of_their_own_and_what_follows_to_others():
    router = split()
    what = asked("a", 20, session="s")
    first = router.route_prompt("q0", what)
    assert first.replica == "r0"
    router.note_events("r0", what.digests, [])
    router.note_tokens("q0", 1)
    router.end("q0", whole=False)
    second = router.route("q0", what)
    assert second.replica in {"r1", "r2"}
    assert (second.holder, second.held_blocks) == ("r0", 20)
    router.note_events(second.replica, what.digests, [])
    router.note_tokens("q0", 50)
    router.end("q0")
    more = asked("a", 22, session="s")
    assert router.route_prompt("q1", more) is None, "it is short where the session is"
    assert router.route("q1", more).replica == second.replica
    assert all(router.route(f"o{at}", asked(f"o{at}", 3)).replica != "r0" for at in range(9))


def test_no_prompt_goes_apart_where_fetching_takes_longer_or_nobody_is_left_to_go_on():
    router = split(2)
    assert router.route_prompt("q0", asked("a", 20)).replica == "r0"
    router.note_times("r1", 1e-3, 1e-2, {"at0": (0.0, 1.0)})
    assert router.route_prompt("q1", asked("b", 20)) is None
    router.note_times("r1", 1e-3, 1e-2, {"at0": (math.inf, 0.0)})
    assert router.route_prompt("q1", asked("b", 20)) is None, "nothing can be fetched there"
    router.note_times("r1", 1e-3, 1e-2, FETCH_S)
    router.rest("r1")
    assert router.route_prompt("q2", asked("b", 20)) is None
    assert router.route("q2", asked("b", 20)).replica == "r0"
    router.end("q2")
    router.end("q0")
    router.resume("r1")
    assert router.route_prompt("q3", asked("c", 20)).replica == "r0", "it keeps its part"
    router.remove("r0")
    router.add("r2", rows=8)
    assert router.route_prompt("q4", asked("d", 20)).replica == "r1"


def test_prompts_wait_at_replicas_of_their_own_for_as_long_as_they_would_hold_up_answers_elsewhere():
    router = split(2)
    router.route("answer", asked("x", 1), at="r1")
    router.note_tokens("answer", 1)
    went = []
    for at in range(9):
        what = asked(f"p{at}", 20)
        went.append(router.route_prompt(f"q{at}", what) or router.route(f"q{at}", what))
    apart = [route.replica for route in went].index("r1")
    assert 1 < apart < 6, "prompts of 160 ms each beside an answer of some 130 ms"
    for at in range(9):
        router.end(f"q{at}")
    assert router.route_prompt("later", asked("p", 20)).replica == "r0"


def test_who_has_fetched_nothing_yet_is_taken_to_fetch_as_others_do():
    router = fleet()
    router.note_events("r0", chain("a", 100), [])
    router.note_times("r1", 1e-3, 1e-2, {"at0": (1e-3, 1e-4)})
    for request_id, at in (("at r0", "r0"), ("at r1", "r1")):
        router.route(request_id, Asked(1000, [], 1), at=at)
    assert router.route("q", asked("a", 100)).replica == "r2", "it has nothing to do, and need not compute"
    assert router.work_s("r2") < 1.0


def sunk(name: str, blocks: int) -> Asked:
    """Returns a request that may be found on disks."""
    what = asked(name, blocks)
    return what._replace(on_disk=[digest.upper() for digest in what.digests])


def test_a_request_goes_to_the_replica_whose_disk_holds_its_prefix():
    """By the time of loading that this has measured, or others have; while nobody has, it is tried."""
    router, what = fleet(), sunk("a", 40)
    home = router.replicas[1]
    router.note_events(home, what.on_disk, [])
    route = router.route("untried", what)
    assert (route.replica, route.found_tokens, route.work_s) == (home, 640, pytest.approx(0.001))
    router.end("untried")
    router.note_times(router.replicas[0], 1e-3, 1e-2, disk_s=(0.1, 2e-3))
    assert router.route("as others", what).work_s == pytest.approx(0.1 + 40 * 2e-3 + 1e-3)
    router.end("as others")
    router.note_times(home, 1e-3, 1e-2, disk_s=(0.2, 5e-3))
    route = router.route("measured", what)
    assert (route.replica, route.work_s) == (home, pytest.approx(0.2 + 40 * 5e-3 + 1e-3))
    router.end("measured")
    router.note_times(home, 1e-3, 1e-2, disk_s=(0.2, 15e-3))  # 800 ms, where computing takes 641
    route = router.route("slower than computing", what)
    assert (route.replica != home, route.found_tokens) == (True, 0)


def test_blocks_in_memory_before_those_on_disk_cost_nothing_and_what_is_gone_is_not_counted():
    router, what = fleet(1), sunk("a", 40)
    router.note_times("r0", 1e-3, 1e-2, disk_s=(0.01, 1e-3))
    router.note_events("r0", [*what.digests[:10], *what.on_disk[5:30]], [])
    route = router.route("a", what)
    assert (route.found_tokens, route.work_s) == (480, pytest.approx(0.01 + 20 * 1e-3 + 161e-3))
    router.end("a")
    router.note_events("r0", [], what.on_disk[20:21])
    assert router.route("b", what).found_tokens == 320


def test_what_lies_on_a_disk_is_fetched_at_the_price_of_its_load_too():
    router, what = fleet(), sunk("a", 40)
    router.note_events("r1", what.on_disk, [])
    for name in router.replicas:
        router.note_times(name, 1e-3, 1e-2, {"at1": (0.05, 1e-3)}, (0.02, 2e-3))
    for number in range(8):
        router.route(f"q{number}", asked(f"q{number}", 60), at="r1")
    route = router.route("a", what)
    assert (route.replica != "r1", route.holder, route.held_blocks) == (True, "r1", 40)
    assert route.work_s == pytest.approx(0.05 + 40e-3 + 0.02 + 80e-3 + 1e-3)


def test_of_a_store_that_all_share_nobody_has_to_fetch():
    router, what = fleet(), sunk("a", 40)
    for name in router.replicas:
        router.note_events(name, what.on_disk, [])
    places = set()
    for number in range(3):
        route = router.route(f"q{number}", what)
        assert (route.found_tokens, route.holder) == (640, None)
        places.add(route.replica)
    assert places == {*router.replicas}
