"""The pool's size on a device: what the largest step is, that it leaves no trace, and what is left for the pool."""

from __future__ import annotations

import weakref

import pytest
import torch
from late import Late
from static_attention import StaticAttention
from test_gpu_executor import DRAWN, SMALL, greedy, on_cpu

from core.drive import request
from interpreter import CAPABILITY
from models.small_llama import save_llama
from pagemill.attention.triton_backend import TritonAttention
from pagemill.config import EngineConfig
from pagemill.engine.build import build
from pagemill.errors import KVMemoryError
from pagemill.executor.activation_peak import STREAMING_BYTES, TRANSFER_BYTES
from pagemill.executor.backend import torch_backend
from pagemill.executor.device import CudaDevice
from pagemill.executor.device_rows import DeviceRows
from pagemill.executor.graphs import MOST_BYTES
from pagemill.executor.interface import ExecutorMemory
from pagemill.executor.load import open_executor
from pagemill.models.decoder import Decoder
from pagemill.sampling.torch_kernels import TorchSamplingKernels
from pagemill.sampling.triton_sampling import TritonSamplingKernels

STATIC = torch_backend(torch.device("cpu"))._replace(attention=StaticAttention())
MIB = 1 << 20
TOTAL, USED, PEAK = 64 << 30, 5 << 30, 3 << 30
FRAME_BYTES = 8192
TRANSFERS = TRANSFER_BYTES + STREAMING_BYTES
ROOMY = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "enforce_eager": True}
"""So many rows can fill more than the pools here have."""


def opened(small_model, device, backend=STATIC, **settings):
    config = EngineConfig(model=small_model, **SMALL | {"kv_memory": None} | settings)
    return config, open_executor(config, backend=backend, device=device)


def states(device, monkeypatch, used: int, total: int = TOTAL, peak: int = PEAK) -> None:
    """Has the device say that so much memory is in use, and how much a step takes."""
    monkeypatch.setattr(device, "memory", lambda: ExecutorMemory(total - used, total))
    device.peak_nbytes = peak


def test_what_steps_graphs_and_transfers_need_counts_as_used(small_model, device, monkeypatch):
    states(device, monkeypatch, USED)
    kept = PEAK + TRANSFERS + MOST_BYTES
    _, executor = opened(small_model, device)
    assert executor.memory() == ExecutorMemory(TOTAL - USED - kept, TOTAL)
    device.idle_nbytes = 2 << 30  # that much of it has been taken, and is not free on the device any more
    assert executor.memory().free == TOTAL - USED - (kept - (2 << 30))
    device.idle_nbytes = kept + 1
    assert executor.memory().free == TOTAL - USED
    device.idle_nbytes = 0
    _, eager = opened(small_model, device, enforce_eager=True)
    assert eager.memory().free == TOTAL - USED - PEAK - TRANSFERS
    drafts = {"method": "draft_model", "model": small_model, "num_speculative_tokens": 2}
    _, drafting = opened(small_model, device, speculative_config=drafts)  # which brings no blocks while it computes
    assert drafting.memory().free == TOTAL - USED - PEAK - TRANSFER_BYTES
    states(device, monkeypatch, TOTAL - PEAK)
    assert opened(small_model, device)[1].memory().free == 0


@pytest.mark.parametrize(("setting", "share"), [({}, 0.9), ({"gpu_memory_utilization": 0.6}, 0.6)])
def test_the_pool_gets_what_is_left_of_a_share_of_the_device(small_model, device, monkeypatch, setting, share):
    total, left = 500 * MIB, 70 * FRAME_BYTES + 100
    used = int(share * total) - left - 3 * MIB - TRANSFERS
    states(device, monkeypatch, used, total, 3 * MIB)
    config, executor = opened(small_model, device, **ROOMY, **setting)
    assert build(config, executor, False, None)[0].num_frames == 70


def test_the_default_is_no_more_than_sequences_fill_and_what_is_asked_for_is_not_bounded(
    small_model, device, monkeypatch
):
    states(device, monkeypatch, 5 * MIB, 500 * MIB, 3 * MIB)
    config, executor = opened(small_model, device, enforce_eager=True)
    assert build(config, executor, False, None)[0].num_frames == SMALL["max_num_seqs"] * SMALL["max_model_len"] // 16
    config, executor = opened(small_model, device, enforce_eager=True, gpu_memory_utilization=0.5)
    assert build(config, executor, False, None)[0].num_frames == (250 * MIB - 8 * MIB - TRANSFERS) // FRAME_BYTES


@pytest.mark.parametrize("setting", [{"kv_memory": "50%"}, {"kv_cache_memory_bytes": 80 * FRAME_BYTES}])
def test_a_size_that_is_given_is_that_of_the_pool_and_nothing_is_measured(small_model, device, monkeypatch, setting):
    states(device, monkeypatch, 0, 160 * FRAME_BYTES)
    monkeypatch.setattr(device, "peak", None)
    config, executor = opened(small_model, device, **setting)
    assert executor.memory() == device.memory()
    assert build(config, executor, False, None)[0].num_frames == 80


def test_nothing_left_for_the_pool_names_the_ways_out(small_model, device, monkeypatch):
    for peak, ways_out in ((58 * MIB, "; raise it above 0.95 or lower max"), (78 * MIB, "; lower max")):
        states(device, monkeypatch, 0, TRANSFERS + 72 * MIB, peak)
        config, executor = opened(small_model, device, enforce_eager=True)
        with pytest.raises(KVMemoryError, match=f"needed by steps: .*{ways_out}_num_batched_tokens or free") as error:
            build(config, executor, False, None)
        assert error.value.param == "gpu_memory_utilization"


def test_a_step_without_memory_is_refused_by_name(small_model, device, monkeypatch):
    def narrow(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Decoder, "forward", narrow)
    with pytest.raises(KVMemoryError, match=r"steps of 24 tokens, .* 8 samples, .*lower max_num_batched") as error:
        opened(small_model, device)
    assert error.value.param == "max_num_batched_tokens"


@pytest.mark.parametrize(
    ("settings", "lens", "samples", "rows"),
    [
        ({}, [24], 8, 8),
        ({"max_num_batched_tokens": 200}, [95, 95, 10], 8, 8),
        ({"max_num_batched_tokens": 190}, [95, 95], 8, 8),
        ({"max_num_batched_tokens": 512, "max_num_seqs": 1}, [95, 1], 1, 1),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, [24], 24, 8),
    ],
)
def test_the_largest_steps(small_model, device, monkeypatch, settings, lens, samples, rows):
    """Measures the step of the most tokens, and that of the most rows."""
    seen = []
    forward, choose = Decoder.forward, TorchSamplingKernels.choose_on_device

    def watched(decoder, token_ids, batch, *rest):
        seen.append((token_ids, batch))
        return forward(decoder, token_ids, batch, *rest)

    def chosen(kernels, logits, choices, **options):
        seen.append((logits, choices))
        return choose(kernels, logits, choices, **options)

    monkeypatch.setattr(Decoder, "forward", watched)
    monkeypatch.setattr(TorchSamplingKernels, "choose_on_device", chosen)
    opened(small_model, device, **settings)
    for expected, many in ((lens, samples), ([1] * rows, rows)):
        (token_ids, batch), (logits, choices), *seen = seen
        assert len(token_ids) == sum(expected)
        assert batch.query_start.diff().tolist() == expected
        assert batch.context_lens.tolist() == [95] * len(expected)
        assert (batch.max_query_len, batch.max_context_len) == (max(expected), 95)
        assert logits.shape == (many, 64)
        assert logits.isfinite().all()
        assert choices.temperature.all()
    assert not seen


def test_the_step_that_takes_more_counts(small_model, device, monkeypatch):
    for peaks in ([3 * MIB, PEAK], [PEAK, 3 * MIB]):
        states(device, monkeypatch, USED)
        monkeypatch.setattr(device, "peak", lambda run, left=peaks: left.pop())
        assert opened(small_model, device, enforce_eager=True)[1].memory().free == TOTAL - USED - PEAK - TRANSFERS


def test_the_largest_step_leaves_no_trace(small_model, device, monkeypatch):
    used = []
    compute, inputs = Decoder.forward, DeviceRows.inputs

    def forward(decoder, token_ids, batch, pool, *rest):
        used.append(weakref.ref(pool))
        return compute(decoder, token_ids, batch, pool, *rest)

    def watched(rows, queries):
        used.append(weakref.ref(rows))
        return inputs(rows, queries)

    states(device, monkeypatch, 5 * MIB, 500 * MIB, 3 * MIB)
    with monkeypatch.context() as while_measured:
        while_measured.setattr(Decoder, "forward", forward)
        while_measured.setattr(DeviceRows, "inputs", watched)
        config, executor = opened(small_model, device)
    assert [ref() for ref in used] == [None] * 4
    assert not hasattr(executor, "pool")
    assert (executor.rows.tables == -1).all()
    assert not executor.rows.tokens.any()
    assert not device.graphs
    params = [greedy(max_tokens=8), DRAWN, greedy(max_tokens=5)]
    requests = [request(f"r{i}", [5, 9, 3 + i], each) for i, each in enumerate(params)]
    late = Late(config, executor)
    late.add(requests)
    assert late.run() == on_cpu(config, requests)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("kv_cache_dtype", ["auto", pytest.param("int4_mixed", marks=pytest.mark.slow)])
def test_tritons_kernels_take_the_largest_step(tmp_path, device, monkeypatch, kv_cache_dtype):
    choose, chosen = TritonSamplingKernels.choose_on_device, []

    def watched(kernels, logits, choices, *, truncate):
        chosen.append((truncate, choose(kernels, logits, choices, truncate=truncate)))
        return chosen[0][1]

    monkeypatch.setattr(TritonSamplingKernels, "choose_on_device", watched)
    model = save_llama(tmp_path, num_attention_heads=2, num_key_value_heads=1)
    backend = STATIC._replace(attention=TritonAttention(CAPABILITY), sampling=TritonSamplingKernels())
    opened(str(model), device, backend, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=8)
    assert len(chosen) == 2
    for truncate, tokens in chosen:
        assert truncate
        assert len(tokens) == 8
        assert (tokens >= 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_what_work_takes_on_a_gpu():
    gpu, kept = CudaDevice(torch.device("cuda")), []

    def work():
        kept.append(torch.empty(32 * MIB, dtype=torch.uint8, device=gpu.where))
        torch.empty(64 * MIB, dtype=torch.uint8, device=gpu.where)

    assert 64 * MIB <= gpu.peak(work) < 90 * MIB  # torch takes memory in pieces of up to 20 MiB
    idle = gpu.idle()
    assert idle < 26 * MIB
    kept.clear()
    assert gpu.idle() == idle + 32 * MIB
