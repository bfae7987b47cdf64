"""In which tiers KV blocks lie: those of a running sequence, and those that a prompt would find."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from pagemill.errors import KVStoreError
from pagemill.kvcache.offload_tiers import OffloadTiers, Sources
from pagemill.memory.manager import MemoryManager, Residency


def by_tier(memory: MemoryManager, streams_from: str, places: Residency) -> dict[str, int]:
    """Those in the pool, and, where contexts may be longer than that, those in the tier that they stream from."""
    return {"device": places.resident, **({streams_from: places.streamed} if memory.streamed.count else {})}


def findable(
    memory: MemoryManager, streams_from: str, tiers: OffloadTiers | None, digests: Sequence[bytes]
) -> dict[str, int]:
    """Those that a prompt would find that goes on behind a chain, each in the highest tier that has it. A tier that can
    not say counts as empty."""
    sources = None if tiers is None else Sources(tiers, digests)

    def is_stored(block: tuple[bytes, int]) -> bool:
        with suppress(KVStoreError):
            return sources is not None and sources[block] is not None
        return False

    digests = digests[: memory.reach(digests, is_stored)]
    found = by_tier(memory, streams_from, memory.chain_residency(digests))
    if tiers is not None and sources is not None:
        found |= {tier.name: found.get(tier.name, 0) for tier in tiers.tiers}
        for entry, group in memory.missing(digests):
            if (at := sources[digests[entry], group]) is not None:
                found[tiers.tiers[at].name] += 1
    return found
