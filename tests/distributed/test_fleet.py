"""The fleet among replicas that come, rest, come back and go. Links are recorded instead of being Ray's."""

import asyncio
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest

from pagemill import SamplingParams
from pagemill.config import EngineConfig
from pagemill.distributed import fleet as fleet_module
from pagemill.distributed.fleet import Fleet
from pagemill.engine.messages import (
    DIGEST_BYTES,
    AbortRequests,
    EngineReady,
    EngineRequest,
    Held,
    HeldBlocks,
    SequenceOutput,
)
from pagemill.engine.queries import SetTenant, Unpin
from pagemill.errors import EngineDeadError, EngineStoppedError, InvalidRequestError
from pagemill.frontend.supervisor import RestartLimits
from pagemill.memory.digest import extend_chain, root_digest
from pagemill.namespace import Namespace
from pagemill.tenant_limits import TenantLimits

FACTS = EngineReady(
    vocab_size=100, max_model_len=256, max_num_seqs=4, longest_sequence=256, tenants=["default"], block_size=16,
    num_frames=64, kv_bytes=1 << 20, kv_memory=1 << 20, eos_token_ids=[0], hidden_size=8, model="m", kv_format="f",
)  # fmt: skip


class RecordedLink:
    """What `ReplicaLink` is to its user, without a replica behind it. answers: set it to hold back answers."""

    opened: ClassVar[list] = []

    def __init__(self, name, front_end, handle, user):
        self.name, self._user = name, user
        self.death, self.facts, self.closing, self.engine_died = None, None, False, False
        self.sent, self.asked, self.answers = [], [], asyncio.Event()
        self.answers.set()
        self.opened.append(self)

    def come(self):
        self.facts = msgspec.structs.replace(FACTS, peer_address=f"{self.name}:1")
        self._user.note_facts(self, self.facts)

    def send(self, message):
        if getattr(message, "prompt_token_ids", [])[:1] == [99]:
            raise InvalidRequestError("this cannot be encoded")
        self.sent.append(message)

    async def ask(self, query):
        self.asked.append(query)
        await self.answers.wait()
        if self.death is not None:
            raise self.death
        return FACTS

    async def close(self):
        self.die("closed")

    def die(self, why="killed", *, engine_died=False):
        self.death, self.engine_died = EngineDeadError(why), engine_died
        self._user.note_end(self)

    def bring(self, request_id, **more):
        output = SequenceOutput(request_id=request_id, index=0, new_token_ids=[7], **more)
        self._user.note_outputs(self, [output])

    @property
    def requests(self):
        return [each.request_id for each in self.sent if isinstance(each, EngineRequest)]


def request(request_id, first=1, **more):
    return EngineRequest(
        request_id=request_id, prompt_token_ids=[first] * 20, params=SamplingParams(max_tokens=9), arrival_s=0.0, **more
    )


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


class Handle:
    """The deployment's, of which nothing is called but what makes Ray Serve list the replicas."""

    class wait_ready:
        @staticmethod
        async def remote(replica):
            pass


def run(monkeypatch, scenario, restarts=None, names=("a",), prefill_replicas=0):
    """Runs a scenario with a fleet of these replicas, which have come."""
    monkeypatch.setattr(fleet_module, "ReplicaLink", RecordedLink)
    monkeypatch.setattr(RecordedLink, "opened", [])

    async def all_of_it():
        fleet = Fleet(EngineConfig(model="m"), Handle, "round-robin", restarts or RestartLimits(), prefill_replicas)
        loading = asyncio.create_task(fleet.load(lambda done, total: None))
        await settle()
        fleet.note_listed({*names})
        for link in [*RecordedLink.opened]:
            link.come()
        await asyncio.wait_for(loading, 5)
        await settle()
        received = []
        frontend = SimpleNamespace(
            received=received, receive=received.extend, num_sent_again=0, made_pins=SimpleNamespace(requests=list)
        )
        running = asyncio.create_task(fleet.run(frontend))
        await settle()
        await scenario(fleet, {link.name: link for link in RecordedLink.opened}, frontend)
        await fleet.close()
        with pytest.raises(EngineStoppedError):
            await running

    asyncio.run(all_of_it())


async def failures(frontend):
    await settle()
    return [each for each in frontend.received if each.error is not None]


def test_a_replica_that_is_listed_again_while_it_ends_its_requests_gets_requests_again(monkeypatch, caplog):
    async def scenario(fleet, links, frontend):
        for number in range(2):
            fleet.submit(request(f"first{number}"))
        (mine,) = links["b"].requests
        fleet.note_listed({"a"})
        await settle()
        assert not links["b"].closing
        for number in range(2):
            fleet.submit(request(f"resting{number}"))
        assert links["b"].requests == [mine]
        fleet.note_listed({"a", "b"})
        await settle()
        for number in range(2):
            fleet.submit(request(f"again{number}"))
        assert len(links["b"].requests) == 2
        fleet.note_listed({"a"})
        links["b"].bring(mine, finish_reason="length")
        links["b"].bring(links["b"].requests[1], finish_reason="length")
        await settle()
        assert links["b"].closing
        assert fleet.num_restarts == 0
        assert not caplog.records

    run(monkeypatch, scenario, names=("a", "b"))


def test_a_replica_gets_requests_only_once_it_has_done_every_change(monkeypatch):
    async def scenario(fleet, links, frontend):
        change = SetTenant("team", TenantLimits())
        await fleet.ask(change)
        fleet.note_listed({"a", "b"})
        new = RecordedLink.opened[-1]
        new.answers.clear()
        new.come()
        await settle()
        assert new.asked == [change]
        later = SetTenant("team", TenantLimits(max_running=2))
        await fleet.ask(later)
        fleet.submit(request("early"))
        fleet.submit(request("early too"))
        assert new.requests == []
        new.answers.set()
        await settle()
        assert new.asked == [change, later]
        fleet.submit(request("late"))
        assert new.requests == ["late"]

    run(monkeypatch, scenario)


def test_waiting_requests_are_not_held_up_by_one_that_cannot_be_sent(monkeypatch):
    async def scenario(fleet, links, frontend):
        links["a"].die()
        for each in (request("bad", first=99), request("good")):
            fleet.submit(each)
        await asyncio.sleep(fleet_module.LINK_AGAIN_S + 0.1)
        RecordedLink.opened[-1].come()
        await settle()
        assert RecordedLink.opened[-1].requests == ["good"]
        (refused,) = await failures(frontend)
        assert (refused.request_id, refused.error.error_type) == ("bad", "InvalidRequestError")

    run(monkeypatch, scenario)


@pytest.mark.parametrize("engine_died", [True, False])
def test_a_request_that_engines_die_of_ends_and_one_that_loses_a_whole_cluster_waits(monkeypatch, engine_died):
    async def scenario(fleet, links, frontend):
        fleet.submit(request("q"))
        for _ in range(3):
            next(link for link in links.values() if link.requests and link.death is None).die(engine_died=engine_died)
        assert bool(await failures(frontend)) is engine_died
        next(link for link in links.values() if link.death is None).die()
        fleet.note_listed({"e"})
        RecordedLink.opened[-1].come()
        await settle()
        assert RecordedLink.opened[-1].requests == ([] if engine_died else ["q"])

    run(monkeypatch, scenario, names=("a", "b", "c", "d"))


@pytest.mark.parametrize("by", ["losses", "time"])
def test_requests_do_not_wait_for_ever_where_no_replica_is_left(monkeypatch, by):
    monkeypatch.setattr(fleet_module, "NO_REPLICA_S", 0.05)
    monkeypatch.setattr(fleet_module, "LINK_AGAIN_S", 60.0)

    async def scenario(fleet, links, frontend):
        fleet.submit(request("q"))
        links["a"].die()
        if by == "time":
            assert await failures(frontend) == []
            await asyncio.sleep(0.1)
        fleet.submit(request("later"))
        ended = await failures(frontend)
        assert [each.request_id for each in ended] == ["q", "later"]
        assert {each.error.error_type for each in ended} == {"EngineRestartingError"}
        fleet.note_listed({"a"})
        RecordedLink.opened[-1].come()
        await settle()
        fleet.submit(request("served"))
        assert RecordedLink.opened[-1].requests == ["served"]

    run(monkeypatch, scenario, RestartLimits(max_engine_restarts=0 if by == "losses" else 3))


def make_pin(fleet, links):
    """Returns who of two replicas has made a pin, the other, and the copy that it is to make."""
    fleet.submit(request("pin#1", pin="system"))
    (main,) = [link for link in links.values() if link.requests]
    (other,) = [link for link in links.values() if not link.requests]
    main.bring("pin#1", finish_reason="length")
    (copy,) = other.sent
    return main, other, copy


def test_a_pin_is_made_elsewhere_once_it_has_been_made_and_refusals_are_logged(monkeypatch, caplog):
    async def scenario(fleet, links, frontend):
        main, other, copy = make_pin(fleet, links)
        assert (copy.pin, main.requests) == ("system", ["pin#1"])
        assert copy.request_id != "pin#1"
        error = SequenceOutput(request_id=copy.request_id, index=0, new_token_ids=[], finish_reason="error")
        error.error = fleet_module.refusals(copy, InvalidRequestError("too large"))[0].error
        fleet.note_outputs(other, [error])
        assert "too large" in caplog.text
        fleet.submit(request("pin#2", pin="other"))
        (at,) = [link for link in links.values() if "pin#2" in link.requests]
        fleet.abort(["pin#2"])
        assert [link for link in links.values() if any(isinstance(each, AbortRequests) for each in link.sent)] == [at]

    run(monkeypatch, scenario, names=("a", "b"))


def test_a_copy_of_a_pin_that_is_unpinned_before_it_is_made_is_ended(monkeypatch):
    async def scenario(fleet, links, frontend):
        _, other, copy = make_pin(fleet, links)
        await fleet.ask(Unpin("system", "default", ""))
        other.asked.clear()
        other.bring(copy.request_id, finish_reason="length")
        await settle()
        assert other.asked == [Unpin("system", "default", "")]

    run(monkeypatch, scenario, names=("a", "b"))


def test_pins_that_have_expired_leave_no_home(monkeypatch):
    async def scenario(fleet, links, frontend):
        await fleet.ask(SetTenant("team", TenantLimits(max_blocks=6)))
        fleet.submit(request("short", tenant="team", pin="short", pin_expires_s=0.0))
        next(link for link in links.values() if link.requests).bring("short", finish_reason="length")
        await fleet.ask(SetTenant("team", TenantLimits()))
        fleet.submit(request("pin", tenant="team", pin="system"))
        next(link for link in links.values() if "pin" in link.requests).bring("pin", finish_reason="length")
        await fleet.ask(SetTenant("team", TenantLimits(max_blocks=6)))
        await settle()
        assert len([link for link in links.values() if Unpin("system", "team", "") in link.asked]) == 1

    run(monkeypatch, scenario, names=("a", "b"))


def test_pins_of_a_tenant_whose_blocks_are_limited_are_in_one_replica_and_count_there(monkeypatch):
    async def scenario(fleet, links, frontend):
        def pins_at():
            return {name: [one.pin for one in link.sent if getattr(one, "pin", None)] for name, link in links.items()}

        await fleet.ask(SetTenant("team", TenantLimits(max_blocks=6)))
        for name in ("pin#1", "pin#2"):  # each a block of 16 tokens, and two while it is computed
            fleet.submit(request(name, tenant="team", pin=name))
            home = next(link for link in links.values() if name in link.requests)
            home.bring(name, finish_reason="length")
        assert pins_at() == {name: ["pin#1", "pin#2"] if link is home else [] for name, link in links.items()}
        for number in range(3):  # two blocks each, and then four
            asked = request(f"q{number}", tenant="team")
            asked.prompt_token_ids = [1] * (40 if number == 2 else 20)
            fleet.submit(asked)
        at = {name: [one for one in link.requests if one[0] == "q"] for name, link in links.items()}
        assert sorted(one for mine in at.values() for one in mine) == ["q0", "q1"], "the third waits"
        assert len({name for name, mine in at.items() if mine}) == 2
        fleet.abort([one for name, mine in at.items() if name != home.name for one in mine])
        assert home.requests[-1] == "q2", "where the pins are, that replica keeps the limit"
        home.die()
        (other,) = [link for link in links.values() if link is not home]
        assert pins_at()[other.name] == ["pin#1", "pin#2"], "they have another home"
        await fleet.ask(Unpin("pin#1", "team", ""))
        await fleet.ask(Unpin("pin#2", "team", ""))
        fleet.note_listed({"b", "c"} if other.name == "b" else {"a", "c"})
        await settle()
        third = RecordedLink.opened[-1]
        third.come()
        await settle()
        assert [one for one in third.sent if getattr(one, "pin", None)] == []

    run(monkeypatch, scenario, names=("a", "b"))


def test_pins_move_to_one_replica_where_a_limit_comes_and_to_all_where_it_goes(monkeypatch):
    async def scenario(fleet, links, frontend):
        await fleet.ask(SetTenant("team", TenantLimits()))
        fleet.submit(request("pin", tenant="team", pin="system"))
        next(link for link in links.values() if link.requests).bring("pin", finish_reason="length")
        assert [len(link.sent) for link in links.values()] == [1, 1]
        await fleet.ask(SetTenant("team", TenantLimits(max_blocks=6)))
        await settle()
        unpinned = [name for name, link in links.items() if Unpin("system", "team", "") in link.asked]
        assert len(unpinned) == 1
        await fleet.ask(SetTenant("team", TenantLimits(max_blocks="50%")))
        assert [len(link.sent) for name, link in links.items() if name in unpinned] == [2]

    run(monkeypatch, scenario, names=("a", "b"))


def test_what_ends_here_with_an_error_is_ended_at_its_replica_too(monkeypatch):
    async def scenario(fleet, links, frontend):
        asked = request("q")
        asked.params = SamplingParams(n=2, max_tokens=9)
        fleet.submit(asked)
        (first,) = [link for link in links.values() if link.requests]
        (second,) = [link for link in links.values() if link is not first]
        first.bring("q")
        first.die()
        assert second.requests == ["q"]
        fleet.note_outputs(second, [SequenceOutput(request_id="q", index=0, new_token_ids=[8])])
        assert next(each.request_ids for each in second.sent if isinstance(each, AbortRequests)) == ["q"]

    run(monkeypatch, scenario, names=("a", "b"))


@pytest.mark.parametrize("by", ["front end", "replica"])
def test_a_sequence_that_has_been_ended_does_not_go_on_where_its_request_begins_again(monkeypatch, by):
    async def scenario(fleet, links, frontend):
        asked = request("q")
        asked.params = SamplingParams(n=2, max_tokens=9)
        fleet.submit(asked)
        (first,) = [link for link in links.values() if link.requests]
        (second,) = [link for link in links.values() if link is not first]
        fleet.finish([("q", 0)])
        first.die()
        assert second.requests == ["q"]
        assert not any(isinstance(each, AbortRequests) for each in second.sent)
        if by == "front end":
            fleet.finish([("q", 1)])
        else:
            end = SequenceOutput(request_id="q", index=1, new_token_ids=[8], finish_reason="length")
            fleet.note_outputs(second, [end])
        assert [each.request_ids for each in second.sent if isinstance(each, AbortRequests)] == [["q"]]

    run(monkeypatch, scenario, names=("a", "b"))


def test_a_tenants_limit_holds_over_all_replicas_and_the_next_goes_when_one_ends(monkeypatch):
    async def scenario(fleet, links, frontend):
        await fleet.ask(SetTenant("team", TenantLimits(max_running=2, max_waiting=1)))
        for number in range(5):
            fleet.submit(request(f"team{number}", tenant="team"))
            fleet.submit(request(f"other{number}"))
        sent = [each for link in links.values() for each in link.requests]
        assert sorted(each for each in sent if each.startswith("team")) == ["team0", "team1"]
        assert len(sent) == 7
        refused = await failures(frontend)
        assert {each.error.error_type for each in refused} == {"TooManyWaitingError"}
        assert [each.request_id for each in refused] == ["team3", "team4"]
        at = next(link for link in links.values() if "team0" in link.requests)
        at.bring("team0", finish_reason="length")
        assert sum("team2" in link.requests for link in links.values()) == 1
        at.die()
        fleet.abort(["team1", "team2"])
        fleet.submit(request("team5", tenant="team"))
        fleet.submit(request("team6", tenant="team"))
        assert sum({"team5", "team6"} <= {*link.requests} for link in links.values()) == 1

    run(monkeypatch, scenario, names=("a", "b"))


def test_a_replica_is_told_what_its_tenants_have_had_elsewhere(monkeypatch):
    async def scenario(fleet, links, frontend):
        for tenant in ("one", "other"):
            await fleet.ask(SetTenant(tenant, TenantLimits()))
        told = {"a": [], "b": []}
        for number in range(6):
            fleet.submit(request(f"q{number}", tenant="one" if number else "other"))
            at = next(link for link in links.values() if f"q{number}" in link.requests)
            told[at.name].append(at.sent[-1].served_elsewhere)
            at.bring(f"q{number}")
        # The other tenant has requests at a alone: a prompt and a token that the first one had at b are its lead there.
        assert told == {"a": [{}, {}, {"one": 21}], "b": [{}, {}, {}]}

    run(monkeypatch, scenario, names=("a", "b"))


def test_a_replica_is_told_what_is_left_of_a_guarantee(monkeypatch):
    async def scenario(fleet, links, frontend):
        await fleet.ask(SetTenant("team", TenantLimits(guaranteed_blocks=30)))
        told = []
        for name in ("q0", "q1", "q2"):
            fleet.submit(request(name, tenant="team"))
            at = next(link for link in links.values() if name in link.requests)
            told.append((at.name, at.sent[-1].guaranteed_here))
            at.bring(name)
        assert told[0][1] == {"team": 30}
        assert told[1] == (told[1][0], {"team": 28})  # a prompt of 20 tokens is elsewhere, in blocks of 16
        assert told[2] == (told[0][0], {"team": 28})
        await fleet.ask(SetTenant("team", TenantLimits(guaranteed_blocks="10%")))
        fleet.submit(request("q3", tenant="team"))
        assert [link.sent[-1].guaranteed_here for link in links.values() if "q3" in link.requests] == [{}]

    run(monkeypatch, scenario, names=("a", "b"))


def test_a_prompt_is_computed_by_one_replica_and_another_goes_on_with_what_that_holds(monkeypatch):
    async def scenario(fleet, links, frontend):
        asked = request("q")
        asked.prompt_token_ids = [*range(1, 200)]
        fleet.submit(asked)
        (first,) = [link for link in links.values() if link.requests]
        (second,) = [link for link in links.values() if link is not first]
        assert first.sent[-1].params.max_tokens == 1
        fleet.note_held(first, held_for(asked))
        first.bring("q", finish_reason="length", num_cached_tokens=3)
        await settle()
        (sent,) = second.sent
        assert (sent.params.max_tokens, sent.answered) == (9, [7])
        assert sent.held == HeldBlocks(f"{first.name}:1", 12)
        second.bring("q", num_cached_tokens=192)
        second.bring("q", finish_reason="length", num_cached_tokens=192)
        await settle()
        assert [each.new_token_ids for each in frontend.received] == [[7]] * 3
        assert [each.finish_reason for each in frontend.received] == [None, None, "length"]
        assert {each.num_cached_tokens for each in frontend.received} == {3}
        assert frontend.num_sent_again == 0
        fleet.submit(request("short"))
        assert second.requests[-1] == "short"
        for number, more in enumerate(({"n": 2}, {"max_tokens": 1}, {"prompt_logprobs": 1})):
            whole = request(f"whole{number}")
            whole.prompt_token_ids, whole.params = asked.prompt_token_ids[::-1], SamplingParams(**more)
            fleet.submit(whole)
            assert second.requests[-1] == f"whole{number}"

    run(monkeypatch, scenario, names=("a", "b"), prefill_replicas=1)


def test_a_prompt_whose_replica_dies_or_whose_first_token_ends_it_has_no_second_part(monkeypatch):
    async def scenario(fleet, links, frontend):
        for name in ("q", "p"):
            asked = request(name)
            asked.prompt_token_ids = [*range(1, 200)]
            fleet.submit(asked)
        (first,) = [link for link in links.values() if link.requests]
        (second,) = [link for link in links.values() if link is not first]
        first.bring("q", finish_reason="stop")
        await settle()
        assert second.sent == []
        first.die()
        await settle()
        assert [(each.request_id, each.params.max_tokens, each.answered) for each in second.sent] == [("p", 9, [])]
        assert frontend.num_sent_again == 1

    run(monkeypatch, scenario, names=("a", "b"), prefill_replicas=1)


def held_for(asked):
    root = root_digest(FACTS.fingerprint, FACTS.kv_format_name, FACTS.numerics, str(Namespace("default")))
    digests = []
    extend_chain(digests, root, asked.prompt_token_ids, FACTS.block_size)
    return Held(stored=b"".join(digest[:DIGEST_BYTES] for digest in digests), token_s=1e-3)


def test_replicas_that_compute_other_bits_are_named_once(monkeypatch, caplog):
    async def scenario(fleet, links, frontend):
        other = msgspec.structs.replace(FACTS, numerics="another")
        for name in ("b", "c"):
            fleet.note_listed({*links, name})
            new = RecordedLink.opened[-1]
            new.facts = other
            fleet.note_facts(new, other)
        assert len([record for record in caplog.records if "other bits" in record.message]) == 1

    run(monkeypatch, scenario)
