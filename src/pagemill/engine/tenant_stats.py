"""Makes the statistics of one tenant from what scheduling and memory know of it."""

from __future__ import annotations

from collections.abc import Mapping

from pagemill.engine.stats import TenantStats
from pagemill.memory.tenants import NO_QUOTA
from pagemill.scheduling.tenancy import TenantState


def tenant_stats(tenant: TenantState, below: Mapping[str, Mapping[str, int]]) -> TenantStats:
    """Returns the statistics of one tenant. below: how many blocks lie in each lower tier, by its name and tenants'."""
    account = tenant.account
    return TenantStats(
        blocks_active=account.active,
        blocks_cached=account.cached,
        tier_blocks={tier: held.get(account.name, 0) for tier, held in below.items()},
        guaranteed_blocks=account.guaranteed_blocks,
        max_blocks=None if account.max_blocks == NO_QUOTA else account.max_blocks,
        running=tenant.running,
        waiting=tenant.waiting,
        preemptions=tenant.preemptions,
        evictions=account.evictions,
        prefix_queried_tokens=tenant.prefix_queried_tokens,
        prefix_hit_tokens=tenant.prefix_hit_tokens,
        limits=tenant.limits,
    )
