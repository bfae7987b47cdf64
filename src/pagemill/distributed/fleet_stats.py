"""FleetStats: statistics of all replicas as one, whose counters go on where replicas rest, go and come back."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from pagemill.distributed.merging import merge
from pagemill.engine.stats import ENGINE_METRICS, TENANT_METRICS, EngineStats, TenantStats

GONE_KEPT = 64
"""Replicas without a connection of which it is known how far they had counted, in case they come back."""

COUNTERS = {
    kind: frozenset(metric.field for metric in metrics if metric.kind == "counter")
    for kind, metrics in ((EngineStats, ENGINE_METRICS), (TenantStats, TENANT_METRICS))
}
FALLING = tuple(metric.field for metric in ENGINE_METRICS if metric.kind == "counter" and metric.label is None)
"""Counters by which an engine is seen to have begun anew: any of them is lower than before."""

S = TypeVar("S", EngineStats, TenantStats)


class FleetStats:
    """Keeps the last statistics of each replica, and the sum of counters of those that will not count on.

    A replica that is connected again counts on from what it had, so its figures stay its own when a connection ends.
    """

    def __init__(self) -> None:
        self._last: dict[str, EngineStats] = {}
        self._gone: dict[str, None] = {}
        """Replicas without a connection, the longest gone first."""
        self._base: EngineStats | None = None

    def note(self, replica: str, stats: EngineStats) -> None:
        """Takes a replica's statistics."""
        self._gone.pop(replica, None)
        before = self._last.get(replica)
        if before is not None and any(getattr(stats, name) < getattr(before, name) for name in FALLING):
            self._retire(replica)
        self._last[replica] = stats

    def leave(self, replica: str, *, engine_died: bool) -> None:
        """Notes that the connection to a replica has ended."""
        if replica not in self._last:
            return
        if engine_died:
            self._retire(replica)
            return
        self._gone[replica] = None
        while len(self._gone) > GONE_KEPT:
            self._retire(next(iter(self._gone)))

    def total(self, living: Collection[str]) -> EngineStats:
        """Returns the figures of the replicas that live, with the counters of all that there have been. Some replica
        must have been noted."""
        whole = [stats for name, stats in self._last.items() if name in living]
        others = [_counters_of(stats) for name, stats in self._last.items() if name not in living]
        return merge([*whole, *others, *([] if self._base is None else [self._base])])

    def _retire(self, replica: str) -> None:
        """Adds what a replica has counted to the base, once and for all."""
        self._gone.pop(replica, None)
        counted = _counters_of(self._last.pop(replica))
        self._base = counted if self._base is None else merge([self._base, counted])


def _counters_of(stats: S) -> S:
    """Returns what counts from the start, with nothing in all other fields."""
    kind = type(stats)
    values = {name: getattr(stats, name) for name in kind.__struct_fields__}
    kept = {name: value if name in COUNTERS[kind] else type(value)() for name, value in values.items()}
    if isinstance(stats, EngineStats):
        kept["tenants"] = {name: _counters_of(tenant) for name, tenant in stats.tenants.items()}
    return kind(**kept)
