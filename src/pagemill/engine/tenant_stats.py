"""Makes the statistics of one tenant from what scheduling and memory know of it."""

from __future__ import annotations

from pagemill.engine.stats import TenantStats
from pagemill.memory.tenants import NO_QUOTA
from pagemill.scheduling.tenancy import TenantState


def tenant_stats(tenant: TenantState) -> TenantStats:
    """Returns the statistics of one tenant."""
    account = tenant.account
    return TenantStats(
        blocks_active=account.active,
        blocks_cached=account.cached,
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
