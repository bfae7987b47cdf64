"""Checks where a pool's memory goes: by hand in a tiny case, and at each moment of a replay by counting every slot."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import pytest
from benchmarks.replay.contiguous import PLACEMENTS, RESERVATIONS, ContiguousMemory, root_of
from benchmarks.replay.pool_meter import Parts, contiguous_meter, paged_meter

from pagemill.planner.replica import Setup
from pagemill.simulate.simulator import replay
from pagemill.simulate.step_time import COSTS, KVShape, StepTimes
from pagemill.simulate.trace import TracedRequest

SHAPE = KVShape((None,), 1, 64, 2)
SLOT = int(SHAPE.slot_bytes)
TIMES = StepTimes({**dict.fromkeys(COSTS, 0.0), "step": 1.0}, SHAPE, {})


def contiguous(trace, slots, reservation, placement, longest):
    wanted = {root_of(request): RESERVATIONS[reservation](request, longest) for request in trace}
    memory = ContiguousMemory(slots, PLACEMENTS[placement](slots), wanted.__getitem__)
    scheduler = Setup(slots * SLOT).scheduler(memory, caching=False)
    return scheduler, contiguous_meter(scheduler, memory, SLOT, slots * SLOT)


def slots_of(parts: Parts) -> dict[str, float]:
    return {name: count / SLOT for name, count in asdict(parts).items() if count}


def test_a_tiny_case_is_as_by_hand():
    """Of 20 slots one request reserves 12, of which it fills 5 and then 2; the next needs 10 and waits for the 8."""
    trace = [TracedRequest(0, 0.0, 5, 3), TracedRequest(1, 0.0, 8, 2)]
    scheduler, meter = contiguous(trace, 20, "maximum", "first fit", 12)
    seen = []
    replay(trace, scheduler, TIMES, [meter, lambda plan, seconds: seen.append(slots_of(meter.now()))], root=root_of)
    assert seen == [
        {"ahead": 7, "internal": 5, "external": 8},
        {"tokens": 5, "ahead": 2, "internal": 5, "external": 8},
        {"tokens": 6, "ahead": 1, "internal": 5, "external": 8},
        {"ahead": 9, "internal": 3, "idle": 8},
        {"tokens": 8, "ahead": 1, "internal": 3, "idle": 8},
    ]
    assert slots_of(meter.parts) == {"tokens": 19, "ahead": 20, "internal": 21, "external": 24, "idle": 16}
    assert meter.parts.shares()["tokens"] == 0.19


def test_the_last_block_of_a_sequence_is_ahead_or_internal():
    trace = [TracedRequest(0, 0.0, 5, 6)]
    setup = Setup(4 * SHAPE.frame_bytes(8), block_size=8)
    memory = setup.memory(TIMES)
    scheduler = setup.scheduler(memory)
    meter = paged_meter(scheduler, memory, SHAPE, setup.kv_bytes)
    seen = []
    replay(trace, scheduler, TIMES, [lambda plan, seconds: seen.append(slots_of(meter.now()))])
    assert seen == [
        {"ahead": 8, "idle": 24},
        {"tokens": 5, "ahead": 3, "idle": 24},
        {"tokens": 6, "ahead": 2, "idle": 24},
        {"tokens": 7, "ahead": 1, "idle": 24},
        {"tokens": 8, "ahead": 2, "internal": 6, "idle": 16},
        {"tokens": 9, "ahead": 1, "internal": 6, "idle": 16},
    ]


def recount(scheduler, runs, slots):
    """Names each slot's part, from where sequences lie. runs: of a table, the slots that it has, in order."""
    parts = {}
    for one in scheduler.state.running:
        for position, slot in enumerate(runs(one.table)):
            filled = one.prompt_len + one.request.params.max_tokens - 1
            part = "tokens" if position < one.table.length else "ahead" if position < filled else "internal"
            assert parts.setdefault(slot, part) == part, "shared blocks are full"
    return Counter(parts.get(slot, "free") for slot in range(slots))


@pytest.mark.parametrize("kind", ["paged", "maximum", "power of two", "exact"])
def test_the_parts_are_the_whole_pool_at_every_moment(kind):
    trace = [TracedRequest(i, 0.1 * i, 20 + 7 * i % 31, 1 + 11 * i % 40, hash_ids=(i % 3,)) for i in range(60)]
    slots = 800
    if kind == "paged":
        setup = Setup(slots * SLOT, block_size=16)
        memory = setup.memory(TIMES)
        scheduler = setup.scheduler(memory)
        meter = paged_meter(scheduler, memory, SHAPE, setup.kv_bytes)

        def runs(table):
            return [16 * block + offset for block in table.blocks[0] for offset in range(16)]
    else:
        scheduler, meter = contiguous(trace, slots, kind, "buddy", max(request.length for request in trace))
        memory = scheduler.memory

        def runs(table):
            start, count = memory.extent(table)
            return range(start, start + count)

    seen = Counter()

    def look(plan, seconds):
        parts = slots_of(meter.now())
        counted = recount(scheduler, runs, slots)
        free = parts.pop("external", 0) + parts.pop("idle", 0)
        assert {**parts, **({"free": free} if free else {})} == pytest.approx(dict(counted))
        seen.update(slots_of(meter.now()).keys())

    root = {} if kind == "paged" else {"root": root_of}
    replay(trace, scheduler, TIMES, [look], **root)
    assert seen.keys() >= {"tokens", "ahead", "external", "idle"}
    assert ("internal" in seen) or kind == "exact"
