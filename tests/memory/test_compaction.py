"""Compaction: which frames are moved where, what they displace, and when it is not worth it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pagemill.memory.digest import extend_chain, root_digest
from pagemill.memory.manager import MemoryManager

ROOT = root_digest(b"model", "float32", "reference", "")
SIZE = 4


def opened(memory, tokens=()):
    digests = []
    extend_chain(digests, ROOT, tokens, SIZE)
    return memory.open(list(tokens), digests, ROOT, 0.0, len(tokens)).table


def frames_of(memory, table):
    return memory.frames(table, 0)


def interleaved(memory, blocks=20, tables=2):
    """Tables that grow in turn, block by block, each in pieces of one region of the pool."""
    grown = [opened(memory) for _ in range(tables)]
    for row, table in enumerate(grown):
        memory.place(table, row)
    for count in range(1, blocks + 1):
        for table in grown:
            assert memory.reserve(table, count * SIZE) is None
            memory.commit(table, count * SIZE, [], [])
    memory.drain(1)
    memory.retire(1)
    return grown


def steps_apart(frames):
    return sum(there != here + 1 for here, there in pairwise(frames))


def compaction_of(memory, payback_steps):
    memory.compaction.payback_steps = payback_steps
    return memory.compaction


def test_a_scattered_table_becomes_neighbours_and_the_device_learns_it():
    memory = MemoryManager(64, SIZE, [None])
    one, other = interleaved(memory)
    before, beside = frames_of(memory, one), frames_of(memory, other)
    assert steps_apart(before) == 2
    compaction = compaction_of(memory, 1)
    copies = compaction.compact(one, steps_left=40, max_copies=64)
    after = frames_of(memory, one)
    assert steps_apart(after) == 0
    assert frames_of(memory, other) == beside
    assert copies == sum(was != now for was, now in zip(before, after, strict=True))
    assert (compaction.copies, compaction.sequences) == (copies, 1)
    work = memory.drain(2)
    assert set(zip(work.copy_source.tolist(), work.copy_target.tolist(), strict=True)) == {
        pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]
    }
    told = dict(zip(work.edit_index.tolist(), work.edit_frame.tolist(), strict=True))
    assert [told.get(entry, frame) for entry, frame in enumerate(before)] == after
    memory.retire(2)
    memory.check()
    assert memory.stats().frames_free == 24


def test_what_is_cached_changes_places_and_is_still_found():
    memory = MemoryManager(40, SIZE, [None])
    tokens = list(range(20 * SIZE))
    one, other = interleaved(memory)
    digests = []
    extend_chain(digests, ROOT, tokens, SIZE)
    memory.commit(other, len(tokens), tokens, digests)
    content = dict(enumerate(frames_of(memory, other)))
    memory.close(other, 1.0)
    assert memory.stats().frames_free == 0
    copies = compaction_of(memory, 1).compact(one, steps_left=99, max_copies=64)
    assert copies > 20
    assert steps_apart(frames_of(memory, one)) == 0
    work = memory.drain(2)
    lies_in = {frame: entry for entry, frame in content.items()}
    for source, target in zip(work.copy_source.tolist(), work.copy_target.tolist(), strict=True):
        lies_in[target] = lies_in.get(source)
    memory.retire(2)
    memory.check()
    assert memory.stats().evictions == 1, "one block makes room through which the others change places"
    again = opened(memory, tokens)
    assert again.length == 19 * SIZE
    assert [lies_in[frame] for frame in frames_of(memory, again)] == list(range(19))


def test_it_runs_only_when_it_pays():
    memory = MemoryManager(64, SIZE, [None])
    one, _ = interleaved(memory)
    compaction = compaction_of(memory, 10)
    mended = steps_apart(frames_of(memory, one))
    least = next(steps for steps in range(1000) if compaction.compact(one, steps, 64))
    assert steps_apart(frames_of(memory, one)) == 0
    assert mended * (least - 1) <= 10 * compaction.copies < mended * least


def test_it_takes_no_more_copies_than_it_may():
    memory = MemoryManager(64, SIZE, [None])
    one, _ = interleaved(memory)
    compaction = compaction_of(memory, 1)
    assert compaction.compact(one, 99, max_copies=2) == 0
    assert not memory.has_copies


@pytest.mark.parametrize(("payback_steps", "max_copies", "made"), [(1, 4, 4), (1, 3, 0), (30, 4, 4), (45, 4, 0)])
def test_what_has_to_make_way_twice_counts_twice(payback_steps, max_copies, made):
    """The table's frames are 0, 2, 4, and are to be 1, 2, 3. What is cached in 1 can only go to 3 at first. Two pairs
    more that are neighbours save 2 x 80 in 80 steps."""
    memory = MemoryManager(5, SIZE, [None])
    tokens = [1] * SIZE
    one, other = opened(memory), opened(memory, tokens)
    digests: list[bytes] = []
    extend_chain(digests, ROOT, tokens, SIZE)
    assert memory.reserve(one, 3 * SIZE) is None
    memory.place(one, 0)
    assert memory.reserve(other, SIZE) is None
    memory.commit(other, SIZE, tokens, digests)
    for block, frame in zip((*one.blocks[0], *other.blocks[0]), (0, 2, 4, 1), strict=True):
        memory.core.blocks.frame[block] = frame
    memory.core.frames.give([frame for frame in range(5) if not memory.core.frames.is_free(frame)])
    memory.core.frames.claim([0, 1, 2, 4])
    memory.close(other, 1.0)
    memory.check()
    assert compaction_of(memory, payback_steps).compact(one, 80, max_copies) == made
    assert frames_of(memory, one) == ([1, 2, 3] if made else [0, 2, 4])
    assert len(memory.drain(2).copy_source) == made
    memory.retire(2)
    memory.check()


def test_what_others_hold_and_what_a_step_in_flight_reads_stays():
    memory = MemoryManager(64, SIZE, [None])
    one, other = interleaved(memory)
    memory.drain(2)
    compaction = compaction_of(memory, 1)
    assert compaction.compact(one, 99, 64) == 0
    memory.retire(2)
    child = memory.fork(one, one.length)
    assert compaction.compact(one, 99, 64) == 0
    memory.close(child, 1.0)
    beside = frames_of(memory, other)
    assert compaction.compact(one, 99, 64) > 0
    assert frames_of(memory, other) == beside


def test_what_is_shared_leaves_the_rest_to_move():
    memory = MemoryManager(64, SIZE, [None])
    one, _ = interleaved(memory)
    child = memory.fork(one, 4 * SIZE)
    shared = frames_of(memory, child)
    assert compaction_of(memory, 1).compact(one, 99, 64) > 0
    assert frames_of(memory, child) == shared == frames_of(memory, one)[:4]
    assert steps_apart(frames_of(memory, one)[4:]) == 0
