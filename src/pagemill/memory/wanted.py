"""Knows the blocks that preempted sequences will need again, so that tiers below the pool keep them before others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Sequence
from typing import Any

MOST_SPARED = 4096
"""Wanted blocks that a tier passes over at once: where nearly all are wanted, looking for others would take long."""
Block = tuple[bytes, int]
"""A block's digest and layer group."""


class WantedBlocks:
    """Counts who wants a block again, by its digest. One thread changes it; any may ask `digest in wanted`."""

    def __init__(self) -> None:
        self._digests: dict[Hashable, list[bytes]] = {}
        self._wanting: dict[bytes, int] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._wanting

    def __len__(self) -> int:
        return len(self._wanting)

    def want(self, owner: Hashable, digests: Sequence[bytes]) -> None:
        """Notes that an owner, which wants nothing yet, will need the blocks with these digests."""
        self._digests[owner] = list(digests)
        for digest in digests:
            self._wanting[digest] = self._wanting.get(digest, 0) + 1

    def release(self, owner: Hashable) -> None:
        """Notes that an owner no longer waits for its blocks, if it did."""
        for digest in self._digests.pop(owner, ()):
            self._wanting[digest] -= 1
            if not self._wanting[digest]:
                del self._wanting[digest]


def longest_unused(order: OrderedDict[Block, Any], wanted: Container[bytes], spared: int) -> tuple[Block, int]:
    """Returns the block of a tier that leaves next, and how many wanted ones have been passed over so far.

    order: the tier's blocks, the one used longest ago first; those passed over go to its end. spared: how many have
    been passed over already since the tier began to make room.
    """
    block = next(iter(order))
    while block[0] in wanted and spared < min(len(order), MOST_SPARED):
        order.move_to_end(block)
        spared += 1
        block = next(iter(order))
    return block, spared
