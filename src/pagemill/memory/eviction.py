"""Eviction policies: in which order cached blocks, those that are only findable, make room.

A policy orders blocks and knows nothing else of them. Blocks come in the order in which they were released, a
sequence's last first, so equal rank must mean first come, first evicted: leaves go before what they hang on.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class EvictionPolicy(Protocol):
    """Holds the cached blocks. `now` is the manager's time, in whatever unit its caller uses."""

    def add(self, block: int, now: float) -> None:
        """The block became cached."""
        ...

    def remove(self, block: int) -> None:
        """The block is used again: it is no longer cached. Raises KeyError if it was not."""
        ...

    def victim(self) -> int:
        """Takes out the block that goes first. Raises KeyError if there is none."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...


class Lru:
    """The least recently used goes first, O(1). Not a plain dict: finding its first key steps over all those deleted
    before it."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int, now: float) -> None:
        self._order[block] = None

    def remove(self, block: int) -> None:
        del self._order[block]

    def victim(self) -> int:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: object) -> bool:
        return block in self._order
