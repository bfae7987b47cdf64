"""Regret: evicted blocks that were wanted again, which a larger pool or another policy would have kept."""

from __future__ import annotations

from collections import OrderedDict


class Regret:
    """Remembers the names of the blocks evicted last, at most `most`, and counts those that come back. O(1) each."""

    def __init__(self, most: int) -> None:
        self.count = 0
        self._most = most
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    def evicted(self, digest: bytes) -> None:
        """A block can no longer be found."""
        self._evicted[digest] = None
        if len(self._evicted) > self._most:
            self._evicted.popitem(last=False)

    def resize(self, most: int) -> None:
        """At most so many from now on."""
        self._most = most
        while len(self._evicted) > most:
            self._evicted.popitem(last=False)

    def published(self, digest: bytes) -> None:
        """A block was computed, or loaded from a lower tier."""
        if self._evicted.pop(digest, self) is None:
            self.count += 1
