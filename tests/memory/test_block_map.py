"""The block map and the prefix tree, against what a few tables are known to hold."""

import numpy as np
import pytest

from pagemill.memory.block_map import MAP_COLUMNS, OTHERS
from pagemill.memory.digest import extend_chain
from pagemill.memory.manager import MemoryManager
from pagemill.memory.tenants import Quota

SIZE = 4


class Pool:
    """A pool into which prompts are computed."""

    def __init__(self, num_frames=64, windows=(None,), **settings):
        self.memory = MemoryManager(num_frames, SIZE, windows, **settings)
        self.memory.set_quotas({"other": Quota()})
        self.step = 0

    def compute(self, tokens, tenant="default"):
        root, digests = tenant.encode(), []
        extend_chain(digests, root, tokens, SIZE)
        table = self.memory.open(tokens, digests, root, 0.0, len(tokens) - 1, tenant).table
        assert self.memory.reserve(table, len(tokens)) is None
        self.memory.drain(self.step)
        self.memory.commit(table, len(tokens), tokens, digests)
        self.memory.retire(self.step)
        self.step += 1
        return table

    def map(self, pinned=(), arriving=(), seen_by=None, max_cells=1024):
        return self.memory.block_map(pinned, arriving, seen_by, max_cells)

    def cells(self, **how):
        return [dict(zip(MAP_COLUMNS, row, strict=True)) for row in self.map(**how)[0].cells.tolist()]

    def tree(self, *tables):
        nodes = self.memory.prefix_tree(tables, self.memory.tenants, 100, 10)
        return [(node.parent, node.num_blocks, node.tables, node.tenant.name) for node in nodes]


def totals(cells):
    return {name: sum(cell[name] for cell in cells) for name in MAP_COLUMNS[:-2]}


PROMPT = list(range(100, 100 + 3 * SIZE + 1))


def test_each_state_is_seen_where_it_lies():
    pool = Pool()
    done = pool.compute(list(range(2 * SIZE)))
    pool.memory.close(done, 1.0)
    one = pool.compute(PROMPT)
    assert totals(pool.cells()) == {"cached": 2, "active": 4, "shared": 0, "pinned": 0, "loading": 0}
    fork = pool.memory.fork(one, len(PROMPT))
    pin = pool.memory.fork(one, SIZE)
    last = one.blocks[0][-1]
    cells = pool.cells(pinned=[pin], arriving=[last])
    assert totals(cells) == {"cached": 2, "active": 0, "shared": 2, "pinned": 1, "loading": 1}
    where = pool.memory.frames(one, 0)
    assert [cells[frame]["holders"] for frame in where] == [3, 2, 2, 2]
    assert cells[where[0]]["pinned"] == 1
    assert cells[where[3]]["loading"] == 1
    assert {cells[frame]["owner"] for frame in where} == {1}
    free = set(range(64)) - set(where) - set(np.flatnonzero([cell["cached"] for cell in cells]).tolist())
    assert {tuple(cells[frame].values()) for frame in free} == {(0,) * len(MAP_COLUMNS)}
    pool.memory.close(fork, 2.0)


def test_a_tenant_is_told_nothing_of_others_but_that_they_are_there():
    pool = Pool()
    own, other = pool.compute(PROMPT), pool.compute(PROMPT, "other")
    shared = pool.memory.fork(other, len(PROMPT))
    cells = pool.cells(pinned=[shared], seen_by=pool.memory.tenants["default"])
    assert totals(cells) == {"cached": 0, "active": 8, "shared": 0, "pinned": 0, "loading": 0}
    assert {cells[frame]["owner"] for frame in pool.memory.frames(own, 0)} == {1}
    assert {(cells[frame]["owner"], cells[frame]["holders"]) for frame in pool.memory.frames(other, 0)} == {(OTHERS, 1)}
    assert {cells[frame]["owner"] for frame in pool.memory.frames(other, 0)} != {
        pool.cells()[frame]["owner"] for frame in pool.memory.frames(other, 0)
    }


@pytest.mark.parametrize("max_cells", [1, 5, 7, 63, 64])
def test_cells_of_a_large_pool_add_up(max_cells):
    pool = Pool()
    pool.memory.close(pool.compute(list(range(9 * SIZE))), 1.0)
    table = pool.compute(PROMPT)
    pool.memory.fork(table, 2 * SIZE)
    tier, streamed = pool.map(max_cells=max_cells)
    assert len(tier.cells) == -(-64 // tier.frames_per_cell) <= max_cells
    assert (streamed.num_frames, len(streamed.cells)) == (0, 0)
    cells = pool.cells(max_cells=max_cells)
    assert totals(cells) == totals(pool.cells())
    where = {frame // tier.frames_per_cell for frame in pool.memory.frames(table, 0)}
    assert max(cells[cell]["holders"] for cell in where) == 2


def test_streamed_frames_are_a_tier_of_their_own():
    pool = Pool(16, streamed_frames=(1000, 8))
    table = pool.compute(list(range(8 * SIZE)))
    assert pool.memory.stream(table, 3)
    tier, streamed = pool.map()
    states = slice(0, len(MAP_COLUMNS) - 2)
    assert (tier.cells[:, states].sum(), streamed.cells[:, states].sum()) == (5, 3)
    assert (streamed.first_frame, streamed.num_frames) == (1000, 8)
    below = [frame - 1000 for frame in pool.memory.frames(table, 0) if frame >= 1000]
    assert streamed.cells[below, -1].tolist() == [1, 1, 1]


def test_the_pool_can_grow_after_a_map_was_taken():
    pool = Pool()
    before = pool.map()
    assert pool.memory.resize(128) is None
    assert [pool.map()[0].num_frames, before[0].num_frames] == [128, 64]


def test_the_tree_has_common_runs_once():
    pool = Pool()
    first = pool.compute(PROMPT)
    second = pool.compute(PROMPT[: 2 * SIZE] + list(range(2 * SIZE)))
    other = pool.compute(PROMPT, "other")
    tree = pool.tree(first, second, other)
    roots = [node for node in tree if node[0] < 0]
    assert sorted(roots, key=lambda node: node[2]) == [(-1, 2, [0, 1], "default"), (-1, 4, [2], "other")]
    branch = tree.index((-1, 2, [0, 1], "default"))
    assert sorted(node[1:3] for node in tree if node[0] == branch) == [(2, [0]), (2, [1])]


def test_the_tree_goes_on_with_what_is_cached():
    pool = Pool()
    longer = pool.compute(PROMPT[: 2 * SIZE] + list(range(2 * SIZE)))
    table = pool.compute(PROMPT)
    pool.memory.close(longer, 1.0)
    pool.memory.close(pool.compute(list(range(50, 50 + 2 * SIZE))), 2.0)
    tree = pool.tree(table)
    branch = tree.index((-1, 2, [0], "default"))
    assert sorted((node[1], node[2]) for node in tree if node[0] == branch) == [(2, []), (2, [0])]
    assert (-1, 2, [], "default") in tree
    assert len(tree) == 4
