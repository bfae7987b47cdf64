"""Declares the engine's statistics, each once: its field, its help and the metric that it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta

from pagemill.tenant_limits import TenantLimits


class MetricOf(NamedTuple):
    """A metric that shows a field. kind: "gauge" or "counter". label: what the places or keys of a field are that has
    several values; None: it has one."""

    kind: str
    name: str
    label: str | None
    field: str
    help: str

    def samples(self, stats: TenantStats | EngineStats) -> Iterator[tuple[dict[str, str], float]]:
        """Gives the values of the field, each with its labels."""
        value = getattr(stats, self.field)
        if self.label is None:
            yield {}, value
            return
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield {self.label: str(key)}, each


def _gauge(name: str, description: str, label: str | None = None) -> Meta:
    return Meta(description=description, extra={"metric": ("gauge", name, label)})


def _counter(name: str, description: str, label: str | None = None) -> Meta:
    return Meta(description=description, extra={"metric": ("counter", name, label)})


class TenantStats(msgspec.Struct, kw_only=True):
    """One tenant: its blocks, limits and sequences now, and sums since the start.

    blocks_active and blocks_cached together are what it is charged in the pool. Limits are as they were given.
    """

    blocks_active: int
    blocks_cached: int
    tier_blocks: Annotated[
        dict[str, int],
        _gauge("kv_tier_blocks", "A tenant's KV blocks that lie in host memory or on disk, by tier.", "tier"),
    ]
    guaranteed_blocks: Annotated[
        int, _gauge("guaranteed_blocks", "KV blocks that no other tenant can take from a tenant.")
    ]
    max_blocks: int | None
    running: Annotated[int, _gauge("running", "A tenant's sequences that the engine computes in its steps.")]
    waiting: Annotated[int, _gauge("waiting", "A tenant's sequences that wait to be computed.")]
    preemptions: Annotated[
        int, _counter("preemptions", "Times that a tenant's running sequence lost its KV blocks to others.")
    ]
    evictions: Annotated[int, _counter("evictions", "Cached KV blocks of a tenant that made room for others.")]
    prefix_queried_tokens: Annotated[
        int, _counter("prefix_queried_tokens", "Prompt tokens of a tenant that were looked up in the prefix cache.")
    ]
    prefix_hit_tokens: Annotated[
        int, _counter("prefix_hit_tokens", "Prompt tokens of a tenant that were found in the prefix cache.")
    ]
    limits: TenantLimits


class EngineStats(msgspec.Struct, tag=True, kw_only=True):
    """A snapshot, cheap enough to be taken after any step. Counters count from the start; times are in seconds."""

    running: Annotated[int, _gauge("num_requests_running", "Sequences that the engine computes in its steps.")]
    waiting: Annotated[int, _gauge("num_requests_waiting", "Sequences that wait to be computed.")]
    preemptions: Annotated[
        int, _counter("num_preemptions", "Times that a running sequence lost its KV blocks to others.")
    ]
    step_prompt_tokens: Annotated[
        int,
        _gauge(
            "step_prompt_tokens", "Prompt tokens that a step of the engine may take beside sequences that generate."
        ),
    ]
    running_limit: Annotated[int, _gauge("running_limit", "Running sequences beyond which the engine admits no other.")]
    watermark_blocks: Annotated[
        int, _gauge("watermark_blocks", "KV blocks that admission leaves free for running sequences to grow.")
    ]
    preempted_tokens_recomputed: Annotated[
        int, _counter("preempted_tokens_recomputed", "Tokens of preempted sequences that were computed again.")
    ]
    preempted_tokens_swapped_in: Annotated[
        int,
        _counter(
            "preempted_tokens_swapped_in", "Tokens of preempted sequences that came back from host memory or disk."
        ),
    ]
    steps: Annotated[
        int, _counter("engine_steps", "Steps of the engine, each of which computes tokens of several sequences.")
    ]
    prompt_tokens: Annotated[int, _counter("prompt_tokens", "Tokens of the prompts that the engine has taken in.")]
    generated_tokens: Annotated[int, _counter("generation_tokens", "Tokens that the engine has generated.")]
    draft_rows: Annotated[
        int, _counter("spec_decode_num_drafts", "Sequences of steps that had drafted tokens to verify.")
    ] = 0
    draft_tokens: Annotated[
        int, _counter("spec_decode_num_draft_tokens", "Tokens that speculative decoding drafted.")
    ] = 0
    accepted_tokens: Annotated[
        int, _counter("spec_decode_num_accepted_tokens", "Drafted tokens that the model accepted.")
    ] = 0
    draft_branches: Annotated[
        int,
        _counter(
            "spec_decode_num_branches",
            "Less likely paths of drafted tokens, verified beside the likeliest one of a step.",
        ),
    ] = 0
    accepted_branches: Annotated[
        int,
        _counter("spec_decode_num_accepted_branches", "Less likely paths of drafted tokens that the model followed."),
    ] = 0
    drafted_per_position: Annotated[
        list[int],
        _counter(
            "spec_decode_num_draft_tokens_per_pos",
            "Sequences of steps that had drafted tokens for a place, by that place behind the last token.",
            "position",
        ),
    ] = []
    accepted_per_position: Annotated[
        list[int],
        _counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that the model accepted, by place behind the last token.",
            "position",
        ),
    ] = []
    draft_source_requests: Annotated[
        int, _gauge("spec_decode_cached_requests", "Answers that are kept for drafts of other requests.")
    ] = 0
    draft_source_tokens: Annotated[
        int, _gauge("spec_decode_cached_tokens", "Tokens of the answers that are kept for drafts of other requests.")
    ] = 0
    prefix_queried_tokens: Annotated[
        int, _counter("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.")
    ]
    prefix_hit_tokens: Annotated[
        int, _counter("prefix_cache_hits", "Prompt tokens that were found in the prefix cache.")
    ]
    frames: int
    frames_free: int
    frames_cached: int
    frames_active: int
    blocks_streamed: Annotated[
        int, _gauge("kv_blocks_streamed", "KV blocks in use that attention reads in host memory or on disk.")
    ] = 0
    slots_reserved: Annotated[
        int, _gauge("kv_slots_reserved", "Token slots of all KV blocks that sequences hold, shared blocks once.")
    ]
    slots_written: Annotated[
        int,
        _gauge(
            "kv_slots_written",
            "Token slots that hold a token, of all KV blocks that sequences hold, shared blocks once.",
        ),
    ]
    table_steps: Annotated[
        int, _gauge("kv_table_steps", "Places at which attention goes from one KV block of a sequence to the next.")
    ]
    table_steps_apart: Annotated[
        int,
        _gauge(
            "kv_table_steps_apart", "Places at which the next KV block of a sequence lies elsewhere than right behind."
        ),
    ]
    evictions: Annotated[int, _counter("kv_evictions", "Cached KV blocks that made room for others.")]
    evictions_regretted: Annotated[
        int, _counter("kv_evictions_regretted", "Evicted KV blocks that were wanted again before long.")
    ]
    copies: Annotated[
        int, _counter("kv_copies", "KV blocks copied before a write, because several sequences share them.")
    ]
    compaction_copies: Annotated[
        int, _counter("kv_compaction_copies", "KV blocks copied so that a sequence's blocks lie side by side.")
    ]
    compactions: Annotated[int, _counter("kv_compactions", "Times that a sequence's KV blocks were moved together.")]
    stalled_s: Annotated[
        float,
        _counter(
            "kv_stalled_seconds",
            "Seconds in which the engine computed nothing, waiting for KV blocks from host memory or disk.",
        ),
    ]
    loading_s: Annotated[
        float, _counter("kv_loading_seconds", "Seconds in which KV blocks from host memory or disk were under way.")
    ]
    block_bytes: Annotated[int, _gauge("kv_block_bytes", "Bytes of one KV block.")]
    graphs: Annotated[int, _gauge("cuda_graphs", "Kinds of decode steps that are captured as CUDA graphs.")] = 0
    graph_bytes: Annotated[
        int, _gauge("cuda_graph_bytes", "Bytes of a GPU that torch holds for captured decode steps.")
    ] = 0
    tier_blocks: Annotated[
        dict[str, int], _gauge("kv_tier_blocks", "KV blocks that lie in host memory or on disk, by tier.", "tier")
    ] = {}
    """Streamed ones apart."""
    blocks_saved: Annotated[int, _counter("kv_blocks_saved", "KV blocks that were saved to host memory or disk.")] = 0
    blocks_dropped: Annotated[
        int,
        _counter(
            "kv_blocks_dropped",
            "KV blocks that were not saved to host memory or disk, because storing failed or could not keep up.",
        ),
    ] = 0
    blocks_loaded: Annotated[
        int, _counter("kv_blocks_loaded", "KV blocks that came back from host memory or disk.")
    ] = 0
    blocks_missed: Annotated[
        int,
        _counter(
            "kv_blocks_missed",
            "KV blocks that should have come back from host memory or disk, and were missing or broken.",
        ),
    ] = 0
    blocks_fetched: Annotated[
        int, _counter("kv_blocks_fetched", "KV blocks that came from other replicas instead of being computed.")
    ] = 0
    fetched_bytes: Annotated[int, _counter("kv_fetched_bytes", "Bytes of KV blocks that came from other replicas.")] = 0
    fetching_s: Annotated[
        float,
        _counter("kv_fetching_seconds", "Seconds of reads from other replicas, summed over reads at the same time."),
    ] = 0.0
    fetches_failed: Annotated[
        dict[str, int],
        _counter(
            "kv_fetches_failed",
            "KV blocks that were wanted from other replicas and were computed instead, by reason.",
            "reason",
        ),
    ] = {}
    """The reasons are `peer_wire.REASONS`."""
    blocks_served: Annotated[int, _counter("kv_blocks_served", "KV blocks that were given to other replicas.")] = 0
    served_bytes: Annotated[int, _counter("kv_served_bytes", "Bytes that were sent to other replicas.")] = 0
    peers_refused: Annotated[
        int,
        _counter("kv_peers_refused", "Connections for KV blocks that were refused: they did not know the secret."),
    ] = 0
    tenants: dict[str, TenantStats] = {}


def _metrics_of(cls: Any) -> tuple[MetricOf, ...]:
    return tuple(
        MetricOf(kind, name, label, field, meta.description or "")
        for field, hint in get_type_hints(cls, include_extras=True).items()
        for meta in getattr(hint, "__metadata__", ())
        if isinstance(meta, Meta) and meta.extra is not None
        for kind, name, label in [meta.extra["metric"]]
    )


ENGINE_METRICS = _metrics_of(EngineStats)
TENANT_METRICS = _metrics_of(TenantStats)
