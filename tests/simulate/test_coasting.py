"""Sequences that coast: what is simulated is the same to the last bit, however short memory and batches are."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.scheduler import Scheduler
from pagemill.simulate.engine import SimulatedEngine
from pagemill.simulate.simulator import replay
from pagemill.simulate.step_time import COSTS, KVShape, StepTimes
from pagemill.simulate.trace import TracedRequest

SHAPE = KVShape((None, None), 2, 64, 2)
COST = {"step": 0.1, "row": 0.003, "token to 128": 0.001, "logits": 0.002, "pair": 1e-5, "key": 1e-5}
TIMES = StepTimes({**dict.fromkeys(COSTS, 0.0), **COST}, SHAPE, {})

REQUESTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60), st.floats(0, 2), st.integers(0, 2)), min_size=1, max_size=30
)


def scheduler(frames: int, caching: bool, target_s: float | None = None) -> Scheduler:
    return Scheduler(
        MemoryManager(frames, 16, [None]),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        eos_token_ids=frozenset(),
        ageing_s=10.0,
        enable_prefix_caching=caching,
        target_tpot_s=target_s,
    )


def traced(requests) -> list[TracedRequest]:
    """Requests of which some share prompts, and some continue the answer of one before."""
    at, trace = 0.0, []
    for number, (prompt, output, wait_s, kind) in enumerate(requests):
        at += wait_s
        ids = ((), (7,), (8,))[kind]
        trace.append(TracedRequest(number, at, prompt, output, ids, (8,) if kind == 2 else ()))
    return trace


def outcome(trace, one: Scheduler, coasts: bool) -> dict:
    pool = []

    def look(plan, seconds):
        pool.append((seconds, one.memory.num_available, one.num_running, one.num_waiting))

    found = asdict(replay(trace, one, TIMES, [look], coasts=coasts))
    one.memory.check()
    assert not one.has_work()
    return {**found, "gaps_s": sorted(found["gaps_s"]), "recomputed": one.state.recomputed_tokens, "pool": pool}


@settings(max_examples=150, deadline=None)
@given(REQUESTS, st.integers(9, 80), st.booleans(), st.sampled_from([None, 0.12, math.inf]))
def test_sequences_that_coast_get_what_others_get(requests, frames, caching, target_s):
    trace = traced(requests)
    planned, coasted = (outcome(trace, scheduler(frames, caching, target_s), coasts) for coasts in (False, True))
    assert coasted == planned


def test_sequences_that_coast_are_preempted_and_foreseen_as_others_are():
    """A short pool, in which sequences wake to be preempted, or are looked at by a forecast."""
    trace = traced([(40, 60, 0.01, 0)] * 30)
    for target_s in (None, math.inf):
        planned, coasted = (outcome(trace, scheduler(24, True, target_s), coasts) for coasts in (False, True))
        assert coasted == planned
    assert planned["preemptions"] > 0
    assert planned["recomputed"] > 0


@pytest.mark.parametrize(("caching", "rows"), [(True, 1 + 10 * 2), (False, 1 + 10 + 1)])
def test_of_a_blocks_tokens_few_are_planned(monkeypatch, caching, rows):
    """The one that begins it; the one that fills it, where that is named; and an answer's last one."""
    planned = []
    end = SimulatedEngine.end

    def noted(engine, step, now):
        planned.append(len(step.plan.rows))
        return end(engine, step, now)

    monkeypatch.setattr(SimulatedEngine, "end", noted)
    trace = [TracedRequest(0, 0.0, 16, 160 + 1)]
    (one,) = replay(trace, scheduler(64, caching), TIMES, coasts=True).served
    assert one.num_tokens == 161
    assert len(planned) == 161
    assert sum(planned) == rows


def test_a_replay_that_stops_counts_the_tokens_of_who_coasts():
    trace = [TracedRequest(0, 0.0, 16, 100)]
    planned, coasted = (
        replay(trace, scheduler(64, True), TIMES, until_s=2.0, coasts=coasts) for coasts in (False, True)
    )
    assert coasted.served[0].num_tokens == planned.served[0].num_tokens > 5
