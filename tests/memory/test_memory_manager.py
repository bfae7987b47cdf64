"""One behaviour of the memory manager at a time, in examples small enough to follow by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from stepped_memory import OTHER, ROOT, SIZE, Engine, found_whole, tokens_of

from pagemill.memory.digest import extend_chain
from pagemill.memory.eviction import POLICIES, Lru
from pagemill.memory.frames import REGION
from pagemill.memory.manager import Shortage


def test_a_prompt_is_found_again_by_whole_blocks_and_inside_the_last():
    engine = Engine(16)
    first, found = engine.prefill(tokens_of(12))
    assert found == 0
    # The whole prompt is cached, and one token is left to compute: the match ends inside the third block.
    again, found = engine.open(tokens_of(12))
    assert found == again.length == 11
    assert again.blocks == first.blocks
    # Another prompt parts inside the second block.
    other, found = engine.open([0, 1, 2, 3, 4, 5, 99, 7, 8])
    assert found == 6
    assert other.blocks[0] == first.blocks[0][:2]
    assert engine.memory.stats().frames_active == 3


def test_the_longest_of_several_continuations_is_taken():
    engine = Engine(16)
    tables = [engine.prefill([1, 2, 3, 4, *tail])[0] for tail in ([5, 6, 9, 9], [5, 6, 7, 9], [5, 9, 9, 9])]
    table, found = engine.open([1, 2, 3, 4, 5, 6, 7, 8, 1])
    assert found == 7
    assert table.blocks[0][1] == tables[1].blocks[0][1]


def test_the_limit_holds_inside_a_block_and_at_its_border():
    engine = Engine(16)
    engine.prefill(tokens_of(12))
    for limit in range(13):
        table, found = engine.open(tokens_of(12), limit=limit)
        assert found == limit
        engine.close(table)


def test_namespaces_do_not_find_each_other():
    engine = Engine(16)
    engine.prefill(tokens_of(12))
    assert engine.open(tokens_of(12), OTHER).num_cached_tokens == 0
    assert engine.open(tokens_of(12)).num_cached_tokens == 11


def test_peek_counts_full_blocks_and_changes_nothing():
    engine = Engine(16)
    engine.prefill(tokens_of(12))
    digests: list[bytes] = []
    extend_chain(digests, ROOT, [*tokens_of(8), 99, 99, 99, 99], SIZE)
    before = engine.memory.stats()
    assert engine.memory.peek(digests, ROOT) == 2
    assert engine.memory.peek(digests[:1], ROOT) == 1
    assert engine.memory.stats() == before


def test_without_prefix_caching_nothing_is_kept():
    engine = Engine(16, enable_prefix_caching=False)
    table, _ = engine.prefill(tokens_of(12))
    assert engine.open(tokens_of(12)).num_cached_tokens == 0
    engine.close(table)
    assert engine.memory.stats().frames_free == 16


def test_a_fork_takes_a_frame_only_when_it_diverges_and_the_last_holder_writes_in_place():
    engine = Engine(16)
    parent, _ = engine.prefill(tokens_of(6))
    children = [engine.memory.fork(parent, 6) for _ in range(2)]
    assert engine.memory.stats().frames_active == 2
    source = engine.frames(parent)[1]
    for row, child in enumerate(children):
        engine.memory.place(child, row)
        work = engine.step(child, [*tokens_of(6), 10 + row], 7)
        assert (work.copy_source.tolist(), work.copy_target.tolist()) == ([source], [engine.frames(child)[1]])
        edits = dict(zip(work.edit_index.tolist(), work.edit_frame.tolist(), strict=True))
        assert edits[1] == engine.frames(child)[1]
    work = engine.step(parent, [*tokens_of(6), 7], 7)
    assert len(work.copy_source) == 0
    assert engine.frames(parent)[1] == source
    stats = engine.memory.stats()
    assert (stats.frames_active, stats.copies) == (4, 2)


def test_a_fork_at_a_block_border_copies_nothing():
    engine = Engine(16)
    parent, _ = engine.prefill(tokens_of(8))
    child = engine.memory.fork(parent, 8)
    assert len(engine.step(child, tokens_of(9), 9).copy_source) == 0
    assert engine.memory.stats().frames_active == 3


def test_a_published_block_is_copied_before_it_is_written_again():
    engine = Engine(16)
    table, _ = engine.prefill(tokens_of(8))
    published = table.blocks[0][1]
    engine.memory.truncate(table, 6)
    assert len(engine.step(table, [*tokens_of(6), 99], 7).copy_source) == 1
    assert table.blocks[0][1] != published
    assert engine.open(tokens_of(9)).table.blocks[0][1] == published


def test_alone_in_a_full_pool_a_published_block_is_taken_back_instead_of_copied():
    engine = Engine(2)
    table, _ = engine.prefill(tokens_of(8))
    engine.memory.truncate(table, 6)
    before = engine.frames(table)
    work = engine.step(table, [*tokens_of(6), 99], 7)
    assert len(work.copy_source) == 0
    assert engine.frames(table) == before
    assert engine.open(tokens_of(9)).num_cached_tokens == 4


def test_equal_blocks_computed_at_once_become_one():
    engine = Engine(16)
    tables = [engine.open(tokens_of(9)).table for _ in range(2)]
    engine.memory.place(tables[1], 3)
    for table in tables:
        engine.step(table, tokens_of(9), 9)
    assert tables[0].blocks[0][:2] == tables[1].blocks[0][:2]
    assert engine.memory.stats().frames_active == 4
    edits = engine.memory.drain(100)
    assert edits.edit_row.tolist() == [3, 3]
    assert edits.edit_frame.tolist() == engine.frames(tables[0])[:2]


def test_a_sequences_end_is_evicted_before_its_beginning_and_the_least_recent_first():
    engine = Engine(6)
    for first in (0, 100):
        engine.close(engine.prefill(tokens_of(12, first))[0])
    assert engine.memory.stats().frames_cached == 6
    cached = {}
    for frames in range(1, 7):
        table, _ = engine.open([])
        assert engine.memory.reserve(table, frames * SIZE) is None
        cached[frames] = tuple(found_whole(engine, first) for first in (0, 100))
        engine.memory.check()
        engine.close(table)
    # The first table, opened for every size anew, takes back what it freed, so each size evicts one block more.
    assert cached == {1: (2, 3), 2: (1, 3), 3: (0, 3), 4: (0, 2), 5: (0, 1), 6: (0, 0)}
    assert engine.memory.stats().evictions == 6


@pytest.mark.parametrize("policy", POLICIES)
def test_cached_blocks_are_kept_chain_by_chain_each_from_its_beginning_and_the_most_recent_first(policy):
    """So that a chain lies together on disk, and what an engine that is killed meanwhile has kept can be found."""
    engine = Engine(16, policy=POLICIES[policy](0.1))
    tables = [engine.prefill(tokens_of(12, first))[0] for first in (0, 100)]
    for table in (tables[1], engine.prefill([*tokens_of(8, 100), *tokens_of(8, 300)])[0], tables[0]):
        engine.close(table)
    kept = [save.name for save in engine.memory.cached_blocks()]
    assert [name.depth for name in kept] == [0, 1, 2, 0, 1, 2, 3, 2]
    for name, before in zip(kept[1:7], kept[:6], strict=True):
        assert name.parent == before.digest or name.depth == 0
    assert kept[7].parent == kept[4].digest


def test_use_makes_recent():
    engine = Engine(6)
    for first in (0, 100):
        engine.close(engine.prefill(tokens_of(12, first))[0])
    engine.close(engine.open(tokens_of(12), limit=12).table)
    table, _ = engine.open([])
    engine.memory.reserve(table, 3 * SIZE)
    assert (found_whole(engine, 0), found_whole(engine, 100)) == (3, 0)


def test_a_shortage_says_what_was_needed_and_changes_nothing():
    engine = Engine(4)
    engine.close(engine.prefill(tokens_of(4))[0])
    table, _ = engine.prefill(tokens_of(6, 50))
    engine.memory.place(table, 0)
    engine.memory.drain(50)
    engine.memory.retire(50)
    before = engine.memory.stats()
    assert engine.memory.reserve(table, 5 * SIZE) == Shortage(needed=3, available=2)
    assert engine.memory.stats() == before
    assert len(engine.memory.drain(51).edit_row) == 0
    assert found_whole(engine, 0) == 1
    assert engine.memory.reserve(table, 4 * SIZE) is None


def test_a_step_in_flight_holds_what_is_released():
    engine = Engine(4)
    table, _ = engine.prefill(tokens_of(12))
    engine.memory.drain(10)
    engine.memory.drain(11)
    engine.close(table)
    other, _ = engine.open([])
    assert engine.memory.reserve(other, 2 * SIZE) == Shortage(2, 1)
    engine.memory.retire(10)
    assert engine.memory.reserve(other, 2 * SIZE) == Shortage(2, 1)
    # It can be found, meanwhile, and stays found.
    again, found = engine.open(tokens_of(12))
    assert found == 11
    engine.memory.retire(11)
    assert engine.memory.reserve(other, 2 * SIZE) == Shortage(2, 1)
    engine.close(again)
    assert engine.memory.reserve(other, 4 * SIZE) is None
    engine.memory.check()


def test_what_a_step_in_flight_may_read_is_not_written_by_another():
    engine = Engine(16)
    table, _ = engine.prefill(tokens_of(7))
    fork = engine.memory.fork(table, 6)
    engine.memory.drain(10)
    engine.close(table)
    assert engine.memory.reserve(fork, 7) is None
    assert engine.memory.stats().copies == 1


def test_growing_sequences_keep_to_neighbouring_frames():
    engine = Engine(256)
    tables = [engine.open([]).table for _ in range(4)]
    for length in range(1, 25 * SIZE):
        for table in tables:
            engine.memory.reserve(table, length)
    for table in tables:
        frames = engine.frames(table)
        assert sum(after != before + 1 for before, after in pairwise(frames)) <= 25 // REGION


@pytest.mark.parametrize("back", ["fork", "truncate"])
def test_what_is_written_after_going_back_is_published_too(back):
    engine = Engine(16)
    table, _ = engine.prefill(tokens_of(12))
    if back == "fork":
        table = engine.memory.fork(table, 6)
    else:
        engine.memory.truncate(table, 6)
    tokens = [*tokens_of(6), *tokens_of(6, 90)]
    engine.step(table, tokens, 12)
    assert engine.open(tokens).num_cached_tokens == 11


def test_placing_tells_the_device_every_entry_and_closing_forgets_what_was_not_told():
    engine = Engine(16, windows=(None, 4))
    table, _ = engine.prefill(tokens_of(12))
    engine.memory.place(table, 5)
    work = engine.memory.drain(40)
    told = np.full((2, 3), -7)
    told[work.edit_group, work.edit_index] = work.edit_frame
    assert set(work.edit_row.tolist()) == {5}
    assert told.tolist() == [engine.frames(table), [-1, -1, engine.frames(table, 1)[2]]]
    engine.memory.reserve(table, 16)
    engine.memory.drain(41)
    engine.memory.truncate(table, 12)
    work = engine.memory.drain(42)
    assert sorted(zip(work.edit_group.tolist(), work.edit_index.tolist(), work.edit_frame.tolist(), strict=True)) == [
        (0, 3, -1),
        (1, 3, -1),
    ]
    engine.memory.retire(42)
    engine.memory.reserve(table, 16)
    engine.close(table)
    assert len(engine.memory.drain(43).edit_row) == 0


def test_a_policy_of_ones_own_decides():
    class MostRecent(Lru):
        def victim(self) -> int:
            return self._since.popitem()[0]

    engine = Engine(6, policy=lambda chains: MostRecent())
    for first in (0, 100):
        engine.close(engine.prefill(tokens_of(12, first))[0])
    engine.memory.reserve(engine.open([]).table, 3 * SIZE)
    assert (found_whole(engine, 0), found_whole(engine, 100)) == (3, 0)


def test_what_is_wanted_again_soon_after_its_eviction_is_a_ghost_hit():
    engine = Engine(6)
    for first in (0, 100, 0, 200, 0):
        engine.close(engine.prefill(tokens_of(16, first))[0])
    stats = engine.memory.stats()
    assert (stats.evictions, stats.evictions_regretted) == (10, 4)
    for first in range(300, 1000, 100):  # more blocks than the pool has frames: what went before them is forgotten
        engine.close(engine.prefill(tokens_of(16, first))[0])
    engine.close(engine.prefill(tokens_of(16))[0])
    assert engine.memory.stats().evictions_regretted == 4


def test_after_a_resize_ghosts_remember_as_many_blocks_as_the_pool_has():
    engine = Engine(6)

    def evictions_regretted(after: int) -> int:
        """Of a prompt's four blocks, once so many other prompts have come."""
        before = engine.memory.stats().evictions_regretted
        for at in (0, *range(1, after + 1), 0):
            engine.close(engine.prefill(tokens_of(16, at and (engine.steps + at) * 1000))[0])
        return engine.memory.stats().evictions_regretted - before

    assert engine.memory.resize(30) is None
    assert evictions_regretted(after=12) == 4
    assert engine.memory.resize(6) is None
    assert evictions_regretted(after=12) == 0
