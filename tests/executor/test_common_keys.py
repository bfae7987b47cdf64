"""Rows with keys in common are brought together, as many keys as can be, and devices give the host's tokens then."""

from __future__ import annotations

import random
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from late import Late
from static_attention import CHUNK, StaticAttention
from test_gpu_executor import SMALL, greedy, on_cpu

from core.drive import request
from pagemill import _kernels
from pagemill.config import EngineConfig
from pagemill.executor import graphs
from pagemill.executor.backend import torch_backend
from pagemill.executor.common_keys import CommonKeys
from pagemill.executor.load import open_executor
from pagemill.sampling.params import SamplingParams

STATIC = torch_backend(torch.device("cpu"))._replace(attention=StaticAttention())
SIZE = 4
"""Tokens of a block."""


def draw_tables(draw: random.Random, groups: int, rows: int, entries: int) -> np.ndarray:
    """Draws tables of which most begin as another one does, in all groups or in fewer."""
    tables = np.arange(groups * rows * entries, dtype=np.int32).reshape(groups, rows, entries)
    for row in range(1, rows):
        for group in range(groups):
            if draw.random() < 0.8:
                count = draw.randrange(entries + 1)
                tables[group, row, :count] = tables[group, draw.randrange(row), :count]
    return tables


def order_of(tables, groups, limits, chunks, most, moves=True):
    rows = np.arange(tables.shape[1], dtype=np.int32)
    order, common = np.empty_like(rows), np.empty_like(rows)
    _kernels.order_rows(tables, groups, rows, limits, chunks, SIZE, most, moves, order, common)
    return order.tolist(), common.tolist()


def in_common(tables, groups, limits, chunks, a: int, b: int) -> int:
    """Returns how many keys two rows may be attended together for, by definition."""
    if chunks[a] != chunks[b]:
        return 0
    same = 0
    while same < tables.shape[2] and (tables[groups, a, same] == tables[groups, b, same]).all():
        same += 1
    return int(min(same * SIZE, limits[a], limits[b]) // chunks[a] * chunks[a])


@pytest.mark.parametrize("seed", range(150))
def test_neighbours_have_in_common_what_is_said_and_as_much_as_can_be(seed: int) -> None:
    draw = random.Random(seed)
    rows, entries, groups = draw.randint(1, 6), draw.choice((5, 12, 150)), draw.choice(([0], [0, 1], [1]))
    tables = draw_tables(draw, 2, rows, entries)
    limits = np.array([draw.randrange(entries * SIZE + 1) for _ in range(rows)], np.int32)
    chunks = np.array([draw.choice((2, 8, 8, 8)) for _ in range(rows)], np.int32)
    order, common = order_of(tables, groups, limits, chunks, rows)
    assert sorted(order) == list(range(rows))
    pairs = [[in_common(tables, groups, limits, chunks, a, b) for b in range(rows)] for a in range(rows)]

    def kept(order) -> list[int]:
        return [pairs[before][row] for before, row in pairwise(order)]

    assert common[0] == 0
    assert all(found <= true for found, true in zip(common[1:], kept(order), strict=True))
    if len(groups) == 1:  # with more, rows that part in the second only may stand apart
        assert sum(common) == max(sum(kept(other)) for other in permutations(range(rows)))
    stays, common = order_of(tables, groups, limits, chunks, rows, moves=False)
    assert stays == list(range(rows))
    assert common == [0, *kept(stays)][:rows]


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_rows_are_cut_apart_where_the_least_is_lost(most: int) -> None:
    draw = random.Random(most)
    for _ in range(40):
        tables = draw_tables(draw, 1, 9, 30)
        limits, chunks = np.full(9, 30 * SIZE, np.int32), np.full(9, 8, np.int32)
        _, whole = order_of(tables, [0], limits, chunks, 9)
        _, cut = order_of(tables, [0], limits, chunks, most)
        assert all(found in (0, keys) for found, keys in zip(cut, whole, strict=True))
        assert all(0 in cut[at : at + most] for at in range(9 - most + 1))
        best = max(
            sum(keys for at, keys in enumerate(whole) if not cuts >> at & 1)
            for cuts in range(1, 1 << 9, 2)
            if all(cuts >> at & (1 << most) - 1 for at in range(9 - most + 1))
        )
        assert sum(cut) == best


def test_rows_without_a_table_are_refused() -> None:
    tables, some = np.zeros((1, 3, 2), np.int32), np.zeros(3, np.int32)
    ones = np.ones(3, np.int32)
    for groups, rows, limits, chunks in (
        ([1], some, some, ones), ([0], some + 3, some, ones), ([0], some - 1, some, ones),
        ([0], some, some + 2 * SIZE + 1, ones), ([0], some, some, some),
    ):  # fmt: skip
        with pytest.raises(IndexError, match="has no table"):
            _kernels.order_rows(tables, groups, rows, limits, chunks, SIZE, 2, True, some.copy(), some.copy())


@pytest.fixture
def found(monkeypatch):
    """Notes of each step which rows it has, and what is found of them."""
    noted, find = [], CommonKeys.find

    def noting(self, rows, starts, query_lens, size, *, moves):
        order, common = find(self, rows, starts, query_lens, size, moves=moves)
        noted.append((len(rows), order, common.copy(), moves))
        return order, common

    monkeypatch.setattr(CommonKeys, "find", noting)
    return noted


def families():
    """Two prompts of which several requests go on in their own way, in turns; one has several samples, one draws, and
    one needs the host."""
    begins = [[5 + kind, *range(3, 3 + 2 * CHUNK)] for kind in (0, 9)]
    kinds = [
        greedy(max_tokens=9), greedy(max_tokens=12), greedy(max_tokens=7),
        SamplingParams(temperature=0.9, seed=4, n=2, max_tokens=8, ignore_eos=True), greedy(max_tokens=10),
        greedy(max_tokens=3, logprobs=1),
    ]  # fmt: skip
    return [request(f"r{at}", [*begins[at % 2], 40 + at], params) for at, params in enumerate(kinds)]


@pytest.mark.parametrize("eager", [True, False])
def test_rows_behind_common_prompts_bring_the_tokens_of_the_host(small_model, device, found, monkeypatch, eager):
    monkeypatch.setattr(graphs, "LEAST_CONTEXT", 32)
    monkeypatch.setattr(graphs, "WORTH_IT", 1)
    settings = SMALL | {"kv_memory": 40 * 8192, "max_num_batched_tokens": 48}
    config = EngineConfig(model=small_model, enforce_eager=eager, **settings)
    late = Late(config, open_executor(config, backend=STATIC, device=device), depth=2)
    requests = families()
    late.add(requests)
    tokens = late.run()
    late.executor.close()
    assert not late.errors
    assert tokens == on_cpu(config, requests)
    ahead = [(order, common) for _, order, common, moves in found if moves]
    assert sum((common > 0).sum() for _, common in ahead) > 15, "rows have keys in common"
    assert sum(order is not None and order.tolist() != sorted(order) for order, _ in ahead) > 1, (
        "and are brought together"
    )
    assert {int(keys) for _, common in ahead for keys in common} == {0, 2 * CHUNK}
    assert any(common.any() for _, _, common, moves in found if not moves), "so do rows of steps that need the host"
    assert bool(device.graphs) != eager


def test_a_prefix_that_is_said_to_be_common_and_is_not_changes_tokens(small_model, device, monkeypatch):
    """The attention of these tests would not hide it."""
    find = CommonKeys.find

    def wrong(self, rows, *others, **options):
        order, common = find(self, rows, *others, **options)
        common[1:] = CHUNK
        return order, common

    monkeypatch.setattr(CommonKeys, "find", wrong)
    config = EngineConfig(model=small_model, **SMALL)
    late = Late(config, open_executor(config, backend=STATIC, device=device), depth=2)
    requests = [request(f"r{at}", [5 + at, *range(3 + at, 25 + at)], greedy(max_tokens=8)) for at in range(2)]
    late.add(requests)
    tokens = late.run()
    late.executor.close()
    assert tokens != on_cpu(config, requests)
