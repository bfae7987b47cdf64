"""Builds an engine's parts from its configuration: the model, the KV pool in what memory is left, then the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagemill.attention.quantize import FORMAT
from pagemill.attention.select import select_attention
from pagemill.config import EngineConfig
from pagemill.engine.messages import EngineReady
from pagemill.engine.runner import Runner
from pagemill.engine.tiers import Streamed, Tiers, make_tiers, streamed_room, wants_tiers
from pagemill.errors import ConfigError, KVMemoryError
from pagemill.hub import resolve_model
from pagemill.kvcache.device_pool import DevicePool, default_layout
from pagemill.kvcache.layer_groups import LayerGroups
from pagemill.kvcache.pages_ahead import PagesAhead
from pagemill.kvcache.sizing import device_memory, num_frames
from pagemill.memory.compaction import Compaction
from pagemill.memory.eviction import POLICIES
from pagemill.memory.manager import MemoryManager
from pagemill.memory.needs import Needs
from pagemill.models.loading import LoadedModel, load_model
from pagemill.ops.compiled import check_compiled
from pagemill.ops.select import select_ops
from pagemill.ops.vector_math import settle_vector_math
from pagemill.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class Engine:
    """What an `EngineCore` drives. kv_format and numerics go into the digests that name blocks."""

    memory: MemoryManager
    pool: DevicePool
    scheduler: Scheduler
    runner: Runner
    ready: EngineReady
    fingerprint: bytes
    kv_format: str
    numerics: str
    tiers: Tiers | None


def build(config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> Engine:
    """Loads the model and allocates the pool. Raises `ModelLoadError` and `ConfigError` children, `StaleKernelsError`.

    progress(done, total): bytes of weights, called while they load.
    """
    check_compiled()
    device = _device(config.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    settle_vector_math()
    ops, attention = select_ops(device, config.num_threads), select_attention(device)
    model = load_model(
        resolve_model(config.model),
        dtype=config.dtype,
        hf_overrides=config.hf_overrides,
        max_model_len=config.max_model_len,
        device=device,
        ops=ops,
        attention=attention,
        progress=progress,
        quantization=config.quantization,
    )
    kv_dtype = model.dtype if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype)
    groups = model.decoder.groups
    sizes = _sizes(config, model, groups, kv_dtype, device)
    if not config.enable_prefix_caching:
        _check_use_of_tiers(config, sizes.streamed)
    pool = DevicePool(
        sizes.frames,
        groups,
        model.spec.num_kv_heads,
        model.spec.head_dim,
        config.block_size,
        kv_dtype,
        device,
        room=device_memory(device)[1],
        lower_frames=sizes.streamed.frames,
        lower_folder=sizes.streamed.folder,
    )
    pages = PagesAhead(pool)
    memory = MemoryManager(
        sizes.frames,
        config.block_size,
        [group.window for group in groups.groups],
        config.enable_prefix_caching,
        POLICIES[config.eviction_policy](model.spec.attention_share(config.block_size)),
        wants_tiers(config),
        (pool.first_lower, sizes.streamed.frames),
    )
    names = {name: str(value).removeprefix("torch.") for name, value in (("weights", model.dtype), ("kv", kv_dtype))}
    if config.quantization is not None:
        names["weights"] = f"{config.quantization} (others {names['weights']})"
    kv_format = f"{FORMAT if kv_dtype == torch.int8 else names['kv']},{config.block_size},{pool.layout.name}"
    numerics = f"{ops.name},{attention.name},{names['weights']}"
    tiers = None
    if wants_tiers(config):
        tiers = make_tiers(config, pool, pages, memory, model.fingerprint, kv_format, numerics, sizes.streamed)
    scheduler = Scheduler(
        memory,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        eos_token_ids=frozenset(model.eos_token_ids),
        ageing_s=config.ageing_s,
        enable_prefix_caching=config.enable_prefix_caching,
        stored=None if tiers is None else tiers.stored,
        max_pinned_share=config.max_pinned_share,
        target_tpot_s=math.inf if config.target_tpot_ms is None else config.target_tpot_ms / 1e3,
        compaction=Compaction(memory) if config.kv_compaction == "auto" and device.type == "cpu" else None,
    )
    runner = Runner(
        model.decoder,
        pool,
        pages,
        vocab_size=model.spec.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
    )
    for name, limits in config.tenants.items():
        scheduler.acceptance.set_tenant(name, limits)
    where = "host memory" if sizes.streamed.folder is None else sizes.streamed.folder
    longest = scheduler.acceptance.longest_sequence(model.max_model_len)
    return Engine(
        memory=memory,
        pool=pool,
        scheduler=scheduler,
        runner=runner,
        ready=EngineReady(
            vocab_size=model.spec.vocab_size,
            max_model_len=model.max_model_len,
            max_num_seqs=config.max_num_seqs,
            longest_sequence=longest,
            tenants=[load.account.name for load in scheduler.tenants],
            block_size=config.block_size,
            num_frames=memory.num_frames,
            kv_bytes=pool.nbytes,
            eos_token_ids=sorted(model.eos_token_ids),
            description=(
                f"{model.spec.family} on {device}, weights {names['weights']}, operators {ops.name}, attention "
                f"{attention.name}, layers {model.decoder.executor}; KV pool {pool.nbytes / 2**20:.0f} MiB: "
                f"{memory.num_frames} blocks of {config.block_size} tokens in {names['kv']}"
                + (f", and {sizes.streamed.frames} that stream from {where}" if sizes.streamed.frames else "")
                + ("" if longest == model.max_model_len else f", {longest} of max_model_len={model.max_model_len} fit")
            ),
        ),
        fingerprint=model.fingerprint,
        kv_format=kv_format,
        numerics=numerics,
        tiers=tiers,
    )


def _check_use_of_tiers(config: EngineConfig, streamed: Streamed) -> None:
    """Without prefix caching, raises ConfigError for a lower tier from which no context streams."""
    for tier in ("host", "disk"):
        name = f"kv_{tier}_memory"
        if (size := getattr(config, name)) is not None and not streamed.of(tier, 1):
            raise ConfigError(
                f"{name} is {size!r}, but without prefix caching nothing that leaves the pool is found again, and no "
                f"context is too long for the pool and streams from there; leave {name} out, or enable_prefix_caching "
                f"on",
                param=name,
            )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; it must be 'auto', 'cpu' or 'cuda'", param="device") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device {name!r} is not available on this machine; use 'auto' or 'cpu'", param="device")
    return device


class Sizes(NamedTuple):
    """Frames of the pool, and of a lower tier beside them, for contexts longer than the pool."""

    frames: int
    streamed: Streamed


def _sizes(
    config: EngineConfig, model: LoadedModel, groups: LayerGroups, kv_dtype: torch.dtype, device: torch.device
) -> Sizes:
    """As many frames as the settings and the machine's memory give.

    Raises `KVMemoryError` if a sequence of the `max_model_len` that was asked for could not fit, lower tiers included.
    """
    windows, chunk = [group.window for group in groups.groups], config.max_num_batched_tokens
    longest = model.max_model_len - 1
    frame_bytes = default_layout(device)(
        places=groups.layers_per_frame,
        frames=1,
        kv_heads=model.spec.num_kv_heads,
        block_size=config.block_size,
        head_dim=model.spec.head_dim,
        itemsize=kv_dtype.itemsize,
        scaled=kv_dtype == torch.int8,
    ).frame_bytes
    needed = Needs(config.block_size, windows).frames(longest, chunk)
    free, total = device_memory(device)
    frames = num_frames(
        frame_bytes,
        needed * config.max_num_seqs,
        free=free,
        total=total,
        kv_memory=config.kv_memory,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
    )
    least, streamed = needed if config.max_model_len is not None else len(windows), Streamed()
    if frames < least and wants_tiers(config) and device.type == "cpu":
        resident = Needs(config.block_size, windows, needed).frames(longest, chunk)
        streamed = streamed_room(config, least - frames, needed - resident, frame_bytes)
        least = max(resident, needed - streamed.frames)
    if frames < least:
        raise KVMemoryError(
            f"the KV pool has {frames} blocks ({frames * frame_bytes} bytes), but one sequence needs "
            f"{least} ({least * frame_bytes} bytes) for max_model_len={model.max_model_len}; raise kv_memory, give "
            "kv_host_memory or kv_disk_memory what is missing, or lower max_model_len",
            param="kv_memory",
        )
    return Sizes(frames, streamed)
