"""Matches and tables need and hold other blocks in each layer group, with sliding windows and without."""

from __future__ import annotations

import pytest
from stepped_memory import ROOT, SIZE, Engine, tokens_of

from pagemill.memory.block_table import first_entry_in_window
from pagemill.memory.digest import extend_chain
from pagemill.memory.manager import MemoryManager


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
