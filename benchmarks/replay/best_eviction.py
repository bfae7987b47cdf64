"""Computes the most hits that any eviction could have had, knowing the future.

Requests come one after the other. Each refers to the leading blocks of its prompt (a chain: one counts as found only if
all before it are), needs room for all blocks that it holds while it is served, and leaves blocks that may be kept. So a
block found is one kept from the request that last left it, and a policy chooses which of these stretches to keep; at
any time no more than fit beside the blocks of the request that is served.

Belady's rule, give up what is needed again last (and never: first), keeps the most: dropping the stretch that ends last
frees at least as much as any other choice (IBM Systems Journal 5:2, 1966). A block is never needed later than those
behind it, and among blocks needed by the same request it makes no difference to the number which is given up, so it may
be the deepest: what is kept is then whole from the beginning, and the rule that a block needs all before it takes
nothing away.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

NEVER = 1 << 60


class Visit(NamedTuple):
    """Holds one request. chain: its prompt's whole blocks, which it leaves behind; the first `num_wanted` of them could
    have been found; num_held: blocks of any kind that it holds while it is served."""

    chain: Sequence[int]
    num_wanted: int
    num_held: int


def best_hits(visits: Sequence[Visit], capacity: int) -> list[int]:
    """Returns, by request, the blocks found where their sum is the largest possible, in a cache of `capacity` blocks.

    Equal numbers are equal blocks, with the same ones before them. Raises ValueError if a request holds more
    than `capacity`.
    """
    wanted_again = _wanted_again(visits)
    kept: dict[int, int] = {}  # block: when it is wanted again
    order: list[tuple[int, int]] = []  # heap of (-wanted again, block); outdated ones are skipped
    hits: list[int] = []
    for visit, again in zip(visits, wanted_again, strict=True):
        if visit.num_held > capacity:
            raise ValueError(f"a request holds {visit.num_held} blocks, but the cache has {capacity}")
        found = [kept.pop(block, None) is not None for block in visit.chain]
        hits.append(sum(found[: visit.num_wanted]))
        while len(kept) > capacity - visit.num_held:
            negative, block = heapq.heappop(order)
            if kept.get(block) == -negative:
                del kept[block]
        for block, when in zip(visit.chain, again, strict=True):
            if when != NEVER:
                kept[block] = when
                heapq.heappush(order, (-when, block))
    return hits


def _wanted_again(visits: Sequence[Visit]) -> list[list[int]]:
    """Returns, by request and block of its chain, the request that next wants the block; NEVER if none does before
    another one computes it anyway."""
    following: dict[int, int] = {}
    found: list[list[int]] = []
    for index in reversed(range(len(visits))):
        visit = visits[index]
        found.append([following.get(block, NEVER) for block in visit.chain])
        for position, block in enumerate(visit.chain):
            following[block] = index if position < visit.num_wanted else NEVER
    return found[::-1]
