"""Opens the executor that the settings ask for: loads the model onto a device, and states the facts about it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagemill.config import EngineConfig
from pagemill.executor.backend import Backend, select_backend
from pagemill.executor.interface import ExecutorFacts
from pagemill.executor.local import LocalExecutor
from pagemill.hub import resolve_model
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layout import FrameShape
from pagemill.models.loading import load_model
from pagemill.models.loading.adapter import AdapterLoader
from pagemill.ops.prepare import check_compiled, settle_vector_math
from pagemill.text.tokenizer import Tokenizer


def open_executor(
    config: EngineConfig, progress: Callable[[int, int], None] | None = None, backend: Backend | None = None
) -> LocalExecutor:
    """Loads the model. The KV pool is allocated later, in what memory is left.

    progress(done, total): bytes of weights, called while they load. backend: None for what `config.device` asks for.
    Raises `ModelLoadError` and `ConfigError` children, `StaleKernelsError`.
    """
    check_compiled()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    backend = backend or select_backend(config.device, config.num_threads)
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
    )
    weights = str(model.dtype).removeprefix("torch.")
    kv = kv_format(weights if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)
    groups, spec, on_cpu = model.decoder.groups, model.spec, backend.device.type == "cpu"
    shape = FrameShape(groups, spec.num_kv_heads, config.block_size, spec.head_dim, spec.head_dim, kv)
    layout = backend.layout(shape, 1)
    if config.quantization is not None:
        weights = f"{config.quantization} (others {weights})"
    facts = ExecutorFacts(
        vocab_size=spec.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        hidden_size=spec.hidden_size,
        windows=tuple(group.window for group in groups.groups),
        attention_share=spec.attention_share(config.block_size),
        fingerprint=model.fingerprint,
        kv_format=kv.digest_name(config.block_size, layout.name),
        numerics=f"{backend.ops.name},{backend.attention.name},{weights}",
        frame_bytes=layout.frame_bytes,
        kv=kv,
        streams=on_cpu,
        compacts=on_cpu,
        locks_pages=not on_cpu,
        description=(
            f"{spec.family} on {backend.device}, weights {weights}, kernels "
            + " and ".join(dict.fromkeys([backend.ops.name, backend.attention.name]))
        ),
    )
    adapters = AdapterLoader(spec, model.names, backend.ops, model.dtype, backend.device, config.max_lora_rank)
    return LocalExecutor(
        model.decoder, backend, facts, shape, config.max_num_seqs, lambda: Tokenizer.load(config).to_json(), adapters
    )
