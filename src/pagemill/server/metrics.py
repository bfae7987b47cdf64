"""What Prometheus reads from `/metrics`: the engine's counters, and the times of requests, under vLLM's names where it
has one, with `pagemill:` before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagemill.engine.messages import EngineStats
from pagemill.engine.output_processor import RequestState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
PER_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
REQUEST_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)

GAUGES = {
    "num_requests_running": ("Sequences that run.", "running"),
    "num_requests_waiting": ("Sequences that wait.", "waiting"),
    "step_prompt_tokens": (
        "Tokens of prompts that a step may take beside sequences that generate.",
        "step_prompt_tokens",
    ),
    "running_limit": ("Sequences beyond which none is admitted.", "running_limit"),
    "watermark_blocks": ("Blocks that admission leaves free for running sequences to grow.", "watermark_blocks"),
    "kv_block_bytes": ("Bytes of one block.", "block_bytes"),
    "kv_blocks_streamed": ("Blocks in use that attention reads in a lower tier.", "blocks_streamed"),
    "kv_slots_reserved": ("Token slots of all blocks that sequences hold, shared ones once.", "slots_reserved"),
    "kv_slots_written": ("Those of them that hold a token.", "slots_written"),
    "kv_table_steps": ("Steps from one of a sequence's blocks to the next.", "table_steps"),
    "kv_table_steps_apart": ("Those that do not lead to the neighbouring frame.", "table_steps_apart"),
}
COUNTERS = {
    "engine_steps": ("Steps of the engine.", "steps"),
    "prompt_tokens": ("Prompt tokens taken in.", "prompt_tokens"),
    "generation_tokens": ("Tokens generated.", "generated_tokens"),
    "prefix_cache_queries": ("Tokens looked up in the prefix cache.", "prefix_queried_tokens"),
    "prefix_cache_hits": ("Tokens found there.", "prefix_hit_tokens"),
    "num_preemptions": ("Sequences that lost their blocks to others.", "preemptions"),
    "preempted_tokens_recomputed": ("Their tokens that were computed once more.", "preempted_tokens_recomputed"),
    "preempted_tokens_swapped_in": ("Those that came back from lower tiers.", "preempted_tokens_swapped_in"),
    "kv_evictions": ("Cached blocks that made room.", "evictions"),
    "kv_evictions_regretted": ("Evicted blocks that were wanted again before long.", "evictions_regretted"),
    "kv_copies": ("Blocks copied before a write, because others share them.", "copies"),
    "kv_compaction_copies": ("Blocks copied to make a sequence's frames neighbours.", "compaction_copies"),
    "kv_compactions": ("Times that a sequence's blocks were moved for it.", "compactions"),
    "kv_blocks_saved": ("Blocks that went to lower tiers.", "blocks_saved"),
    "kv_blocks_dropped": ("Blocks that did not, because storing failed or could not keep up.", "blocks_dropped"),
    "kv_blocks_loaded": ("Blocks that came back from lower tiers.", "blocks_loaded"),
    "kv_blocks_missed": ("Blocks that should have come back and were not there, or broken.", "blocks_missed"),
    "kv_loading_seconds": ("Time in which blocks from lower tiers were under way.", "loading_s"),
    "kv_stalled_seconds": ("Time in which nothing could be computed before they came.", "stalled_s"),
}
"""By name: what it is, and the field of `EngineStats`."""

TENANT_GAUGES = {
    "running": "A tenant's sequences that run.",
    "waiting": "Those that wait.",
    "guaranteed_blocks": "Blocks that are kept for a tenant.",
}
TENANT_COUNTERS = {
    "preemptions": "A tenant's sequences that lost their blocks.",
    "evictions": "A tenant's cached blocks that made room.",
    "prefix_queried_tokens": "A tenant's tokens looked up in the prefix cache.",
    "prefix_hit_tokens": "Those found there.",
}
"""By field of `TenantStats`: what it is."""


class Metrics:
    """Give `observe` every request when it has ended; `render` writes it all out."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._first_token = self._histogram("time_to_first_token_seconds", "From arrival to a token.", FIRST_TOKEN_S)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "A request's time after its first token, by token.", PER_TOKEN_S
        )
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the first step.", FIRST_TOKEN_S)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", REQUEST_S)
        self._ended = Counter(
            "pagemill:request_success", "Sequences by how they ended.", ["finished_reason"], registry=self._registry
        )

    def observe(self, request: RequestState) -> None:
        times = request.metrics
        for sequence in request.sequences:
            self._ended.labels(sequence.finish_reason or "abort").inc()
        if times.time_in_queue is not None:
            self._queue.observe(times.time_in_queue)
        if times.first_token_time is not None and times.last_token_time is not None:
            self._first_token.observe(times.first_token_time - times.arrival_time)
            later = max(len(sequence.token_ids) for sequence in request.sequences) - 1
            if later > 0:
                self._per_token.observe((times.last_token_time - times.first_token_time) / later)
        if times.finished_time is not None:
            self._whole.observe(times.finished_time - times.arrival_time)

    def render(self, stats: EngineStats | None) -> bytes:
        """Prometheus' text format. stats: None while there is no engine to ask."""
        requests = generate_latest(self._registry)
        if stats is None:
            return requests
        engine = CollectorRegistry()
        engine.register(_Engine(stats))
        return generate_latest(engine) + requests

    def _histogram(self, name: str, about: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"pagemill:{name}", about, buckets=tuple(buckets), registry=self._registry)


class _Engine(Collector):
    """One snapshot of the engine."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        for name, (about, field) in GAUGES.items():
            yield GaugeMetricFamily(f"pagemill:{name}", about, value=getattr(stats, field))
        for name, (about, field) in COUNTERS.items():
            yield CounterMetricFamily(f"pagemill:{name}", about, value=getattr(stats, field))
        held = "Share of the KV pool's blocks that sequences hold, 0 to 1."
        yield GaugeMetricFamily("pagemill:kv_cache_usage_perc", held, value=stats.frames_active / stats.frames)
        blocks = GaugeMetricFamily("pagemill:kv_blocks", "Blocks of the KV pool by state.", labels=["state"])
        for state in ("free", "cached", "active"):
            blocks.add_metric([state], getattr(stats, f"frames_{state}"))
        yield blocks
        below = GaugeMetricFamily("pagemill:kv_tier_blocks", "Blocks that lie in lower tiers.", labels=["tier"])
        for tier, held_there in stats.tier_blocks.items():
            below.add_metric([tier], held_there)
        yield below
        owned = GaugeMetricFamily(
            "pagemill:tenant_kv_blocks", "Blocks by tenant and state.", labels=["tenant", "state"]
        )
        for name, tenant in stats.tenants.items():
            owned.add_metric([name, "cached"], tenant.blocks_cached)
            owned.add_metric([name, "active"], tenant.blocks_active)
        yield owned
        for field, about in TENANT_GAUGES.items():
            gauge = GaugeMetricFamily(f"pagemill:tenant_{field}", about, labels=["tenant"])
            for name, tenant in stats.tenants.items():
                gauge.add_metric([name], getattr(tenant, field))
            yield gauge
        for field, about in TENANT_COUNTERS.items():
            counter = CounterMetricFamily(f"pagemill:tenant_{field}", about, labels=["tenant"])
            for name, tenant in stats.tenants.items():
                counter.add_metric([name], getattr(tenant, field))
            yield counter
