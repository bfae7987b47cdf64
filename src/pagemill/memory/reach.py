"""How far a chain of blocks can be used of which some are held, by layer group."""

from __future__ import annotations

from collections.abc import Container, Sequence

from pagemill.memory.block_table import first_entry_in_window


def reach(
    digests: Sequence[bytes], windows: Sequence[int | None], held: Sequence[Container[bytes]], block_size: int
) -> int:
    """Returns how many leading blocks of a chain a match has: all are held in groups with full attention, and in those
    with a window the ones that the next query sees.

    windows: by layer group, in tokens, or None for full attention. held: by layer group, the digests of its blocks.
    """
    groups = list(zip(windows, held, strict=True))
    whole = leading(digests, len(digests), [found for window, found in groups if window is None])
    windowed = [(window, found) for window, found in groups if window is not None]
    return fit_windows(digests[:whole], whole * block_size, windowed, block_size) // block_size if windowed else whole


def leading(digests: Sequence[bytes], whole: int, groups: Sequence[Container[bytes]]) -> int:
    """Returns how many of the first `whole` digests are in all groups, up to the first that is not."""
    for held in groups:
        for count in range(whole):
            if digests[count] not in held:
                whole = count
                break
    return whole


def fit_windows(
    chain: Sequence[bytes], length: int, windowed: Sequence[tuple[int, Container[bytes]]], block_size: int
) -> int:
    """Returns the largest length in tokens, at most `length`, at which every window's blocks are held; O(1) per entry.

    Where an entry is missing, every length that reaches beyond it and still sees it is ruled out; a shorter one
    sees no later entries, so the search goes on below.
    """
    widest = max(window for window, _ in windowed)
    entry = len(chain)
    while entry > first_entry_in_window(length, widest, block_size):
        entry -= 1
        for window, held in windowed:
            if entry >= first_entry_in_window(length, window, block_size) and chain[entry] not in held:
                length = entry * block_size
                break
    return length
