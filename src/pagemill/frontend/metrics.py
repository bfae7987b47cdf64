"""What `LLM.get_metrics` returns: the engine's counters and gauges, under the names of `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pagemill.engine.stats import ENGINE_METRICS, TENANT_METRICS, EngineStats


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of the engine."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


class Counter(Metric):
    """Counts from the start."""

    __slots__ = ()


class Gauge(Metric):
    """Is as it is now."""

    __slots__ = ()


KINDS: dict[str, type[Metric]] = {"counter": Counter, "gauge": Gauge}


def metrics_of(stats: EngineStats) -> list[Metric]:
    """Returns a snapshot's figures: the engine's, then those of each tenant."""
    return [*_of_engine(stats), *_of_tenants(stats)]


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    for metric in ENGINE_METRICS:
        for labels, value in metric.samples(stats):
            yield KINDS[metric.kind](f"pagemill:{metric.name}", value, labels)
    for state in ("free", "cached", "active"):
        yield Gauge("pagemill:kv_blocks", getattr(stats, f"frames_{state}"), {"state": state})


def _of_tenants(stats: EngineStats) -> Iterator[Metric]:
    for tenant, figures in stats.tenants.items():
        for metric in TENANT_METRICS:
            for labels, value in metric.samples(figures):
                yield KINDS[metric.kind](f"pagemill:tenant_{metric.name}", value, {"tenant": tenant, **labels})
