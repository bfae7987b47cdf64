"""The fleet's statistics: counters go on whatever becomes of replicas, gauges are those of the living."""

import asyncio

import pytest
from recorded_fleet import RecordedLink, request, run, settle, stats

from pagemill.distributed import answers, fleet_stats
from pagemill.distributed import fleet as fleet_module
from pagemill.distributed.fleet_stats import FleetStats
from pagemill.engine.queries import StatsQuery
from pagemill.server.routes.metrics import Metrics


def counted(figures):
    """Returns a counter of each shape, which all have the same value."""
    (value,) = {
        figures.steps,
        figures.stalled_s,
        figures.fetches_failed["cut"],
        figures.accepted_per_position[0],
        figures.tenants["team"].preemptions,
    }
    return value


async def ask(fleet):
    figures = await fleet.ask(StatsQuery())
    assert figures.tenants["team"].running == figures.running
    return counted(figures), figures.running


def come_again(fleet, count, *names):
    fleet.note_listed({*names})
    link = RecordedLink.opened[-1]
    link.count = count
    link.come()
    return link


def test_counters_go_on_when_a_replica_dies_and_another_comes(monkeypatch):
    async def scenario(fleet, links, frontend):
        links["a"].count, links["b"].count = 10, 5
        assert await ask(fleet) == (15, 2)
        links["a"].die(engine_died=True)
        assert await ask(fleet) == (15, 1)
        come_again(fleet, 1, "b", "c")
        await settle()
        assert await ask(fleet) == (16, 2)

    run(monkeypatch, scenario, names=("a", "b"))


def test_counters_go_on_when_a_replica_rests_and_is_listed_again(monkeypatch):
    async def scenario(fleet, links, frontend):
        links["a"].count, links["b"].count = 10, 5
        assert await ask(fleet) == (15, 2)
        fleet.note_listed({"b"})
        assert await ask(fleet) == (15, 1)
        await settle()
        assert links["a"].death is not None
        assert await ask(fleet) == (15, 1)
        come_again(fleet, 12, "a", "b")
        await settle()
        assert await ask(fleet) == (17, 2)

    run(monkeypatch, scenario, names=("a", "b"))


@pytest.mark.parametrize(("count", "then"), [(11, 16), (3, 18)], ids=["the same engine", "another engine"])
def test_counters_go_on_when_a_replica_is_connected_again(monkeypatch, count, then):
    monkeypatch.setattr(fleet_module, "LINK_AGAIN_S", 0.01)

    async def scenario(fleet, links, frontend):
        links["a"].count, links["b"].count = 10, 5
        assert await ask(fleet) == (15, 2)
        links["a"].die()
        assert await ask(fleet) == (15, 1)
        await asyncio.sleep(0.05)
        assert come_again(fleet, count, "a", "b").name == "a"
        await settle()
        assert await ask(fleet) == (then, 2)
        assert await ask(fleet) == (then, 2)

    run(monkeypatch, scenario, names=("a", "b"))


def test_counters_outlast_all_replicas_and_those_that_went_long_ago(monkeypatch):
    monkeypatch.setattr(fleet_stats, "GONE_KEPT", 2)
    figures = FleetStats()
    for number in range(5):
        figures.note(f"r{number}", stats(10))
        figures.leave(f"r{number}", engine_died=False)
    assert counted(figures.total(set())) == 50
    assert figures.total(set()).running == 0
    figures.note("r4", stats(11))
    assert counted(figures.total({"r4"})) == 51
    figures.note("r4", stats(2))
    figures.leave("r4", engine_died=True)
    figures.note("r4", stats(4))
    assert counted(figures.total({"r4"})) == 57


def test_a_silent_replica_counts_with_what_it_had(monkeypatch):
    monkeypatch.setattr(answers, "ANSWER_S", 0.01)

    async def scenario(fleet, links, frontend):
        links["a"].count, links["b"].count = 10, 5
        assert await ask(fleet) == (15, 2)
        links["b"].answers.clear()
        links["a"].count, links["b"].count = 12, 9
        assert await ask(fleet) == (17, 2)
        links["b"].answers.set()
        await settle()
        assert await ask(fleet) == (21, 2)

    run(monkeypatch, scenario, names=("a", "b"))


@pytest.mark.parametrize("works", [False, True], ids=["idle", "with a request"])
def test_the_only_replica_may_be_replaced_while_it_is_asked(monkeypatch, works):
    async def scenario(fleet, links, frontend):
        if works:
            fleet.submit(request("r"))  # so that it rests, and answers
        links["a"].answers.clear()
        asking = asyncio.create_task(fleet.ask(StatsQuery()))
        await settle()
        come_again(fleet, 0, "b").num_frames = 8
        await settle()
        links["a"].answers.set()
        figures = await asyncio.wait_for(asking, 3)
        assert figures.frames == (64 if works else 8)
        assert b"kv_cache_usage_perc" in Metrics("m").render(figures, (0, 0))

    run(monkeypatch, scenario)
