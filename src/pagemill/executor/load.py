"""Opens the executor that the settings ask for: loads the model onto a device, and states the facts about it."""

from __future__ import annotations

from dataclasses import replace

import torch

from pagemill.config import EngineConfig
from pagemill.executor.backend import Backend
from pagemill.executor.device import CudaDevice, Device
from pagemill.executor.gpu_executor import GpuExecutor
from pagemill.executor.interface import ExecutorFacts
from pagemill.executor.load_drafting import load_drafting
from pagemill.executor.local import LocalExecutor, Parts
from pagemill.executor.rank_devices import check_alike, config_of_rank, transport_of
from pagemill.executor.ranks import Ranks
from pagemill.executor.record_parts import RecordParts
from pagemill.executor.share import Progress, Share, frame_shape, load_share
from pagemill.executor.tensor_parallel import TensorParallelExecutor
from pagemill.executor.tensor_parallel_gpu import TensorParallelGpuExecutor
from pagemill.executor.trial_steps import LargestStep
from pagemill.kvcache.layout import FrameShape, KVLayout
from pagemill.machine import usable_cores
from pagemill.models.loading.adapter import AdapterLoader
from pagemill.models.sharding import Sharding, kv_heads_of
from pagemill.text.tokenizer import Tokenizer


def open_executor(
    config: EngineConfig,
    progress: Progress | None = None,
    backend: Backend | None = None,
    device: Device | None = None,
) -> LocalExecutor:
    """Loads the model. The KV pool is allocated later, in what memory is left.

    progress(done, total): bytes of weights, called while they load. backend: None for what `config.device` asks for.
    device: an accelerator whose work is asynchronous, None for the backend's, if it is one.
    Raises `ModelLoadError` and `ConfigError` children, `StaleKernelsError`.
    """
    if config.tensor_parallel_size > 1:
        return _open_ranks(config, progress, backend, device)
    share = load_share(config, backend=backend, progress=progress)
    backend, shape = share.backend, share.shape
    speculation = config.asked_drafts
    drafting = None if speculation is None else load_drafting(config, speculation, share)
    if drafting is not None:
        shape = drafting.shape
    facts = _facts(config, share, shape, backend.layout(shape, 1).frame_bytes)
    if drafting is not None:
        facts = replace(facts, fingerprint=drafting.fingerprint, drafts=drafting.facts)
    if device is None and backend.device.type == "cuda":
        device = CudaDevice(backend.device)
    if device is not None:
        facts = _streaming_to(facts, backend.layout(shape, 1))
    parts = _parts(config, share, facts, shape)
    if drafting is not None:
        parts = parts._replace(draft=drafting.source)
    if device is None:
        return LocalExecutor(parts)
    largest, measures = _largest_step(config, facts.max_model_len), _measures(config)
    return GpuExecutor(device, parts, largest=largest, measures=measures, enforce_eager=config.enforce_eager)


def _largest_step(config: EngineConfig, max_model_len: int) -> LargestStep:
    tokens, rows = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len), config.max_num_seqs
    return LargestStep(tokens, rows if config.asked_drafts is None else tokens, rows)


def _measures(config: EngineConfig) -> bool:
    """Returns whether the pool has to leave what steps need: its own size is not given."""
    return config.kv_memory is None and config.kv_cache_memory_bytes is None


def _open_ranks(
    config: EngineConfig, progress: Progress | None, backend: Backend | None, device: Device | None
) -> TensorParallelExecutor:
    """Loads a model in parts, each in a process of its own but for this one's, and on a GPU of its own if it runs on
    GPUs."""
    size = config.tensor_parallel_size
    num_threads = config.num_threads or max(1, usable_cores() // size)
    transport, own = transport_of(config, device), config
    if transport == "nccl":
        own, device = config_of_rank(config, 0), CudaDevice(torch.device("cuda", 0))
    ranks = Ranks(config, num_threads, transport)
    try:
        sharding = Sharding(ranks.exchange, None if transport is None else ranks.group)
        share = load_share(own, sharding, num_threads, backend, progress)
        check_alike([share.backend.attention.name, *ranks.connect()])
        return _over_ranks(config, share, ranks, num_threads, device)
    except BaseException:
        ranks.close()
        raise


def _over_ranks(
    config: EngineConfig, share: Share, ranks: Ranks, num_threads: int, device: Device | None
) -> TensorParallelExecutor:
    """Returns the executor over ranks that are connected. device: rank 0's, if its work is asynchronous."""
    size, spec, layout = config.tensor_parallel_size, share.model.spec, share.backend.layout
    whole = frame_shape(spec, share.model.decoder.groups, config.block_size, share.kv)
    facts = _facts(config, share, whole, size * layout(share.shape, 1).frame_bytes)
    each = f"{num_threads} threads" if device is None else "a device"
    facts = replace(facts, description=f"{facts.description}, in {size} parts of {each} each")
    if device is not None:  # sums over parts are rounded in another order for every number of these
        facts = replace(facts, numerics=f"{facts.numerics},{size} parts")
        facts = _streaming_to(facts, layout(share.shape, 1), size)
    parts = _parts(config, share, facts, share.shape)
    record_parts = RecordParts(whole, share.shape, kv_heads_of(spec, size), layout)
    if device is None:
        return TensorParallelExecutor(parts, ranks, record_parts)
    assert ranks.group is not None
    return TensorParallelGpuExecutor(
        parts,
        ranks,
        record_parts,
        device,
        ranks.group,
        largest=_largest_step(config, facts.max_model_len),
        measures=_measures(config),
        enforce_eager=config.enforce_eager,
    )


def _streaming_to(facts: ExecutorFacts, layout: KVLayout, ranks: int = 1) -> ExecutorFacts:
    """Returns the facts of so many devices to which blocks are brought from host memory. A draft model's passes do not
    bring any."""
    if facts.drafts is not None and facts.drafts.takes_in:
        return replace(facts, streams=())
    return replace(facts, streams=("host",), streamed_bytes=ranks * 2 * layout.place_bytes)


def _facts(config: EngineConfig, share: Share, shape: FrameShape, frame_bytes: int) -> ExecutorFacts:
    """States the facts about a model, all of whose KV heads have frames of this shape, in so much memory."""
    backend, model, kv, _, _ = share
    spec, on_cpu = model.spec, backend.device.type == "cpu"
    weights = str(model.dtype).removeprefix("torch.")
    if model.quantization is not None:
        weights = f"{model.quantization} (others {weights})"
    rounded = model.quantization != config.quantization and not backend.ops.keeps_narrow
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
        streams=("host", "disk") if on_cpu else (),
        has_own_memory=not on_cpu,
        has_head=model.has_head,
        compacts=on_cpu,
        quantization=model.quantization,
        description=(
            f"{spec.family} on {backend.device}, weights {weights}, kernels "
            + " and ".join(dict.fromkeys([backend.ops.name, backend.attention.name]))
            + ("; exact weights: dtype float32" if rounded else "")
        ),
    )


def _parts(config: EngineConfig, share: Share, facts: ExecutorFacts, shape: FrameShape) -> Parts:
    backend, model = share.backend, share.model
    return Parts(
        model.decoder,
        backend,
        facts,
        shape,
        config.max_num_seqs,
        lambda: Tokenizer.load(config).to_json(),
        AdapterLoader(model.spec, model.names, backend.ops, model.dtype, backend.device, config.max_lora_rank),
        mapped_bytes=config.tensor_parallel_size * share.mapped_bytes,
    )
