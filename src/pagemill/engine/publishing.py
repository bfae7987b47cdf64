"""Publisher: tells whoever routes requests to an engine which blocks it can find, and what work takes there."""

from __future__ import annotations

import math

from pagemill.engine.messages import Held, name_in_memory, name_on_disk
from pagemill.engine.tiers import Tiers
from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.pacing import Pacer

MOVED = 0.1
"""Share by which a measured time must have moved before it is told again."""

STORING_S = 0.25
"""How often an engine without work looks at what is being stored below its pool."""

DISK_S = 1.0
"""How often it looks at what has changed on its disk."""

LISTING_S = 0.02
"""How soon it looks again while there is more of that to tell."""


class Publisher:
    """Looks at an engine after its steps, and when it rests. memory and tiers record what comes and goes.

    A block counts as in memory while it is in the pool or in a tier in host memory: loading it takes a small part of
    computing it. What is on disk is told apart, whoever has written it, a bounded number of blocks at a time.
    """

    def __init__(self, memory: MemoryManager, tiers: Tiers | None, max_num_batched_tokens: int) -> None:
        self._memory = memory
        self._tiers = tiers
        self._pacer = Pacer(max_num_batched_tokens)
        self._told = Held()

    def note_step(self, seconds: float, prompt_tokens: int, generating: int) -> None:
        """Notes how long a step took with so many tokens of prompts and of sequences that generated."""
        self._pacer.note_step(seconds, prompt_tokens, generating)

    def take(self) -> Held | None:
        """Returns which blocks have come and gone since the last call, and what work takes; None if no block has, and
        no time has moved. A block that is told as stored may be known already."""
        stored, removed = self._take_blocks()
        held = Held(
            stored=b"".join(stored),
            removed=b"".join(removed),
            token_s=self._pacer.mean_token_s,
            tokens=self._pacer.told_tokens,
            step_s=self._pacer.plain_s,
            fetch_s={} if self._tiers is None else self._tiers.fetch_times(),
            disk_s=None if self._tiers is None else self._tiers.disk_time(),
        )
        if not stored and not removed and not _have_moved(held, self._told):
            return None
        self._told = held
        return held

    def again_s(self) -> float:
        """Returns in how many seconds there may be more to tell though no step runs: blocks that are being stored below
        the pool or have changed on disk, or a peer that is asked again. Infinite: never. What `take` returns later is
        no older than this."""
        if self._tiers is None:
            return math.inf
        waits = [] if self._tiers.peers is None else [peer.paused_s for peer in self._tiers.peers.store.peers()]
        storing = STORING_S if self._tiers.transfers.storing else math.inf
        watch = self._tiers.watch
        disk = math.inf if watch is None else LISTING_S if watch.has_more else DISK_S
        return min([storing, disk, *(wait for wait in waits if wait > 0)])

    def _take_blocks(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the names of blocks that can be found now, and of those that cannot, of all that have changed."""
        stored, removed = self._take_in_memory()
        told = [name_in_memory(digest) for digest in stored], [name_in_memory(digest) for digest in removed]
        if self._tiers is not None and self._tiers.watch is not None:
            for digest, held in self._tiers.watch.take().items():
                told[not held].append(name_on_disk(digest))
        return told

    def _take_in_memory(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the digests of blocks that are in memory now, and of those that are not, of all that have changed."""
        stored, removed = self._memory.take_events()
        if self._tiers is None:
            return stored, removed
        leading, below = self._memory.leading, self._tiers.offload
        changed = dict.fromkeys([*removed, *(digest for digest, group in below.take_changed() if group == leading)])
        digests = [*changed.keys() - stored]
        here = self._memory.are_published(digests)
        held = below.in_memory([(digest, leading) for digest in digests])
        found = {digest for digest, *ways in zip(digests, here, held, strict=True) if any(ways)}
        return [*stored, *found], [digest for digest in digests if digest not in found]


def _have_moved(now: Held, told: Held) -> bool:
    """Returns whether any time is another than was told."""
    if now.fetch_s.keys() != told.fetch_s.keys():
        return True
    times = [(now.token_s, told.token_s), (now.tokens, told.tokens), (now.step_s, told.step_s)]
    times += [pair for peer, line in now.fetch_s.items() for pair in zip(line, told.fetch_s[peer], strict=True)]
    if (now.disk_s is None) != (told.disk_s is None):
        return True
    times += zip(now.disk_s or (), told.disk_s or (), strict=True)
    return any(_has_moved(*pair) for pair in times)


def _has_moved(now: float, told: float) -> bool:
    if math.isinf(now) or math.isinf(told):
        return now != told
    return abs(now - told) > MOVED * told
