"""Opens the executor that the settings ask for: loads the model onto a device, and states the facts about it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from pagemill.config import EngineConfig
from pagemill.errors import ConfigError, TokenizerError
from pagemill.executor.backend import Backend, select_backend
from pagemill.executor.draft_model import DraftLayers, DraftModel
from pagemill.executor.interface import ExecutorFacts
from pagemill.executor.local import LocalExecutor
from pagemill.executor.ranks import Ranks
from pagemill.executor.sharded_frames import RecordParts
from pagemill.executor.tensor_parallel import TensorParallelExecutor
from pagemill.hub import resolve_model
from pagemill.kvcache.kv_format import KVFormat, kv_format
from pagemill.kvcache.layer_groups import LayerGroups, add_full_layers, group_layers
from pagemill.kvcache.layout import FrameShape, LayoutMaker
from pagemill.machine import usable_cores
from pagemill.models.loading import LoadedModel, load_model
from pagemill.models.loading.adapter import AdapterLoader
from pagemill.models.sharding import Sharding, kv_heads_of
from pagemill.models.spec import DecoderSpec
from pagemill.ops.prepare import check_compiled, settle_vector_math
from pagemill.text.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
logger = logging.getLogger(__name__)


class Share(NamedTuple):
    """Holds what one rank has loaded; of a model in one piece, all of it. shape: of the frames of its pool."""

    backend: Backend
    model: LoadedModel
    kv: KVFormat
    shape: FrameShape


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
    backend = backend or select_backend(config.device, num_threads or config.num_threads)
    if sharding is not None and backend.device.type != "cpu":
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but ranks exchange by gloo, on CPU only so far; "
            f"use device 'cpu' (--device cpu), or leave tensor_parallel_size out",
            param="tensor_parallel_size",
        )
    settle_vector_math()
    model = load_model(
        resolve_model(config.model),
        dtype=config.dtype,
        hf_overrides=config.hf_overrides,
        max_model_len=config.max_model_len,
        device=backend.device,
        ops=backend.ops,
        attention=backend.attention,
        decoder=backend.decoder,
        progress=progress,
        quantization=config.quantization,
        sharding=sharding,
    )
    weights = str(model.dtype).removeprefix("torch.")
    kv = kv_format(weights if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)
    _check_format(kv, model.spec.head_dim, backend)
    return Share(backend, model, kv, _shape(model.decoder.spec, model.decoder.groups, config.block_size, kv))


def open_executor(
    config: EngineConfig, progress: Progress | None = None, backend: Backend | None = None
) -> LocalExecutor:
    """Loads the model. The KV pool is allocated later, in what memory is left.

    progress(done, total): bytes of weights, called while they load. backend: None for what `config.device` asks for.
    Raises `ModelLoadError` and `ConfigError` children, `StaleKernelsError`.
    """
    if config.tensor_parallel_size > 1:
        return _open_ranks(config, progress)
    share = load_share(config, backend=backend, progress=progress)
    backend, model, kv, shape = share
    speculation = config.speculative_config
    draft = layers = None
    if speculation is not None and speculation.model is not None:
        draft = _load_draft(config, resolve_model(speculation.model), model, backend)
        _check_draft_format(kv, draft.spec.head_dim)
        layers = place_layers(backend.layout, shape, draft.spec)
        shape = replace(shape, groups=layers.groups)
    facts = _facts(config, share, shape, backend.layout(shape, 1).frame_bytes)
    if draft is not None:
        facts = replace(
            facts,
            fingerprint=joint_fingerprint(model, draft),
            draft_cost=draft.spec.cost_beside(model.spec),
        )
    return LocalExecutor(
        model.decoder,
        backend,
        facts,
        shape,
        config.max_num_seqs,
        lambda: Tokenizer.load(config).to_json(),
        _adapter_loader(config, share),
        None if draft is None or layers is None else DraftModel(draft.decoder, layers),
    )


def _open_ranks(config: EngineConfig, progress: Progress | None) -> TensorParallelExecutor:
    """Loads a model in parts, each in a process of its own but for this one's."""
    size = config.tensor_parallel_size
    num_threads = config.num_threads or max(1, usable_cores() // size)
    ranks = Ranks(config, num_threads)
    try:
        sharding = Sharding(ranks.exchange)
        share = load_share(config, sharding, num_threads, progress=progress)
        ranks.connect()
    except BaseException:
        ranks.close()
        raise
    spec, groups = share.model.spec, share.model.decoder.groups
    whole = _shape(spec, groups, config.block_size, share.kv)
    facts = _facts(config, share, whole, size * share.backend.layout(share.shape, 1).frame_bytes)
    facts = replace(facts, description=f"{facts.description}, in {size} parts of {num_threads} threads each")
    return TensorParallelExecutor(
        share.model.decoder,
        share.backend,
        facts,
        share.shape,
        config.max_num_seqs,
        lambda: Tokenizer.load(config).to_json(),
        _adapter_loader(config, share),
        ranks,
        RecordParts(whole, share.shape, kv_heads_of(spec, size)),
    )


def _facts(config: EngineConfig, share: Share, shape: FrameShape, frame_bytes: int) -> ExecutorFacts:
    """States the facts about a model, all of whose KV heads have frames of this shape, in so much memory."""
    backend, model, kv, _ = share
    spec, on_cpu = model.spec, backend.device.type == "cpu"
    weights = str(model.dtype).removeprefix("torch.")
    if config.quantization is not None:
        weights = f"{config.quantization} (others {weights})"
    layout = backend.layout(shape, 1)
    return ExecutorFacts(
        vocab_size=spec.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        hidden_size=spec.hidden_size,
        windows=tuple(group.window for group in shape.groups.groups),
        attention_share=spec.attention_share(config.block_size),
        fingerprint=model.fingerprint,
        kv_format=kv.digest_name(config.block_size, layout.name),
        numerics=f"{backend.ops.name},{backend.attention.name},{weights}",
        frame_bytes=frame_bytes,
        record_bytes=layout.frame_bytes,
        kv=kv,
        streams=on_cpu,
        compacts=on_cpu,
        locks_pages=not on_cpu,
        description=(
            f"{spec.family} on {backend.device}, weights {weights}, kernels "
            + " and ".join(dict.fromkeys([backend.ops.name, backend.attention.name]))
        ),
    )


def _adapter_loader(config: EngineConfig, share: Share) -> AdapterLoader:
    backend, model = share.backend, share.model
    return AdapterLoader(model.spec, model.names, backend.ops, model.dtype, backend.device, config.max_lora_rank)


def place_layers(layout: LayoutMaker, shape: FrameShape, draft: DecoderSpec) -> DraftLayers:
    """Returns where the layers of a draft model go, beside those of the model that has frames of this shape: as many in
    a place of a frame as fit. Raises ConfigError if not even one does."""
    dim = draft.head_dim
    own = replace(shape, kv_heads=draft.num_kv_heads, key_dim=dim, value_dim=dim, groups=group_layers([None]))
    room, needed = layout(shape, 1).place_bytes, layout(own, 1).place_bytes
    if needed > room:
        raise _refusal(
            f"keys and values of one of its layers take {needed} bytes per block, more than the model's ({room}), in "
            f"whose place they would lie; use a draft model with fewer KV heads or a smaller head size"
        )
    per_place = room // needed
    groups = add_full_layers(shape.groups, -(-len(draft.layers) // per_place))
    before, after = (room * len(each.groups) * each.layers_per_frame for each in (shape.groups, groups))
    logger.info(
        "with the draft model's keys and values, %d bytes each of %d layers, %d tokens take %d bytes instead of %d",
        needed, len(draft.layers), shape.block_size, after, before,
    )  # fmt: skip
    return DraftLayers(own, groups, shape.groups.num_layers, per_place)


def joint_fingerprint(model: LoadedModel, draft: LoadedModel) -> bytes:
    """Returns the fingerprint of K/V that two models have written."""
    return hashlib.sha256(model.fingerprint + draft.fingerprint).digest()


def _shape(spec: DecoderSpec, groups: LayerGroups, block_size: int, kv: KVFormat) -> FrameShape:
    return FrameShape(groups, spec.num_kv_heads, block_size, spec.head_dim, spec.head_dim, kv)


def _load_draft(config: EngineConfig, path: Path, model: LoadedModel, backend: Backend) -> LoadedModel:
    """Loads a draft model, in the dtype of the model and quantized like it, unless it has no integers to keep. Raises
    as `load_model` does, and ConfigError for one that cannot draft for the model."""
    draft = load_model(
        path,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=None,
        device=backend.device,
        ops=backend.ops,
        attention=backend.attention,
        decoder=backend.decoder,
        quantization=None if config.quantization == "gguf" and path.suffix != ".gguf" else config.quantization,
    )
    if draft.spec.vocab_size != model.spec.vocab_size:
        raise _refusal(
            f"its vocabulary has {draft.spec.vocab_size} tokens, the model's {model.spec.vocab_size}; both must have "
            f"the same tokenizer"
        )
    if any(layer.window is not None for layer in draft.spec.layers):
        raise _refusal(
            "it has layers with a sliding window, whose keys and values are given up before it may need them; use one "
            "with full attention in all layers"
        )
    try:
        tokenizers = Tokenizer.load(config), Tokenizer.from_path(path)
    except TokenizerError as error:
        logger.warning("nobody checks that the draft model has the model's tokenizer: %s", error.message)
    else:
        if (other := tokenizers[0].difference(tokenizers[1])) is not None:
            raise _refusal(f"its tokenizer is another than the model's: {other}; both must have the same")
    return draft


def _check_draft_format(kv: KVFormat, head_dim: int) -> None:
    """Raises ConfigError where a draft model's keys and values cannot lie in the model's blocks in this format."""
    why = kv.refusal(head_dim)
    if kv.key.packed > 1:
        why = "its keys have no place for a mark that says which of them the draft model has not written"
    if why is not None:
        raise _refusal(f"kv_cache_dtype is {kv.name!r}, and {why}; use 'int8' or 'auto'")


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"speculative_config: the draft model cannot be used: {why}", param="speculative_config")


def _check_format(kv: KVFormat, head_dim: int, backend: Backend) -> None:
    """Raises ConfigError where the model, or the backend's attention, does not take the format."""
    refusal = kv.refusal(head_dim)
    formats = backend.attention.kv_formats
    if refusal is None and formats is not None and kv.name not in formats:
        refusal = f"attention on {backend.device} ({backend.attention.name}) takes {', '.join(formats)}"
    if refusal is not None:
        raise ConfigError(
            f"kv_cache_dtype {kv.name!r} cannot be used: {refusal}; use 'int8' or 'auto'", param="kv_cache_dtype"
        )
