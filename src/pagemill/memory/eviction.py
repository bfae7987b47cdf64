"""Eviction policies: in which order cached blocks, those that are only findable, make room.

A policy orders blocks. Blocks come in the order in which they were released, a sequence's last first, and what a block
hangs on must not go before it: without its parent no look-up reaches it.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Protocol


class Chains(Protocol):
    """Says where published blocks stand."""

    def depth(self, block: int) -> int:
        """Returns how many blocks stand before it in its chain."""

    def parent(self, block: int) -> int:
        """Returns the block before it, -1 if there is none or it cannot be found."""


class EvictionPolicy(ABC):
    """Holds the cached blocks, and since when each is cached. `now` is in whatever unit its caller uses.

    The order is an OrderedDict: finding the first key of a plain dict steps over all those deleted before it.
    """

    def __init__(self) -> None:
        self._since: OrderedDict[int, float] = OrderedDict()

    def add(self, block: int, now: float) -> None:
        """Notes that the block became cached."""
        self._since[block] = now

    def remove(self, block: int) -> None:
        """Takes out a block that is used again. Raises KeyError if it was not cached."""
        del self._since[block]

    def unuse(self, block: int) -> None:  # noqa: B027, most policies do not count
        """Notes that a block was taken out and not used."""

    @abstractmethod
    def victim(self) -> int:
        """Takes out the block that goes first, which ends. Raises KeyError if there is none."""

    @abstractmethod
    def forget(self, block: int) -> None:
        """Drops what is known of a block that is not cached, since it can no longer be found."""

    def take_idle(self, until: float) -> list[int]:
        """Takes out all blocks that became cached at `until` or before, none before those that hang on it."""
        idle = list(takewhile(lambda block: self._since[block] <= until, self._since))
        for block in idle:
            self.remove(block)
            self.forget(block)
        return idle

    def oldest(self) -> float | None:
        """Returns when the block became cached that has been so for longest; None if there is none."""
        return next(iter(self._since.values()), None)

    def latest(self) -> Iterator[tuple[int, float]]:
        """Yields all blocks and when they became cached: the last ones first, so none before what it hangs on."""
        return reversed(self._since.items())

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, block: object) -> bool:
        return block in self._since


class Lru(EvictionPolicy):
    """Evicts the least recently used block first, O(1)."""

    def victim(self) -> int:
        return self._since.popitem(last=False)[0]

    def forget(self, block: int) -> None:
        pass


class GreedyDual(EvictionPolicy):
    """Evicts the block of least value first: age + uses * cost of computing it again. O(log n).

    The age is the value of the last victim, so what was used often long ago falls behind what is used now. A block is
    worth at least as much as every cached block behind it in a chain. With equal costs this is LFU with dynamic aging,
    with their own costs GreedyDual-Size-Frequency, all blocks being of one size (Arlitt et al., "Evaluating content
    management techniques for web proxy caches", 2000).

    cost: of a block by its depth, in any unit.
    """

    def __init__(self, chains: Chains, cost: Callable[[int], float]) -> None:
        super().__init__()
        self._chains = chains
        self._cost = cost
        self._age = 0.0
        self._serial = 0
        self._heap: list[tuple[float, int, int]] = []  # value, serial, block; outdated ones stay until they come up
        self._entries: dict[int, tuple[float, int]] = {}
        self._uses: dict[int, int] = {}
        self._least: dict[int, float] = {}  # the most that a block behind it was worth

    def add(self, block: int, now: float) -> None:
        uses = self._uses[block] = self._uses.get(block, 0) + 1
        value = max(self._age + uses * self._cost(self._chains.depth(block)), self._least.get(block, 0.0))
        parent = self._chains.parent(block)
        if parent >= 0:
            self._least[parent] = max(self._least.get(parent, 0.0), value)
        self._serial += 1
        self._entries[block] = value, self._serial
        self._since[block] = now
        heapq.heappush(self._heap, (value, self._serial, block))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [(*entry, cached) for cached, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def remove(self, block: int) -> None:
        del self._since[block], self._entries[block]

    def unuse(self, block: int) -> None:
        if self._uses.get(block, 0) > 0:
            self._uses[block] -= 1

    def victim(self) -> int:
        while self._heap:
            value, serial, block = heapq.heappop(self._heap)
            if self._entries.get(block) == (value, serial):
                self.remove(block)
                self.forget(block)
                self._age = value
                return block
        raise KeyError("no block is cached")

    def forget(self, block: int) -> None:
        self._uses.pop(block, None)
        self._least.pop(block, None)


class GhostList:
    """Remembers the names of the blocks evicted last, at most `capacity`, and counts those that come back. O(1) each.

    digests: those names, the oldest first.
    hits: evicted blocks that were wanted again, which a larger pool or another policy would have kept.
    """

    def __init__(self, capacity: int) -> None:
        self.hits = 0
        self._capacity = capacity
        self.digests: OrderedDict[bytes, None] = OrderedDict()

    def evicted(self, digest: bytes) -> None:
        """Notes that a block can no longer be found."""
        self.digests[digest] = None
        if len(self.digests) > self._capacity:
            self.digests.popitem(last=False)

    def resize(self, capacity: int) -> None:
        """Remembers at most so many from now on."""
        self._capacity = capacity
        while len(self.digests) > capacity:
            self.digests.popitem(last=False)

    def published(self, digest: bytes) -> None:
        """Notes that a block was computed, or loaded from a store."""
        if self.digests.pop(digest, self) is None:
            self.hits += 1


PolicyFactory = Callable[[Chains], EvictionPolicy]


def least_recently_used(chains: Chains) -> Lru:
    return Lru()


def least_frequently_used(chains: Chains) -> GreedyDual:
    return GreedyDual(chains, lambda depth: 1.0)


def cheapest_to_recompute(attention_share: float) -> PolicyFactory:
    """Returns a policy that evicts the block first that costs least to compute again, times its uses.

    attention_share: the work of attending to one block, as a share of the other work of computing one. Block i of a
    chain costs 1 + i * attention_share.
    """
    return lambda chains: GreedyDual(chains, lambda depth: 1.0 + depth * attention_share)


POLICIES: dict[str, Callable[[float], PolicyFactory]] = {
    "lru": lambda attention_share: least_recently_used,
    "lfu": lambda attention_share: least_frequently_used,
    "cost": cheapest_to_recompute,
}
"""Policies by name (the setting `eviction_policy`), each made from an attention share, see `cheapest_to_recompute`."""
