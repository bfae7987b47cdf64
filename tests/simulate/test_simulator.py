"""The simulated loop over the real scheduler and memory: nothing is lost, and the same replay every time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.scheduler import Scheduler
from pagemill.simulate.simulator import WasteMeter, replay
from pagemill.simulate.step_time import COSTS, KVShape, StepTimes
from pagemill.simulate.trace import TracedRequest

SHAPE = KVShape((None, None), 2, 64, 2)
TRACE = [TracedRequest(i, 0.9 * i, 3 + 5 * i % 23, 1 + 7 * i % 11) for i in range(40)]


def times(**seconds_of: float) -> StepTimes:
    return StepTimes({**dict.fromkeys(COSTS, 0.0), "step": 1.0, **seconds_of}, SHAPE, {})


def engine(frames=64, block_size=4, windows=(None,)) -> Scheduler:
    memory = MemoryManager(frames, block_size, list(windows))
    return Scheduler(memory, max_num_seqs=4, max_num_batched_tokens=16, eos_token_ids=frozenset(), ageing_s=10.0)


def test_every_request_gets_its_tokens_and_all_frames_come_back():
    scheduler = engine(frames=11)
    clock = []
    outcome = replay(TRACE, scheduler, times(), [lambda plan, seconds: clock.append(seconds)])
    assert [one.num_tokens for one in outcome.served] == [request.output_len for request in TRACE]
    assert len(outcome.finished) == len(TRACE)
    assert outcome.preemptions > 0, "the pool is meant to be short"
    assert sum(one.starts - 1 for one in outcome.served) == outcome.preemptions
    for one in outcome.served:
        assert one.request.arrival_s < one.first_token_s <= one.finished_s <= outcome.end_s
    assert outcome.steps == len(clock)
    assert outcome.busy_s == pytest.approx(sum(clock))
    assert outcome.busy_s <= outcome.end_s
    assert not scheduler.has_work()
    scheduler.memory.check()
    assert scheduler.memory.stats().frames_active == 0
    assert scheduler.memory.occupancy() == (0, 0)


def test_a_replay_is_the_same_every_time():
    assert replay(TRACE, engine(16), times(row=0.1)) == replay(TRACE, engine(16), times(row=0.1))
    assert replay(TRACE, engine(16), times(row=0.1)).end_s != replay(TRACE, engine(16), times(row=0.2)).end_s


def test_an_idle_engine_waits_for_the_next_arrival():
    trace = [TracedRequest(0, 0.0, 4, 2), TracedRequest(1, 100.0, 4, 3)]
    outcome = replay(trace, engine(), times())
    assert [(one.first_token_s, one.finished_s) for one in outcome.served] == [(1.0, 2.0), (101.0, 103.0)]
    assert [one.tpot_s for one in outcome.served] == [1.0, 1.0]
    assert outcome.busy_s == 5.0
    assert outcome.output_tokens_per_s == 5 / 103


def test_a_request_that_can_never_run_is_refused_and_the_others_go_on():
    trace = [TracedRequest(0, 0.0, 100, 2), TracedRequest(1, 0.0, 4, 2)]
    outcome = replay(trace, engine(frames=4), times())
    assert [one.refused for one in outcome.served] == [True, False]
    assert [one.request.number for one in outcome.finished] == [1]


def test_it_stops_when_told():
    outcome = replay(TRACE, engine(), times(), until_s=10.0)
    assert outcome.end_s == 10.0
    assert len(outcome.finished) < len(outcome.served) < len(TRACE)


def test_equal_hash_ids_share_and_others_do_not():
    def request(number, arrival_s, *hash_ids):
        return TracedRequest(number, arrival_s, 512 * len(hash_ids) - 12, 2, hash_ids)

    trace = [request(0, 0.0, 7, 8), request(1, 500.0, 7, 9), request(2, 1000.0, 9, 7), request(3, 1500.0, 7, 8)]
    outcome = replay(trace, engine(frames=2048), times())
    # All of the last prompt is known, and one token is always computed.
    assert [one.num_cached_tokens for one in outcome.served] == [0, 512, 0, 1011]


def test_answers_are_nobodys_prefix():
    trace = [TracedRequest(i, 300.0 * i, 512, 64, (5,)) for i in range(2)]
    assert [one.num_cached_tokens for one in replay(trace, engine(frames=512), times()).served] == [0, 511]
    assert len(set(trace[0].prompt())) == 1


def test_waste_of_one_sequence():
    scheduler = engine()
    meter = WasteMeter(scheduler.memory, SHAPE)
    replay([TracedRequest(0, 0.0, 6, 3)], scheduler, times(), [meter])
    # Steps of one second: the prompt (2 blocks; 0 committed, 6 in work), then 6 + 1 and 7 + 1 of 8 slots.
    slot = SHAPE.slot_bytes
    assert SHAPE.frame_bytes(4) == 4 * slot, "no padding"
    assert meter.reserved == 3 * 2 * SHAPE.frame_bytes(4)
    assert meter.written == (0 + 6 + 7) * slot
    assert meter.uncommitted == pytest.approx(1 - 13 / 24)
    assert meter.waste == pytest.approx(1 - 21 / 24)


def test_a_shared_block_is_counted_once():
    scheduler = engine(frames=1024, block_size=16)
    held = []

    def look(plan, seconds):
        found = scheduler.memory.occupancy()
        tables = scheduler.memory.core.tables
        held.append(
            (found.slots_reserved, found.slots_written, sum(16 * table.num_held for table in tables), len(tables))
        )

    trace = [TracedRequest(0, 0.0, 512, 60, (3,)), TracedRequest(1, 40.0, 512, 60, (3,))]
    replay(trace, scheduler, times(), [look])
    reserved, written, by_tables, tables = max(held, key=lambda row: row[3])
    assert tables == 2
    assert by_tables - reserved == 31 * 16, "all but the last block of the prompt, which the second one copied"
    assert reserved - 32 < written <= reserved


def test_windows_and_every_step_are_counted_from_the_tables():
    scheduler = engine(frames=256, windows=(None, 8))
    shape = replace(SHAPE, windows=(None, 8))

    def recount(plan, seconds):
        found = scheduler.memory.occupancy()
        tables = scheduler.memory.core.tables
        assert found.slots_reserved == sum(4 * table.num_held for table in tables)
        held = sum(
            min(4, max(0, table.length - 4 * entry))
            for table in tables
            for entries, first in zip(table.blocks, table.first_held, strict=True)
            for entry in range(first, len(entries))
        )
        assert found.slots_written == held

    replay(TRACE, scheduler, replace(times(), shape=shape), [recount])


def test_a_request_fails_when_its_timeout_is_over_and_gives_back_what_it_held():
    trace = [replace(request, timeout=None if request.number % 3 else 4.5) for request in TRACE]
    scheduler = engine(frames=16)
    outcome = replay(trace, scheduler, times())
    assert not scheduler.has_work()
    scheduler.memory.check()
    assert scheduler.memory.stats().frames_active == 0
    late = [one for one in outcome.served if one.timed_out]
    assert late
    assert len(late) < sum(request.timeout is not None for request in trace)
    assert all(one.finished_s is None and one.request.timeout for one in late)
    assert all(one.finished_s <= one.request.deadline_s for one in outcome.finished)
    assert len(late) + len(outcome.finished) == len(trace)
    answered = sum(one.request.output_len for one in outcome.finished)
    assert outcome.goodput_tokens_per_s == pytest.approx(answered / outcome.end_s)
    assert outcome.goodput_tokens_per_s < outcome.output_tokens_per_s


def test_an_answer_that_ends_with_its_deadline_is_in_time():
    # Steps of one second: the first token at 1, the last at 3.
    for timeout, ended in ((3.0, True), (2.9, False)):
        (one,) = replay([TracedRequest(0, 0.0, 4, 3, timeout=timeout)], engine(), times()).served
        assert (one.finished_s is not None, one.timed_out) == (ended, not ended)
        assert one.first_token_s == 1.0
