"""Needs: how many blocks sequences hold at most, and what of it takes frames of the pool. Arithmetic, no state."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.memory.block_table import first_entry_in_window


class Needs:
    """Of one sequence while it grows in steps of 1 to `chunk` tokens, wherever these begin behind the first `found`.

    windows: by layer group, in tokens, or None. lower: frames below the pool, for blocks that are streamed.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None], lower: int = 0) -> None:
        self._block_size = block_size
        self._windows = windows
        self._lower = lower

    def held(self, num_tokens: int, chunk: int, found: int = 0) -> int:
        """The most blocks that it may hold at once, over all groups, until it has `num_tokens`.

        A step from s to e holds, by group, the entries from the first that position s sees to the one of e - 1. The
        maximum is reached by the largest step that just enters the last entry.
        """
        entries = -(-num_tokens // self._block_size)
        return sum(entries - first for first in self._first_held(num_tokens, chunk, found))

    def pinned(self, num_tokens: int, chunk: int, pinned: int, found: int = 0) -> int:
        """How many of these lie in its `pinned` leading entries."""
        return sum(max(0, pinned - first) for first in self._first_held(num_tokens, chunk, found))

    def frames(self, num_tokens: int, chunk: int, pinned: int = 0, found: int = 0) -> int:
        """Frames of the pool with which it always gets there, alone in the pool; with fewer, there are steps with which
        it does not. Without lower frames that is all it holds; else what a step writes, and what does not fit into
        them. `pinned` leading entries stay in the pool.
        """
        held = self.held(num_tokens, chunk, found)
        if not self._lower or not held:
            return held
        entries, written = -(-num_tokens // self._block_size), (chunk - 1) // self._block_size + 2
        return held - min(self._windows.count(None) * max(0, entries - written - pinned), self._lower)

    def _first_held(self, num_tokens: int, chunk: int, found: int) -> list[int]:
        """By group, when it holds most."""
        start = max(0, found, (num_tokens - 1) // self._block_size * self._block_size + 1 - chunk)
        return [first_entry_in_window(start, window, self._block_size) for window in self._windows]
