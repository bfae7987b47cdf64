"""Share: what one rank loads of the model, with the backend that runs it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from pagemill.config import EngineConfig
from pagemill.errors import ConfigError
from pagemill.executor.attention_choice import cache_format, gpu_attention
from pagemill.executor.backend import Backend, select_backend
from pagemill.hub import resolve_model
from pagemill.hub.private_files import make_folder
from pagemill.hub.registry import cache_dir
from pagemill.kvcache.kv_format import KVFormat
from pagemill.kvcache.layer_groups import LayerGroups, add_remainders
from pagemill.kvcache.layout import FrameShape
from pagemill.kvcache.sizing import parse_memory
from pagemill.models.loading import LoadedModel, load_model
from pagemill.models.loading.packed_store import PackedStore
from pagemill.models.sharding import Sharding
from pagemill.models.spec import DecoderSpec
from pagemill.ops.prepare import check_compiled, settle_vector_math

Progress = Callable[[int, int], None]


class Share(NamedTuple):
    """Holds what one rank has loaded; of a model in one piece, all of it. shape: of the frames of its pool. packed:
    where packed weights are kept, if they are."""

    backend: Backend
    model: LoadedModel
    kv: KVFormat
    shape: FrameShape
    packed: PackedStore | None = None

    @property
    def mapped_bytes(self) -> int:
        """Returns the bytes of weights in mapped files, which the system counts among the memory that is free."""
        return 0 if self.packed is None else self.packed.mapped_bytes


def load_share(
    config: EngineConfig,
    sharding: Sharding | None = None,
    num_threads: int | None = None,
    backend: Backend | None = None,
    progress: Progress | None = None,
) -> Share:
    """Loads a rank's part of the model. sharding: what the part is; None for all of it. Raises as `open_executor`."""
    check_compiled()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    fixed = backend is not None
    backend = backend or select_backend(config.device, num_threads or config.num_threads, config.attention_backend)
    settle_vector_math()
    packed = _packed_store(config)
    attention = (
        backend.attention if fixed or backend.device.type == "cpu" else partial(gpu_attention, config, backend.device)
    )
    model = load_model(
        resolve_model(config.model),
        dtype=config.dtype,
        hf_overrides=config.hf_overrides,
        max_model_len=config.max_model_len,
        device=backend.device,
        ops=backend.ops,
        attention=attention,
        decoder=backend.decoder,
        progress=progress,
        quantization=config.quantization,
        sharding=sharding,
        packed=packed,
    )
    backend = backend._replace(attention=model.decoder.attention)
    kv = cache_format(config, model.dtype)
    _check_format(kv, model.spec, backend)
    shape = frame_shape(model.decoder.spec, model.decoder.groups, config.block_size, kv)
    return Share(backend, model, kv, shape, packed)


def _packed_store(config: EngineConfig) -> PackedStore | None:
    """Returns where packed weights are kept; None if nobody has asked for it. Raises ConfigError for a bad setting."""
    if config.weights_disk_memory is None:
        return None
    root = make_folder("weights_disk_path", config.weights_disk_path, cache_dir() / "weights")
    free = shutil.disk_usage(root).free + sum(file.stat().st_size for file in root.glob("*.weights"))
    return PackedStore(root, parse_memory("weights_disk_memory", config.weights_disk_memory, free))


def frame_shape(spec: DecoderSpec, groups: LayerGroups, block_size: int, kv: KVFormat) -> FrameShape:
    """Returns the shape of the frames in which a model's keys and values lie."""
    if kv.precise:
        groups = add_remainders(groups, kv.precise)
    in_keys = spec.latent is not None
    return FrameShape(groups, spec.num_kv_heads, block_size, spec.head_dim, spec.value_dim, kv, in_keys)


def _check_format(kv: KVFormat, spec: DecoderSpec, backend: Backend) -> None:
    """Raises ConfigError where the model, or the backend's attention, does not take the format."""
    refusal = kv.refusal(spec.head_dim, values_in_keys=spec.latent is not None)
    formats = backend.attention.kv_formats
    if refusal is None and formats is not None and kv.name not in formats:
        refusal = f"attention on {backend.device} ({backend.attention.name}) takes {', '.join(formats)}"
    if refusal is not None:
        raise ConfigError(
            f"kv_cache_dtype {kv.name!r} cannot be used: {refusal}; {other_formats(spec)}", param="kv_cache_dtype"
        )


def other_formats(spec: DecoderSpec) -> str:
    """Returns the way out where a model's keys and values cannot be stored as was asked."""
    return f"use {'int8' if spec.latent is None else 'fp8'!r} or 'auto'"
