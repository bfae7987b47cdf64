"""Footprint: how many blocks a sequence holds at most, and how many of them take frames of the pool. No state."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.memory.block_table import first_entry_in_window


class Footprint:
    """Blocks of a sequence that grows in steps of 1 to `chunk` tokens, behind its first `found` tokens.

    windows: by layer group, in tokens, or None. streamed: frames from which attention can stream.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None], streamed: int = 0) -> None:
        self._block_size = block_size
        self._windows = windows
        self._streamed = streamed

    def blocks(self, num_tokens: int, chunk: int, found: int = 0) -> int:
        """Returns the most blocks that it may hold at once, over all groups, until it has `num_tokens`.

        A step from s to e holds, by group, the entries from the first that position s sees to the one of e - 1. The
        maximum is reached by the largest step that just enters the last entry.
        """
        entries = -(-num_tokens // self._block_size)
        return sum(entries - first for first in self._first_held(num_tokens, chunk, found))

    def pinned(self, num_tokens: int, chunk: int, pinned: int, found: int = 0) -> int:
        """Returns how many of these blocks lie in its `pinned` leading entries."""
        return sum(max(0, pinned - first) for first in self._first_held(num_tokens, chunk, found))

    def frames(self, num_tokens: int, chunk: int, pinned: int = 0, found: int = 0) -> int:
        """Returns the fewest frames of the pool with which, alone in the pool, it always gets to `num_tokens`.

        Without streamed frames that is all it holds; with them, what a step writes and what does not fit into them.
        Its `pinned` leading entries stay in the pool.
        """
        held = self.blocks(num_tokens, chunk, found)
        if not self._streamed or not held:
            return held
        entries, written = -(-num_tokens // self._block_size), (chunk - 1) // self._block_size + 2
        return held - min(self._windows.count(None) * max(0, entries - written - pinned), self._streamed)

    def _first_held(self, num_tokens: int, chunk: int, found: int) -> list[int]:
        """Returns, by group, the first entry that it holds when it holds most."""
        start = max(0, found, (num_tokens - 1) // self._block_size * self._block_size + 1 - chunk)
        return [first_entry_in_window(start, window, self._block_size) for window in self._windows]
