"""Samples and beams in the simulator: the real forks, the same in every replay, and no frame lost."""

from __future__ import annotations

import pytest

from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.scheduler import Scheduler
from pagemill.simulate.simulator import replay
from pagemill.simulate.step_time import COSTS, KVShape, StepTimes
from pagemill.simulate.trace import TracedRequest

TIMES = StepTimes({**dict.fromkeys(COSTS, 0.0), "step": 1.0}, KVShape((None,), 2, 64, 2), {})


def serve(frames, caching=True, **asked):
    memory = MemoryManager(frames, 4, [None])
    scheduler = Scheduler(
        memory,
        max_num_seqs=12,
        max_num_batched_tokens=32,
        eos_token_ids=frozenset(),
        ageing_s=10.0,
        enable_prefix_caching=caching,
    )
    trace = [TracedRequest(i, 0.9 * i, 3 + 5 * i % 23, 2 + 7 * i % 11, **asked) for i in range(20)]
    held = []

    def look(plan, seconds):
        entries = sum(sequence.table.num_held for sequence in scheduler.state.running)
        held.append((memory.stats().frames_active, entries))

    outcome = replay(trace, scheduler, TIMES, [look])
    assert not scheduler.has_work()
    memory.check()
    assert memory.stats().frames_active == 0
    return outcome, held


@pytest.mark.parametrize("asked", [{"n": 4}, {"n": 2, "best_of": 4}, {"beam_width": 4}])
@pytest.mark.parametrize("frames", [24, 512])
def test_all_branches_get_their_tokens_and_share(asked, frames):
    outcome, held = serve(frames, **asked)
    assert [one.num_tokens for one in outcome.served] == [4 * one.request.output_len for one in outcome.served]
    assert len(outcome.finished) == 20
    assert sum(one.starts - 1 for one in outcome.served) == outcome.preemptions
    assert (outcome.preemptions > 0) == (frames == 24)
    assert sum(frames for frames, _ in held) < sum(entries for _, entries in held), "nothing was shared"
    assert (outcome, held) == serve(frames, **asked)


@pytest.mark.parametrize("asked", [{"n": 4}, {"beam_width": 4}])
def test_answers_share_nothing_by_chance(asked):
    found, forked = (serve(512, caching, **asked)[1] for caching in (True, False))
    assert found == forked


def test_a_later_prompt_continues_the_first_answer():
    times = StepTimes({**dict.fromkeys(COSTS, 0.0), "step": 0.01}, KVShape((None,), 2, 64, 2), {})
    memory = MemoryManager(2048, 16, [None])
    scheduler = Scheduler(memory, max_num_seqs=12, max_num_batched_tokens=512, eos_token_ids=frozenset(), ageing_s=10.0)
    first = TracedRequest(0, 0.0, 500, 100, (0,), (0, 1), n=4)
    second = TracedRequest(1, 100.0, 700, 10, (0, 1))
    outcome = replay([first, second], scheduler, times)
    assert outcome.served[1].num_cached_tokens == 599 // 16 * 16


def test_the_best_of_several_come_at_the_end():
    outcome, _ = serve(512, n=2, best_of=4)
    assert all(one.first_token_s == one.finished_s and one.tpot_s is None for one in outcome.served)
    assert not outcome.gaps_s
    answered = sum(2 * one.request.output_len for one in outcome.served)
    assert outcome.goodput_tokens_per_s * outcome.end_s == pytest.approx(answered)
