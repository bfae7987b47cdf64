"""The fleet among replicas that come, rest, come back and go. Links are recorded instead of being Ray's."""

import asyncio

import msgspec
import pytest
from recorded_fleet import FACTS, RecordedLink, failures, request, run, settle

from pagemill import SamplingParams
from pagemill.distributed import answers
from pagemill.distributed import fleet as fleet_module
from pagemill.distributed.fleet_tenancy import FleetTenancy
from pagemill.engine.messages import (
    DIGEST_BYTES,
    AbortRequests,
    Held,
    HeldBlocks,
    SequenceOutput,
)
from pagemill.engine.queries import PinsQuery, SetTenant, StatsQuery
from pagemill.errors import ConfigError
from pagemill.frontend.supervisor import RestartLimits
from pagemill.memory.digest import extend_chain, root_digest
from pagemill.namespace import Namespace
from pagemill.tenant_limits import TenantLimits


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
        assert fleet.max_num_seqs == 2 * fleet.facts.max_num_seqs
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


def test_of_requests_that_wait_for_their_tenant_the_first_alone_is_tried_again(monkeypatch):
    async def scenario(fleet, links, frontend):
        await fleet.ask(SetTenant("team", TenantLimits(max_running=1)))
        for number in range(9):
            fleet.submit(request(f"team{number}", tenant="team"))
        tried, place = [], FleetTenancy.place

        def recorded(tenancy, request_id, *more):
            tried.append(request_id)
            return place(tenancy, request_id, *more)

        monkeypatch.setattr(FleetTenancy, "place", recorded)
        await fleet.ask(SetTenant("team", TenantLimits(max_running=1)))
        assert tried == ["team1"]
        await fleet.ask(SetTenant("team", TenantLimits(max_running=3)))
        assert tried[1:] == ["team1", "team2", "team3"]
        assert links["a"].requests == ["team0", "team1", "team2"]

    run(monkeypatch, scenario)


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


@pytest.mark.parametrize("query", [StatsQuery(), PinsQuery(), SetTenant("team", TenantLimits())])
def test_a_silent_replica_holds_up_no_question_and_is_named_once(monkeypatch, caplog, query):
    monkeypatch.setattr(answers, "ANSWER_S", 0.05)

    async def scenario(fleet, links, frontend):
        links["b"].answers.clear()
        for _ in range(2):
            await asyncio.wait_for(fleet.ask(query), 1)
        assert [record.message for record in caplog.records] == [
            "replica b is silent; what is asked is answered without it"
        ]
        links["b"].answers.set()
        await settle()
        assert links["b"].asked == [query] * 2

    run(monkeypatch, scenario, names=("a", "b"))


def test_a_question_that_no_replica_answers_waits_for_the_first_that_does(monkeypatch):
    monkeypatch.setattr(answers, "ANSWER_S", 0.01)

    async def scenario(fleet, links, frontend):
        for link in links.values():
            link.answers.clear()
        asking = asyncio.create_task(fleet.ask(StatsQuery()))
        await asyncio.sleep(0.05)
        links["a"].die()
        links["a"].answers.set()
        await asyncio.sleep(0.05)
        assert not asking.done(), "health is to see that nobody answers"
        links["b"].answers.set()
        await asyncio.wait_for(asking, 1)

    run(monkeypatch, scenario, names=("a", "b", "c"))


def test_what_a_silent_replica_refuses_later_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(answers, "ANSWER_S", 0.01)

    async def scenario(fleet, links, frontend):
        links["b"].answers.clear()
        await asyncio.wait_for(fleet.ask(SetTenant("team", TenantLimits())), 1)
        links["b"].refusal = ConfigError("too much")
        links["b"].answers.set()
        await settle()
        assert caplog.records[-1].message == "replica b could not do what the others have: too much"

    run(monkeypatch, scenario, names=("a", "b"))
