"""Decides which tenant's blocks make room in a tier below the pool.

As in the pool, the tenant that has borrowed most gives way: the one that has most beyond its guarantee. What is
guaranteed to a tenant of the pool is guaranteed to it of each tier, as the same part. A tenant's share is its
guarantee, and an equal part of what the tier has beyond the guarantees of all who have blocks there. Within its share,
it loses no block to others'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pagemill.memory.tenants import give_way


class TierShares:
    """Shares a tier of `size`, in any unit, among tenants.

    parts: what is kept for a tenant, by name, as a part of the tier; others may borrow it, and give it back first.
    """

    def __init__(self, size: int, parts: Mapping[str, float] | None = None) -> None:
        self.size = size
        self.parts = parts or {}

    def giving(self, held: Mapping[str, int]) -> Counter[str]:
        """Returns how much of each tenant's makes room until the rest has room.

        held: by tenant, what it has in the tier, with what comes.
        """
        excess = sum(held.values()) - self.size
        if excess <= 0:
            return Counter()
        parts, size = self.parts, self.size
        return Counter(give_way(held, lambda name: held[name] - int(parts.get(name, 0.0) * size), excess))
