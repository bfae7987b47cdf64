"""Blocks that change their frames: pools that are resized, streamed blocks, and what a frame has lost."""

from __future__ import annotations

import pytest
from stepped_memory import ROOT, SIZE, Engine, tokens_of

from pagemill.memory.digest import extend_chain
from pagemill.memory.manager import MemoryManager, Shortage
from pagemill.memory.tenants import Quota


def test_a_pool_shrinks_under_its_tables_and_grows_again():
    engine = Engine(12)
    gone, _ = engine.prefill(tokens_of(16, 100))
    second, _ = engine.prefill(tokens_of(16, 50))
    first, _ = engine.prefill(tokens_of(16))
    engine.memory.place(second, 0)
    engine.memory.drain(4)
    engine.memory.retire(4)
    engine.close(gone)
    before = engine.frames(second)
    assert max(before) >= 8
    assert engine.memory.resize(8) is None
    engine.memory.check()
    work = engine.memory.drain(5)
    moved = dict(zip(work.copy_source.tolist(), work.copy_target.tolist(), strict=True))
    after = engine.frames(second)
    assert after == [moved.get(frame, frame) for frame in before]
    edits = zip(work.edit_row.tolist(), work.edit_index.tolist(), work.edit_frame.tolist(), strict=True)
    assert list(edits) == [(0, entry, frame) for entry, frame in enumerate(after) if frame != before[entry]]
    assert max(engine.frames(first) + after) < 8
    engine.memory.retire(5)
    engine.steps = 5
    assert engine.memory.resize(7) == Shortage(8, 7)
    engine.close(first)
    assert engine.open(tokens_of(16)).num_cached_tokens == 15
    assert engine.memory.resize(20) is None
    engine.prefill(tokens_of(48, 200))
    assert engine.memory.stats().frames == 20


def test_what_is_evicted_before_it_was_moved_is_not_saved_from_where_it_is_not_yet():
    memory = MemoryManager(4, SIZE, [None], saves_evicted=True)
    tables = [memory.open([], [], ROOT, 0.0, 0).table for _ in range(2)]
    for table, blocks in zip(tables, (1, 2), strict=True):
        assert memory.reserve(table, blocks * SIZE) is None
    tokens, digests = tokens_of(2 * SIZE), []
    extend_chain(digests, ROOT, tokens, SIZE)
    memory.commit(tables[1], 2 * SIZE, tokens, digests)
    assert memory.frames(tables[1], 0) == [1, 2]
    for table in tables:
        memory.close(table, 0.0)
    assert memory.resize(2) is None
    memory.set_quotas({"default": Quota(0, 1)})
    assert memory.stats().evictions == 1, "the block that is to be moved from frame 2 to 0"
    assert memory.take_saves() == []
    memory.drain(0)
    memory.retire(0)
    assert [save.frame for save in memory.cached_blocks()] == [1]
    memory.check()


def test_a_pool_is_not_resized_under_a_step():
    engine = Engine(4)
    engine.memory.drain(1)
    with pytest.raises(ValueError, match="in flight"):
        engine.memory.resize(8)
    engine.memory.retire(1)
    with pytest.raises(ValueError, match="num_frames=0"):
        engine.memory.resize(0)


def test_scatter_counts_the_steps_that_do_not_lead_to_a_neighbour():
    engine = Engine(8)
    first, _ = engine.prefill(tokens_of(12))
    second, _ = engine.prefill(tokens_of(8, 100))
    assert engine.memory.scatter() == (3, 0)
    engine.step(first, tokens_of(16), 16)  # behind it stands the other
    assert engine.frames(first) == [0, 1, 2, 5]
    assert engine.memory.scatter() == (4, 1)
    engine.close(first)
    engine.close(second)
    assert engine.memory.scatter() == (0, 0)


def test_a_streamed_block_is_copied_into_the_pool_before_it_is_written():
    """Never taken back to be written in place, as a published block in the pool is when there is no room for a copy."""
    engine = Engine(8, streamed_frames=(100, 8))
    table, _ = engine.prefill(tokens_of(4 * SIZE))
    assert engine.memory.stream(table, 3)
    engine.steps += 1
    engine.memory.drain(engine.steps)
    engine.memory.retire(engine.steps)
    engine.close(table)
    others, _ = engine.prefill(tokens_of(8 * SIZE, first=1000))
    inside = SIZE + SIZE // 2
    leaves, found = engine.open([*tokens_of(inside), 7777])
    assert (found, engine.frames(leaves)) == (inside, [100, 101])
    assert engine.memory.reserve(leaves, inside + 1) == Shortage(1, 0)
    engine.close(others)
    engine.memory.place(leaves, 0)
    assert engine.memory.reserve(leaves, inside + 1) is None
    assert engine.frames(leaves)[1] < 8
    engine.memory.check()


def test_whole_blocks_are_streamed_the_oldest_first_and_not_under_a_step():
    memory = MemoryManager(8, SIZE, [None], streamed_frames=(100, 8))
    table = memory.open([], [], ROOT, 0.0, 0).table
    assert memory.reserve(table, 2 * SIZE + 1) is None
    memory.drain(0)
    memory.commit(table, 2 * SIZE + 1, list(range(2 * SIZE + 1)), [])
    assert not memory.stream(table, 1), "the step may still read them"
    memory.retire(0)
    assert not memory.stream(table, 3), "the third block is being written"
    for streamed in (1, 2):
        assert memory.stream(table, 1)
        assert [frame >= 100 for frame in memory.frames(table, 0)] == [True] * streamed + [False] * (3 - streamed)
        memory.check()
    assert not memory.stream(table, 1)
    memory.close(table, 0.0)
    memory.check()


def test_what_is_lost_before_it_is_saved_is_not_saved():
    memory = MemoryManager(2, SIZE, [None], saves_evicted=True)
    tokens, digests = list(range(2 * SIZE)), []
    extend_chain(digests, ROOT, tokens, SIZE)
    table = memory.open([], [], ROOT, 0.0, 0).table
    assert memory.reserve(table, 2 * SIZE) is None
    memory.drain(0)
    memory.commit(table, 2 * SIZE, tokens, digests)
    memory.retire(0)
    memory.close(table, 0.0)
    memory.resize(1)
    (evicted,) = memory.core.saves
    memory.forget_lost({1 - evicted.frame})
    assert memory.core.saves == [evicted]
    memory.forget_lost({evicted.frame})
    assert memory.take_saves() == []


@pytest.mark.parametrize("ids", ["rise", "fall"])
def test_what_hangs_on_a_lost_block_is_forgotten_with_it(ids):
    engine = Engine(16)
    memory = engine.memory
    if ids == "fall":  # the id that came free last is given out first
        tables = [memory.open([], [], ROOT, 0.0, 0).table for _ in range(16)]
        for table in tables:
            assert memory.reserve(table, 1) is None
        for table in tables:
            memory.close(table, 0.0)
    tokens, lost = list(range(9)), list(range(10, 23))
    kept, _ = engine.prefill(tokens)
    table, _ = engine.prefill(lost)
    beginning, end, *_ = table.blocks[0]
    assert (beginning < end) == (ids == "rise")
    engine.close(table)
    assert memory.stats().frames_cached == 3
    memory.forget_lost({memory.core.blocks.frame[beginning]})
    memory.check()
    assert memory.stats().frames_cached == 0
    engine.close(kept)
    assert engine.open(lost).num_cached_tokens == 0
    assert engine.open(tokens).num_cached_tokens == 8
