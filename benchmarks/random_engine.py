"""An engine around a decoder that was never in a file: random weights, and requests that all generate at once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from benchmarks.gpu_busy import Busy, watch

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.executor.backend import Backend
from pagemill.executor.device import Device
from pagemill.executor.gpu_executor import GpuExecutor
from pagemill.executor.interface import ExecutorFacts
from pagemill.executor.local import LocalExecutor, Parts
from pagemill.executor.trial_steps import LargestStep
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layout import FrameShape
from pagemill.models.decoder import Decoder
from pagemill.models.families import find_family
from pagemill.models.loading.adapter import AdapterLoader
from pagemill.sampling.params import SamplingParams

BLOCK_SIZE = 16
WARM_STEPS, STEPS, WATCHED_STEPS = 5, 50, 20


@dataclass(frozen=True)
class EngineSteps:
    """Holds the mean milliseconds of an engine's steps, and how busy the GPU was in some more of them; None where there
    is none, or it cannot be seen."""

    ms: float
    busy: Busy | None


def random_engine(
    decoder: Decoder, backend: Backend, device: Device | None, rows: int, longest: int, budget: int = 8192
) -> EngineCore:
    """Returns an engine with a pool for `rows` contexts of up to `longest` tokens. device: as `open_executor` takes it.
    budget: of tokens in a step."""
    spec, dtype = decoder.spec, str(decoder.dtype).removeprefix("torch.")
    kv = kv_format(dtype)
    shape = FrameShape(decoder.groups, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim, spec.head_dim, kv)
    layout = backend.layout(shape, 1)
    frames = rows * (-(-longest // BLOCK_SIZE) + 1) * len(shape.groups.groups)
    facts = ExecutorFacts(
        vocab_size=spec.vocab_size,
        max_model_len=longest,
        eos_token_ids=(),
        hidden_size=spec.hidden_size,
        windows=tuple(group.window for group in shape.groups.groups),
        attention_share=spec.attention_share(BLOCK_SIZE),
        fingerprint=bytes(32),
        kv_format=kv.digest_name(BLOCK_SIZE, layout.name),
        numerics="random weights",
        frame_bytes=layout.frame_bytes,
        record_bytes=layout.frame_bytes,
        kv=kv,
        streams=(),
        compacts=False,
        description="random weights",
    )
    adapters = AdapterLoader(spec, find_family(spec.family, None).names, backend.ops, decoder.dtype, decoder.device, 1)
    parts = Parts(decoder, backend, facts, shape, rows, lambda: "", adapters)
    largest = LargestStep(max(budget, rows), rows, rows)
    executor = LocalExecutor(parts) if device is None else GpuExecutor(device, parts, largest=largest, measures=False)
    config = EngineConfig(
        model="random weights", block_size=BLOCK_SIZE, max_num_seqs=rows, max_model_len=longest,
        max_num_batched_tokens=max(budget, rows), kv_memory=frames * layout.frame_bytes, target_tpot_ms="off",
        speculative_config="off",
    )  # fmt: skip
    return EngineCore(config, executor=executor)


def time_engine(
    decoder: Decoder,
    backend: Backend,
    device: Device | None,
    rows: int,
    context: int,
    *,
    steps: int = STEPS,
    budget: int = 8192,
) -> EngineSteps:
    """Times steps in which `rows` rows generate, over contexts of so many tokens and a few more: by the host's clock,
    everything between the steps included. Watches the GPU afterwards."""
    answer = steps + WATCHED_STEPS + rows * context // budget + 2 * WARM_STEPS + 4
    core = random_engine(decoder, backend, device, rows, context + answer + 1, budget)
    random = torch.Generator().manual_seed(0)
    for row in range(rows):
        prompt = torch.randint(0, decoder.spec.vocab_size, (context,), generator=random).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        core.add_request(
            EngineRequest(request_id=str(row), prompt_token_ids=prompt, params=params, arrival_s=time.monotonic())
        )
    generated = dict.fromkeys(map(str, range(rows)), 0)

    def step() -> None:
        for output in core.step():
            if output.error is not None or output.finish_reason is not None:
                raise RuntimeError(f"row {output.request_id} has ended: {output.finish_reason}, {output.error}")
            generated[output.request_id] += len(output.new_token_ids)

    try:
        while min(generated.values()) < WARM_STEPS:
            step()
        before, begin = sum(generated.values()), time.perf_counter()
        for _ in range(steps):
            step()
        tokens = sum(generated.values()) - before
        ms = 1e3 * (time.perf_counter() - begin) * rows / tokens
        return EngineSteps(ms, watch(step, WATCHED_STEPS) if device is not None else None)
    finally:
        core.close()
