"""One behaviour of the memory manager at a time, in examples small enough to follow by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pagemill.errors import MemoryInvariantError
from pagemill.memory.block_table import BlockTable, first_entry_in_window
from pagemill.memory.digest import extend_chain, root_digest
from pagemill.memory.eviction import POLICIES, Lru
from pagemill.memory.frames import REGION
from pagemill.memory.manager import MemoryManager, Shortage
from pagemill.memory.tenants import Quota

ROOT = root_digest(b"model", "float32 16", "reference", "")
OTHER = root_digest(b"model", "float32 16", "reference", "another namespace")
SIZE = 4


class Engine:
    """Does to the manager what a scheduler does, one sequence and one step at a time."""

    def __init__(self, frames: int, windows=(None,), **settings) -> None:
        self.memory = MemoryManager(frames, SIZE, windows, **settings)
        self.now = 0.0
        self.steps = 0

    def open(self, tokens, root=ROOT, limit=None):
        self.now += 1
        digests: list[bytes] = []
        extend_chain(digests, root, tokens, SIZE)
        return self.memory.open(tokens, digests, root, self.now, len(tokens) - 1 if limit is None else limit)

    def step(self, table: BlockTable, tokens, up_to: int):
        digests: list[bytes] = []
        extend_chain(digests, table.root, tokens[:up_to], SIZE)
        assert self.memory.reserve(table, up_to) is None
        self.steps += 1
        work = self.memory.drain(self.steps)
        self.memory.commit(table, up_to, tokens, digests)
        self.memory.retire(self.steps)
        self.memory.check()
        return work

    def prefill(self, tokens, root=ROOT, chunk=1000):
        table, found = self.open(tokens, root)
        for end in range(found + chunk, len(tokens) + chunk, chunk):
            self.step(table, tokens, min(end, len(tokens)))
        return table, found

    def close(self, table) -> None:
        self.now += 1
        self.memory.close(table, self.now)
        self.memory.check()

    def frames(self, table, group=0):
        return [self.memory.core.blocks.frame[block] for block in table.blocks[group]]


def tokens_of(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


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


def found_whole(engine: Engine, first: int) -> int:
    digests: list[bytes] = []
    extend_chain(digests, ROOT, tokens_of(12, first), SIZE)
    return engine.memory.peek(digests, ROOT)


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


def test_blocks_leave_with_the_window():
    engine = Engine(32, windows=(6, None))
    table, _ = engine.open(tokens_of(30))
    for length in range(1, 31):
        engine.step(table, tokens_of(30), length)
        # The next query, at `length`, sees keys from length - 5 on.
        held = [entry for entry, block in enumerate(table.blocks[0]) if block >= 0]
        assert held[0] == max(0, length - 5) // SIZE
        assert held[-1] == (length - 1) // SIZE
        assert -1 not in table.blocks[1]
    with pytest.raises(ValueError, match="window of 6"):
        engine.memory.fork(table, 20)
    with pytest.raises(ValueError, match="window of 6"):
        engine.memory.truncate(table, 20)


def forget(engine: Engine, tokens, group: int, entry: int) -> None:
    """Evicts one cached block by hand."""
    digests: list[bytes] = []
    extend_chain(digests, ROOT, tokens, SIZE)
    memory = engine.memory
    block = memory.core.index.by_digest[group][digests[entry]]
    tenant = memory.tenants["default"]
    tenant.policy.remove(block)
    tenant.charged -= 1
    memory.core.index.forget(block, group)
    memory.core.frames.give(memory.core.blocks.end([block]))
    memory.check()


def test_a_match_needs_the_block_in_every_full_group():
    engine = Engine(16, windows=(None, None))
    engine.close(engine.prefill(tokens_of(12))[0])
    forget(engine, tokens_of(12), 1, 2)
    assert engine.open(tokens_of(12)).num_cached_tokens == 8
    forget(engine, tokens_of(12), 0, 2)
    assert engine.open(tokens_of(12)).num_cached_tokens == 8


def test_a_window_group_needs_only_what_the_next_query_sees():
    engine = Engine(32, windows=(None, 5))
    engine.close(engine.prefill(tokens_of(24))[0])
    forget(engine, tokens_of(24), 1, 0)
    table, found = engine.open(tokens_of(25))
    assert found == 24
    assert [block >= 0 for block in table.blocks[1]] == [False] * 5 + [True]
    engine.close(table)
    # A query at 23 sees 19 .. 23: entry 4. Without it, nothing that sees entry 4 and lies behind it is left.
    forget(engine, tokens_of(24), 1, 4)
    table, found = engine.open(tokens_of(24))
    assert found == 16
    engine.close(table)
    for entry in (5, 4, 3, 2):
        forget(engine, tokens_of(24), 0, entry)
    assert engine.open(tokens_of(24)).num_cached_tokens == 8


def test_a_model_with_windows_only_needs_no_beginning():
    engine = Engine(8, windows=(5,))
    engine.close(engine.prefill(tokens_of(40), chunk=4)[0])
    table, found = engine.open(tokens_of(41))
    assert found == 40
    assert table.blocks[0].tolist()[:9] == [-1] * 9
    engine.step(table, tokens_of(41), 41)


@pytest.mark.parametrize("windows", [(None,), (7,), (None, 1), (5, None, 16), (4, 9)])
@pytest.mark.parametrize("chunk", [1, 3, 4, 10, 1000])
def test_blocks_needed_is_exactly_the_most_that_is_ever_held(windows, chunk):
    memory = MemoryManager(1000, SIZE, windows)
    for total in (1, 4, 5, 23, 24, 25, 61):
        most = 0
        for start in range(total):
            end = min(start + chunk, total)
            held = sum(-(-end // SIZE) - first_entry_in_window(start, window, SIZE) for window in windows)
            most = max(most, held)
        assert memory.footprint.frames(total, chunk) == most
    assert memory.footprint.frames(0, chunk) == 0


@pytest.mark.parametrize("windows", [(None,), (7,), (None, 3)])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_what_needs_the_whole_pool_runs_alone_in_it_whatever_is_cached(windows, chunk):
    total = 27
    need = MemoryManager(1000, SIZE, windows).footprint.frames(total, chunk)
    engine = Engine(need, windows)
    engine.close(engine.prefill(tokens_of(total), chunk=1)[0])
    for tokens in ([*tokens_of(6), *tokens_of(total - 6, 50)], tokens_of(total), tokens_of(total, 90)):
        engine.close(engine.prefill(tokens, chunk=chunk)[0])
    for start in range(chunk):
        table, _ = engine.open([])
        tokens = tokens_of(total, 1000 * (start + 1))
        for end in [*range(start, total, chunk), total]:
            engine.step(table, tokens, end)
        engine.close(table)


def test_wrong_uses_are_refused():
    memory = MemoryManager(8, SIZE, [None])
    table, _ = memory.open([1, 2, 3], [], ROOT, 0.0, 2)
    memory.reserve(table, 3)
    with pytest.raises(ValueError, match="4 are reserved"):
        memory.commit(table, 5, [1, 2, 3, 4, 5], [])
    memory.commit(table, 3, [1, 2, 3], [])
    with pytest.raises(ValueError, match="3 tokens are committed"):
        memory.commit(table, 2, [1, 2, 3], [])
    with pytest.raises(ValueError, match="only 3 tokens"):
        memory.fork(table, 4)
    memory.drain(1)
    with pytest.raises(ValueError, match="must rise"):
        memory.drain(1)
    memory.close(table, 0.0)
    with pytest.raises(KeyError):
        memory.close(table, 0.0)
    with pytest.raises(ValueError, match="frames"):
        MemoryManager(0, SIZE, [None])


def break_references(memory, table):
    memory.core.blocks.references[table.blocks[0][0]] += 1


def break_frame(memory, table):
    memory.core.blocks.frame[table.blocks[0][0]] = memory.core.blocks.frame[table.blocks[0][1]]


def break_free(memory, table):
    memory.core.frames.give([memory.core.blocks.frame[table.blocks[0][0]]])


def break_index(memory, table):
    memory.core.index.by_digest[0].popitem()


def break_children(memory, table):
    memory.core.index.children.popitem()


def break_policy(memory, table):
    memory.tenants["default"].policy.add(table.blocks[0][0], 0.0)


def break_length(memory, table):
    table.length = 100


def break_row(memory, table):
    memory.place(table, 1)
    memory.place(memory.fork(table, 4), 1)


def break_publishing(memory, table):
    table.length = 4


def break_group(memory, table):
    memory.core.blocks.group[table.blocks[0][0]] = 1


def break_hold(memory, table):
    memory.core.held.append((-1, table.tenant, []))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_references, "references"),
        (break_frame, "every frame"),
        (break_free, "every frame"),
        (break_index, "published if and only if"),
        (break_children, "children"),
        (break_policy, "cached if and only if"),
        (break_length, "committed tokens have blocks"),
        (break_row, "a row belongs to one table"),
        (break_publishing, "not published"),
        (break_group, "a block belongs to one group"),
        (break_hold, "retired step"),
    ],
)
def test_check_names_what_is_broken(damage, message):
    engine = Engine(16)
    table, _ = engine.prefill(tokens_of(9))
    engine.memory.check()
    damage(engine.memory, table)
    with pytest.raises(MemoryInvariantError, match=message):
        engine.memory.check()


def test_a_policy_of_ones_own_decides():
    class MostRecent(Lru):
        def victim(self) -> int:
            return self._since.popitem()[0]

    engine = Engine(6, policy=lambda chains: MostRecent())
    for first in (0, 100):
        engine.close(engine.prefill(tokens_of(12, first))[0])
    engine.memory.reserve(engine.open([]).table, 3 * SIZE)
    assert (found_whole(engine, 0), found_whole(engine, 100)) == (3, 0)


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
