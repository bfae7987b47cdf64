"""Builds an engine's parts from its configuration: the executor, the KV pool in what memory is left, then the rest."""

from __future__ import annotations

import logging
import math

from pagemill.config import EngineConfig
from pagemill.engine.messages import Peering
from pagemill.engine.tiers import Streamed, Tiers, asks_for_tiers, host_bytes, make_tiers, streamed_room
from pagemill.errors import ConfigError, KVMemoryError
from pagemill.executor.interface import Executor, ExecutorFacts, ExecutorMemory
from pagemill.kvcache.kv_quality import label_of
from pagemill.kvcache.sizing import num_frames
from pagemill.memory.block_table import Footprint
from pagemill.memory.eviction import POLICIES
from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.model_drafting import ModelDrafter
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.speculation import Drafter, NgramDrafter
from pagemill.scheduling.suffix_drafting import SuffixDrafter
from pagemill.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)


def build(
    config: EngineConfig, executor: Executor, publishes: bool, peering: Peering | None
) -> tuple[MemoryManager, Tiers | None, Scheduler, Streamed]:
    """Allocates the executor's pool, and builds around it what an `EngineCore` drives beside the executor.

    publishes: whether memory manager and tiers record which blocks come and go. peering: see `EngineCore`.
    Returns the room for streamed blocks too. Raises `ConfigError` children and KVStoreError.
    """
    facts = executor.facts
    if (label := label_of(facts.kv.name)) is not None:
        logger.warning("%s", label)
    frames, streamed = _sizes(config, facts, executor.memory())
    if not config.enable_prefix_caching:
        _check_use_of_tiers(config, streamed)
    host = host_bytes(config, facts, frames)
    first_streamed = executor.allocate(frames, streamed.frames, streamed.folder)
    memory = MemoryManager(
        frames,
        config.block_size,
        list(facts.windows),
        config.enable_prefix_caching,
        POLICIES[config.eviction_policy](facts.attention_share),
        host > 0 or config.kv_disk_memory is not None,
        (first_streamed, streamed.frames),
        publishes,
    )
    tiers = make_tiers(config, executor, memory, streamed, host, publishes, peering)
    try:
        scheduler = Scheduler(
            memory,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            eos_token_ids=frozenset(facts.eos_token_ids),
            ageing_s=config.ageing_s,
            enable_prefix_caching=config.enable_prefix_caching,
            stored=None if tiers is None else tiers.stored,
            swap_blocks=0 if tiers is None else tiers.swap_blocks,
            max_pinned_share=config.max_pinned_share,
            target_tpot_s=_target_s(config.target_tpot_ms),
            compacts=config.kv_compaction == "auto" and facts.compacts,
            drafter=_drafter(config, facts),
        )
        scheduler.set_tenants(config.tenants)
    except BaseException:
        if tiers is not None:
            tiers.close()
        raise
    return memory, tiers, scheduler, streamed


def _drafter(config: EngineConfig, facts: ExecutorFacts) -> Drafter | None:
    speculation = config.asked_drafts
    if speculation is None:
        drafts = config.speculative_config == "auto" and not facts.overlaps
        return NgramDrafter(SpeculativeConfig(method="ngram")) if drafts else None
    if facts.drafts is not None:
        most, branches = speculation.most_drafts(facts.drafts.most), speculation.num_speculative_branches
        return ModelDrafter(most, facts.drafts.cost, facts.drafts.takes_in, branches)
    return SuffixDrafter(speculation) if speculation.method == "suffix" else NgramDrafter(speculation)


def _target_s(target_tpot_ms: float | str) -> float | None:
    """Returns the scheduler's `target_tpot_s` for a setting."""
    if isinstance(target_tpot_ms, str):
        return None if target_tpot_ms == "auto" else math.inf
    return target_tpot_ms / 1e3


def _check_use_of_tiers(config: EngineConfig, streamed: Streamed) -> None:
    """Raises ConfigError for a lower tier that nothing would use without prefix caching: no context streams from it."""
    for tier, asked in (("host", config.asks_for_host_memory), ("disk", config.kv_disk_memory is not None)):
        name = f"kv_{tier}_memory"
        if asked and not streamed.of(tier, 1):
            size = getattr(config, name)
            raise ConfigError(
                f"{name} is {size!r}, but without prefix caching nothing that leaves the pool is found again, and no "
                f"context is too long for the pool and streams from there; leave {name} out, or enable_prefix_caching "
                f"on",
                param=name,
            )


def _sizes(config: EngineConfig, facts: ExecutorFacts, memory: ExecutorMemory) -> tuple[int, Streamed]:
    """Returns as many frames of the pool as the settings and the machine's memory give, and the room beside it that
    contexts longer than the pool need.

    Raises `KVMemoryError` if a sequence of the `max_model_len` that was asked for could not fit, lower tiers included.
    """
    windows, chunk, frame_bytes = list(facts.windows), config.max_num_batched_tokens, facts.frame_bytes
    longest = max(1, facts.max_model_len - 1)  # an answer's last token has no slot, a prompt's has
    needed = Footprint(config.block_size, windows).frames(longest, chunk)
    per_rank = config.kv_cache_memory_bytes
    frames = num_frames(
        frame_bytes,
        needed * config.max_num_seqs,
        free=memory.free,
        total=memory.total,
        kv_memory=config.kv_memory,
        kv_cache_memory_bytes=per_rank and per_rank * config.tensor_parallel_size,
        gpu_memory_utilization=config.gpu_memory_utilization,
        counts_steps=facts.counts_steps,
    )
    least, streamed = needed if config.max_model_len is not None else len(windows), Streamed()
    if frames < least and asks_for_tiers(config) and facts.streams:
        resident = Footprint(config.block_size, windows, needed).frames(longest, chunk)
        frames, streamed = _with_streamed(config, facts, frames, needed, resident)
        least = max(resident, needed - streamed.frames)
    if frames < least:
        tiers = " or ".join(f"kv_{tier}_memory" for tier in facts.streams)
        raise KVMemoryError(
            f"the KV pool has {frames} blocks ({frames * frame_bytes} bytes), but one sequence needs "
            f"{least} ({least * frame_bytes} bytes) for max_model_len={facts.max_model_len}; raise kv_memory, "
            f"{f'give {tiers} what is missing, ' if tiers else ''}or lower max_model_len",
            param="kv_memory",
        )
    return frames, streamed


def _with_streamed(
    config: EngineConfig, facts: ExecutorFacts, frames: int, needed: int, resident: int
) -> tuple[int, Streamed]:
    """Returns the frames of the pool, and the room for what it lacks of the `needed` ones, of which `resident` must be
    in it. What streamed frames take of the device is taken from the pool: then there are no more than needed."""
    frame_bytes, each = facts.frame_bytes, facts.streamed_bytes
    if not each:
        return frames, streamed_room(config, facts.streams, needed - frames, needed - resident, frame_bytes)
    if each >= frame_bytes:
        return frames, Streamed()
    count = -(-(needed - frames + 1) * frame_bytes // (frame_bytes - each))
    streamed = streamed_room(config, facts.streams, count, count, frame_bytes)
    return max(0, frames - frames_taken(facts, streamed)), streamed


def frames_taken(facts: ExecutorFacts, streamed: Streamed) -> int:
    """Returns how many more frames the pool could have, were there none that stream."""
    taken = streamed.frames * facts.streamed_bytes
    return -(-taken // facts.frame_bytes) + 1 if taken else 0
