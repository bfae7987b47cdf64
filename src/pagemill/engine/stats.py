"""Declares the engine's statistics, each once: its field, its help and the metric that it is."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta

from pagemill.tenant_limits import TenantLimits


class MetricOf(NamedTuple):
    """A metric that shows a field. kind: "gauge" or "counter"."""

    field: str
    kind: str
    name: str
    help: str


def _gauge(name: str, description: str) -> Meta:
    return Meta(description=description, extra={"metric": ("gauge", name)})


def _counter(name: str, description: str) -> Meta:
    return Meta(description=description, extra={"metric": ("counter", name)})


class TenantStats(msgspec.Struct, kw_only=True):
    """One tenant: its blocks, limits and sequences now, and sums since the start.

    blocks_active and blocks_cached together are what it is charged; limits are as they were given.
    """

    blocks_active: int
    blocks_cached: int
    guaranteed_blocks: Annotated[int, _gauge("guaranteed_blocks", "Blocks that are kept for a tenant.")]
    max_blocks: int | None
    running: Annotated[int, _gauge("running", "A tenant's sequences that run.")]
    waiting: Annotated[int, _gauge("waiting", "A tenant's sequences that wait.")]
    preemptions: Annotated[int, _counter("preemptions", "A tenant's sequences that lost their blocks.")]
    evictions: Annotated[int, _counter("evictions", "A tenant's cached blocks that made room.")]
    prefix_queried_tokens: Annotated[
        int, _counter("prefix_queried_tokens", "A tenant's tokens looked up in the prefix cache.")
    ]
    prefix_hit_tokens: Annotated[int, _counter("prefix_hit_tokens", "A tenant's tokens found in the prefix cache.")]
    limits: TenantLimits


class EngineStats(msgspec.Struct, tag=True, kw_only=True):
    """A snapshot, cheap enough to be taken after any step. Counters count from the start; times are in seconds."""

    running: Annotated[int, _gauge("num_requests_running", "Sequences that run.")]
    waiting: Annotated[int, _gauge("num_requests_waiting", "Sequences that wait.")]
    preemptions: Annotated[int, _counter("num_preemptions", "Sequences that lost their blocks to others.")]
    step_prompt_tokens: Annotated[
        int, _gauge("step_prompt_tokens", "Tokens of prompts that a step may take beside sequences that generate.")
    ]
    running_limit: Annotated[int, _gauge("running_limit", "Sequences beyond which none is admitted.")]
    watermark_blocks: Annotated[
        int, _gauge("watermark_blocks", "Blocks that admission leaves free for running sequences to grow.")
    ]
    preempted_tokens_recomputed: Annotated[
        int, _counter("preempted_tokens_recomputed", "Tokens of preempted sequences that were computed again.")
    ]
    preempted_tokens_swapped_in: Annotated[
        int, _counter("preempted_tokens_swapped_in", "Tokens of preempted sequences that came back from lower tiers.")
    ]
    steps: Annotated[int, _counter("engine_steps", "Steps of the engine.")]
    prompt_tokens: Annotated[int, _counter("prompt_tokens", "Prompt tokens taken in.")]
    generated_tokens: Annotated[int, _counter("generation_tokens", "Tokens generated.")]
    draft_rows: Annotated[int, _counter("spec_decode_num_drafts", "Rows of steps that had drafts to verify.")] = 0
    draft_tokens: Annotated[int, _counter("spec_decode_num_draft_tokens", "Tokens that were drafted.")] = 0
    accepted_tokens: Annotated[int, _counter("spec_decode_num_accepted_tokens", "Drafts that were accepted.")] = 0
    accepted_per_position: list[int] = []
    """Drafts that were accepted, by their place behind the last token."""
    prefix_queried_tokens: Annotated[int, _counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")]
    prefix_hit_tokens: Annotated[int, _counter("prefix_cache_hits", "Tokens found in the prefix cache.")]
    frames: int
    frames_free: int
    frames_cached: int
    frames_active: int
    blocks_streamed: Annotated[
        int, _gauge("kv_blocks_streamed", "Blocks in use that attention reads in a lower tier.")
    ] = 0
    slots_reserved: Annotated[
        int, _gauge("kv_slots_reserved", "Token slots of all blocks that sequences hold, shared ones once.")
    ]
    slots_written: Annotated[
        int,
        _gauge(
            "kv_slots_written", "Token slots that have a token, of all blocks that sequences hold, shared ones once."
        ),
    ]
    table_steps: Annotated[int, _gauge("kv_table_steps", "Steps from one of a sequence's blocks to the next.")]
    table_steps_apart: Annotated[
        int,
        _gauge(
            "kv_table_steps_apart", "Steps from one of a sequence's blocks to the next that lead to a frame elsewhere."
        ),
    ]
    evictions: Annotated[int, _counter("kv_evictions", "Cached blocks that made room.")]
    evictions_regretted: Annotated[
        int, _counter("kv_evictions_regretted", "Evicted blocks that were wanted again before long.")
    ]
    copies: Annotated[int, _counter("kv_copies", "Blocks copied before a write, because several sequences share them.")]
    compaction_copies: Annotated[
        int, _counter("kv_compaction_copies", "Blocks copied to make a sequence's frames neighbours.")
    ]
    compactions: Annotated[int, _counter("kv_compactions", "Times that a sequence's blocks were moved together.")]
    stalled_s: Annotated[
        float,
        _counter(
            "kv_stalled_seconds", "Seconds in which nothing could be computed before blocks had come from lower tiers."
        ),
    ]
    loading_s: Annotated[
        float, _counter("kv_loading_seconds", "Seconds in which blocks from lower tiers were under way.")
    ]
    block_bytes: Annotated[int, _gauge("kv_block_bytes", "Bytes of one block.")]
    tier_blocks: dict[str, int] = {}
    """Blocks that lie in lower tiers now, by tier ("host", "disk"), streamed ones apart."""
    blocks_saved: Annotated[int, _counter("kv_blocks_saved", "Blocks that went to lower tiers.")] = 0
    blocks_dropped: Annotated[
        int,
        _counter(
            "kv_blocks_dropped", "Blocks that did not go to lower tiers, because storing failed or could not keep up."
        ),
    ] = 0
    blocks_loaded: Annotated[int, _counter("kv_blocks_loaded", "Blocks that came back from lower tiers.")] = 0
    blocks_missed: Annotated[
        int,
        _counter("kv_blocks_missed", "Blocks that should have come back from lower tiers, and were missing or broken."),
    ] = 0
    tenants: dict[str, TenantStats] = {}


def _metrics_of(cls: Any) -> tuple[MetricOf, ...]:
    return tuple(
        MetricOf(field, meta.extra["metric"][0], meta.extra["metric"][1], meta.description or "")
        for field, hint in get_type_hints(cls, include_extras=True).items()
        for meta in getattr(hint, "__metadata__", ())
        if isinstance(meta, Meta) and meta.extra is not None
    )


ENGINE_METRICS = _metrics_of(EngineStats)
TENANT_METRICS = _metrics_of(TenantStats)
