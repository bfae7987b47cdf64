"""Publisher: tells whoever routes requests to an engine which blocks it can find, and what work takes there."""

from __future__ import annotations

import math

from pagemill.engine.messages import DIGEST_BYTES, Held
from pagemill.engine.tiers import Tiers
from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.pacing import Pacer

MOVED = 0.1
"""Share by which a measured time must have moved before it is told again."""


class Publisher:
    """Looks at an engine after its steps. memory and tiers record what comes and goes.

    A block counts as found while it is in the pool or in a tier in host memory: loading it takes a small part of
    computing it. Of a tier on disk nothing is told, since other processes write to it too.
    """

    def __init__(self, memory: MemoryManager, tiers: Tiers | None, max_num_batched_tokens: int) -> None:
        self._memory = memory
        self._tiers = tiers
        self._pacer = Pacer(max_num_batched_tokens)
        self._told_times: tuple[float, ...] = (0.0,) * 4

    def note_step(self, seconds: float, prompt_tokens: int, generating: int) -> None:
        """Notes how long a step took with so many tokens of prompts and of sequences that generated."""
        self._pacer.note_step(seconds, prompt_tokens, generating)

    def take(self) -> Held | None:
        """Returns which blocks have come and gone since the last call, and what work takes; None if no block has, and
        no time has moved. A block that is told as stored may be known already."""
        stored, removed = self._take_blocks()
        fetching = (0.0, 0.0) if self._tiers is None else self._tiers.fetch_time
        times = self._pacer.token_s if self._pacer.tells else 0.0, self._pacer.plain_s, *fetching
        if not stored and not removed and not any(map(_has_moved, times, self._told_times)):
            return None
        self._told_times = times
        return Held(
            stored=b"".join(digest[:DIGEST_BYTES] for digest in stored),
            removed=b"".join(digest[:DIGEST_BYTES] for digest in removed),
            token_s=times[0],
            step_s=times[1],
            fetch_s=times[2],
            block_fetch_s=times[3],
        )

    def _take_blocks(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the digests of blocks that can be found now, and of those that cannot, of all that have changed."""
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


def _has_moved(now: float, told: float) -> bool:
    if math.isinf(now) or math.isinf(told):
        return now != told
    return abs(now - told) > MOVED * told
