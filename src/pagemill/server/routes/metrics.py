"""Writes `/metrics` for Prometheus: the engine's counters, and the times of requests, under vLLM's names where it has
one, with `pagemill:` before them. Each has the label `model_name`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagemill.engine.stats import ENGINE_METRICS, TENANT_METRICS, EngineStats, MetricOf, TenantStats
from pagemill.frontend.request_state import RequestState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
PER_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
REQUEST_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)

FAMILIES: dict[str, type[GaugeMetricFamily | CounterMetricFamily]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
}


class FirstTokens(NamedTuple):
    """How many requests had a first token, and the sum of the seconds that they waited for it."""

    requests: int = 0
    seconds: float = 0.0


class Metrics:
    """Counts requests and their times: `observe` takes each when it has ended, `render` writes all of it out."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.first_tokens = FirstTokens()
        self._registry = CollectorRegistry()
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", FIRST_TOKEN_S
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Seconds per token of a request after its first.", PER_TOKEN_S
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Seconds from a request's arrival to its first step.", FIRST_TOKEN_S
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", REQUEST_S
        )
        self._ended = Counter(
            "pagemill:request_success",
            "Sequences that have ended, by how they ended.",
            ["finished_reason"],
            registry=self._registry,
        )
        self._lag = self._histogram(
            "event_loop_lag_seconds",
            "Seconds by which the HTTP server's event loop was late, measured every 5 ms where a request is open.",
            LAG_S,
        )
        self._longest_lag = Gauge(
            "pagemill:event_loop_lag_max_seconds",
            "Longest lag of the HTTP server's event loop since metrics were last asked for.",
            registry=self._registry,
        )
        self._held = self._histogram(
            "event_loop_held_seconds",
            "Seconds by which the HTTP server's event loop was late, without waits for a processor.",
            LAG_S,
        )
        self._longest_held = Gauge(
            "pagemill:event_loop_held_max_seconds",
            "Longest lag of the HTTP server's event loop since the last scrape, without waits for a processor.",
            registry=self._registry,
        )
        self._longest_lag_s = self._longest_held_s = 0.0
        self._answers = Counter(
            "pagemill:http_requests",
            "HTTP requests that have ended, by path and by status of the answer.",
            ["path", "status"],
            registry=self._registry,
        )

    def observe_answer(self, path: str, status: int) -> None:
        """Counts an HTTP request that has ended. path: as its route declares it, for there are few of those."""
        self._answers.labels(path, str(status)).inc()

    def observe(self, request: RequestState) -> None:
        """Counts a request that has ended."""
        times = request.metrics
        for sequence in request.sequences:
            self._ended.labels(sequence.output.finish_reason or ("abort" if request.error is None else "error")).inc()
        if times.time_in_queue is not None:
            self._queue.observe(times.time_in_queue)
        if times.first_token_time is not None and times.last_token_time is not None:
            waited_s, known = times.first_token_time - times.arrival_time, self.first_tokens
            self.first_tokens = FirstTokens(known.requests + 1, known.seconds + waited_s)
            self._first_token.observe(waited_s)
            later = max(len(sequence.output.token_ids) for sequence in request.sequences) - 1
            if later > 0:
                self._per_token.observe((times.last_token_time - times.first_token_time) / later)
        if times.finished_time is not None:
            self._whole.observe(times.finished_time - times.arrival_time)

    def observe_lag(self, lag_s: float, held_s: float) -> None:
        """Counts by how many seconds the event loop was late. held_s: what the front end itself is to blame for."""
        self._lag.observe(lag_s)
        self._held.observe(held_s)
        self._longest_lag_s, self._longest_held_s = max(self._longest_lag_s, lag_s), max(self._longest_held_s, held_s)

    def render(self, stats: EngineStats | None, restarts: tuple[int, int]) -> bytes:
        """Returns all metrics in Prometheus' text format.

        stats: None while there is no engine to ask. restarts: of engines, and requests that were sent again.
        """
        self._longest_lag.set(self._longest_lag_s)
        self._longest_held.set(self._longest_held_s)
        self._longest_lag_s = self._longest_held_s = 0.0
        collectors: list[Collector | CollectorRegistry] = [_Restarts(*restarts), self._registry]
        if stats is not None:
            collectors.insert(0, _Engine(stats))
        labelled = CollectorRegistry()
        labelled.register(_OfModel(self._model_name, collectors))
        return generate_latest(labelled)

    def _histogram(self, name: str, about: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"pagemill:{name}", about, buckets=tuple(buckets), registry=self._registry)


class _OfModel(Collector):
    """Collects what others do, with the model's name on every sample."""

    def __init__(self, model_name: str, collectors: Sequence[Collector | CollectorRegistry]) -> None:
        self._label = {"model_name": model_name}
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        for collector in self._collectors:
            for metric in collector.collect():
                metric.samples = [sample._replace(labels=self._label | sample.labels) for sample in metric.samples]
                yield metric


class _Restarts(Collector):
    """Collects what became of engines that died."""

    def __init__(self, restarts: int, sent_again: int) -> None:
        self._restarts = restarts
        self._sent_again = sent_again

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "pagemill:engine_restarts",
            "Engine processes that took the place of one that had died.",
            value=self._restarts,
        )
        yield CounterMetricFamily(
            "pagemill:requests_sent_again",
            "Requests that were sent once more, to an engine that took the place of another.",
            value=self._sent_again,
        )


class _Engine(Collector):
    """Collects one snapshot of the engine."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        for metric in ENGINE_METRICS:
            yield _family(metric, "", {(): stats})
        held = "Share of the KV pool's blocks that sequences hold, 0 to 1."
        yield GaugeMetricFamily("pagemill:kv_cache_usage_perc", held, value=stats.frames_active / max(1, stats.frames))
        blocks = GaugeMetricFamily("pagemill:kv_blocks", "Blocks of the KV pool, by state.", labels=["state"])
        for state in ("free", "cached", "active"):
            blocks.add_metric([state], getattr(stats, f"frames_{state}"))
        yield blocks
        owned = GaugeMetricFamily(
            "pagemill:tenant_kv_blocks", "Blocks of the KV pool, by tenant and state.", labels=["tenant", "state"]
        )
        for name, tenant in stats.tenants.items():
            for state in ("cached", "active"):
                owned.add_metric([name, state], getattr(tenant, f"blocks_{state}"))
        yield owned
        for metric in TENANT_METRICS:
            yield _family(metric, "tenant_", {(name,): tenant for name, tenant in stats.tenants.items()}, "tenant")


def _family(
    metric: MetricOf, prefix: str, owners: Mapping[tuple[str, ...], EngineStats | TenantStats], *owner: str
) -> GaugeMetricFamily | CounterMetricFamily:
    """Returns the samples of all owners of a metric. owner: the labels that tell them apart."""
    labels = owner if metric.label is None else (*owner, metric.label)
    family = FAMILIES[metric.kind](f"pagemill:{prefix}{metric.name}", metric.help, labels=labels)
    for names, stats in owners.items():
        for own, value in metric.samples(stats):
            family.add_metric([*names, *own.values()], value)
    return family
