"""A rank is bound to cores by the topology that Linux tells."""

from __future__ import annotations

import os

import pytest

from pagemill.executor.numa import bind_rank, cores_of_rank, read_nodes

TWO, FOUR = [set(range(32)), set(range(32, 64))], [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
ALL = set(range(64))


def test_nodes_are_read_as_linux_writes_them(tmp_path):
    for name, cores in (("node0", "0-2,8\n"), ("node10", "5\n"), ("node2", "3-4\n"), ("node3", "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores)
    (tmp_path / "node4").mkdir()
    (tmp_path / "possible").write_text("0-10")
    assert read_nodes(tmp_path) == [{0, 1, 2, 8}, {3, 4}, {5}], "memory without cores is no place for a rank"
    assert read_nodes(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("size", "nodes", "usable", "expected"),
    [
        (2, TWO, ALL, TWO),
        (4, TWO, ALL, [TWO[0], TWO[0], TWO[1], TWO[1]]),
        (2, FOUR, ALL, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (8, FOUR, ALL, [each for each in FOUR for _ in range(2)]),
        (2, TWO, set(range(16, 40)), [set(range(16, 32)), set(range(32, 40))]),
        (2, TWO, set(range(16)), [None, None]),
        (2, [ALL], ALL, [None, None]),
        (2, [], ALL, [None, None]),
        (3, TWO, ALL, [None, None, None]),
        (3, FOUR, ALL, [None, None, None]),
        (1, TWO, ALL, [None]),
    ],
)
def test_nodes_are_divided_evenly_or_not_at_all(size, nodes, usable, expected):
    assert [cores_of_rank(rank, size, 1, nodes, usable) for rank in range(size)] == expected


def test_nobody_is_bound_where_a_rank_would_have_fewer_cores_than_threads():
    uneven = set(range(16, 33))  # all of one node but half, and one core of the other
    assert cores_of_rank(0, 2, 8, TWO, uneven) is None
    assert cores_of_rank(0, 2, 1, TWO, uneven) == set(range(16, 32))
    assert cores_of_rank(0, 4, 17, TWO, ALL) is None, "two ranks of 17 threads share a node of 32 cores"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux binds threads")
def test_a_rank_is_bound_to_its_cores(monkeypatch):
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core")
    first, *others = sorted(before)
    monkeypatch.setattr("pagemill.executor.numa.read_nodes", lambda: [{first}, {*others}])
    try:
        assert bind_rank(1, 2, 1).cores == before
        assert os.sched_getaffinity(0) == {*others}
    finally:
        os.sched_setaffinity(0, before)
