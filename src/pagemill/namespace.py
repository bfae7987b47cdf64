"""Who can find a block, a session or a pin: requests of one tenant with equal `cache_salt`."""

from __future__ import annotations

from typing import NamedTuple

from pagemill.tenant_limits import DEFAULT_TENANT


class Namespace(NamedTuple):
    """Names of sessions and pins are its own, and so are the digests of its blocks."""

    tenant: str = DEFAULT_TENANT
    cache_salt: str = ""

    def __str__(self) -> str:
        """Different for every pair, so that no tenant can write a salt that finds another's blocks."""
        return f"{len(self.tenant)}:{self.tenant}{self.cache_salt}"
