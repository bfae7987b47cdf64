"""Where requests go: the directory against a plain model of it, and the router's promises, on random histories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.distributed.block_directory import BlockDirectory
from pagemill.distributed.routing import Asked, Router

SIZE = 16
REPLICAS = 3


def chain(name: str, blocks: int) -> list[bytes]:
    return [f"{name}{number:04}".encode() for number in range(blocks)]


def asked(name: str, blocks: int, *, session=None, most=64) -> Asked:
    return Asked(blocks * SIZE + 1, chain(name, blocks), most, session)


def fleet(count: int = REPLICAS, policy="least-work") -> Router:
    router = Router(SIZE, policy)
    for number in range(count):
        router.add(f"r{number}", rows=8)
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
    assert router.directory.count_holders(hot.digests[0]) == 3
    assert router.directory.count_holders(cold.digests[0]) == 1


def test_a_session_stays_where_nothing_says_its_blocks_are_and_moves_when_that_is_overloaded_or_gone():
    router = fleet()
    home = serve(router, "turn0", asked("s", 8, session="s"))
    router.note_events(home, [], chain("s", 8))  # to a tier below the pool, which nobody tells
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
