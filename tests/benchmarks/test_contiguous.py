"""Contiguous reservation: as many requests at once as whole reservations fit, however short they are."""

import pytest
from benchmarks.peers.contiguous import ContiguousMemory

from pagemill.memory.digest import root_digest
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.sequence import Request
from pagemill.scheduling.step_plan import StepResult

RESERVATION, BLOCK = 64, 8
PER_REQUEST = RESERVATION // BLOCK


def run(num_frames, requests, max_tokens=10):
    """Running requests after each step, until all have finished."""
    memory = ContiguousMemory(num_frames, BLOCK, [None], enable_prefix_caching=False, reservation=RESERVATION)
    scheduler = Scheduler(
        memory,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        eos_token_ids=frozenset(),
        ageing_s=10.0,
        enable_prefix_caching=False,
    )
    for number in range(requests):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        prompt = [1, 2, 3]
        root = root_digest(b"model", "kv", "numerics", "")
        scheduler.add(Request(str(number), prompt, params, 0, 0, 0.0, root, len(prompt) + max_tokens))
    running = []
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        running.append(scheduler.num_running)
        samples = len(plan.sample_to)
        scheduler.commit(StepResult([[5]] * samples, [None] * samples), 0.0)
        memory.check()
        assert memory.stats().frames_active == PER_REQUEST * scheduler.num_running
    assert scheduler.preemptions == 0
    return running


@pytest.mark.parametrize(("frames", "at_once"), [(PER_REQUEST, 1), (3 * PER_REQUEST, 3), (4 * PER_REQUEST - 1, 3)])
def test_as_many_run_as_whole_reservations_fit(frames, at_once):
    running = run(frames, requests=5)
    assert max(running) == at_once
    assert running[0] == at_once


def test_a_table_is_one_run_of_frames_from_the_start():
    memory = ContiguousMemory(3 * PER_REQUEST, BLOCK, [None], enable_prefix_caching=False, reservation=RESERVATION)
    root = root_digest(b"model", "kv", "numerics", "")
    for number in range(3):
        table = memory.open([1, 2], [], root, 0.0, 0).table
        memory.place(table, number)
        assert memory.reserve(table, 2) is None
    assert memory.reserve(memory.open([1, 2], [], root, 0.0, 0).table, 2) == (PER_REQUEST, 0)
    work = memory.drain(1)
    assert work.edit_frame.tolist() == list(range(3 * PER_REQUEST))
