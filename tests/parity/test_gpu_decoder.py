"""The GPU's decoder agrees with the readable one on the same weights, in every family, through paged memory."""

from __future__ import annotations

import pytest
import torch
from random_models import CASES, Case
from transformers import AutoConfig

from interpreter import CAPABILITY, DEVICE

pytest.importorskip("triton")

from harness import PagedSequences
from lora_adapters import save_adapter, shapes_of
from pagemill.attention.interface import AttentionBackend
from pagemill.attention.torch_backend import TorchAttention
from pagemill.attention.triton_backend import TritonAttention
from pagemill.models.decoder import Decoder
from pagemill.models.gpu_decoder import GpuDecoder
from pagemill.models.loading import load_model
from pagemill.models.loading.adapter import AdapterLoader
from pagemill.ops.torch_ops import TorchOps
from pagemill.ops.triton_ops import TritonOps

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's, in the interpreter
PROMPTS = [[(7 * at + row) % 150 + 3 for at in range(length)] for row, length in enumerate((24, 1, 5))]
COVERING = ("llama-bias", "qwen3", "smollm3", "gemma2", "phi3-partial", "qwen3-moe", "deepseek-v3")
"""Families that have every feature between them, with gemma3, which runs with attention in Triton."""
STEPS = [[(0, 20), (2, 3)], [(0, 3), (1, 1), (2, 1)], [(2, 1), (0, 1)]]


def load(case: Case, folder, kind: type[Decoder], attention: AttentionBackend, dtype: str) -> Decoder:
    ops = TritonOps(CAPABILITY) if kind is GpuDecoder else TorchOps()
    return load_model(
        folder, ops=ops, attention=attention, decoder=kind, dtype=dtype, max_model_len=case.max_model_len, device=DEVICE
    ).decoder


def logits(decoder: Decoder) -> list[torch.Tensor]:
    sequences = PagedSequences(decoder, PROMPTS)
    return [rows for work in STEPS for rows in sequences.step(work)]


def compare(case: Case, folder, attention: AttentionBackend, dtype: str, tolerance: float) -> None:
    case.save(folder)
    theirs = logits(load(case, folder, Decoder, TorchAttention(), dtype))
    decoder = load(case, folder, GpuDecoder, attention, dtype)
    assert type(decoder) is GpuDecoder
    assert not decoder.waits
    for ours, reference in zip(logits(decoder), theirs, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "case",
    [case if case.name in COVERING else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda case: case.name,
)
def test_logits(case: Case, tmp_path) -> None:
    compare(case, tmp_path, TorchAttention(), "float32", 1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if case.name == "gemma3"], ids=lambda case: case.name)
def test_logits_with_attention_in_triton(case: Case, tmp_path) -> None:
    compare(case, tmp_path, TritonAttention(CAPABILITY), "float32", 1e-4)


def test_angles_that_were_reached_stay_in_place(tmp_path) -> None:
    case = CASES[0]
    case.save(tmp_path)
    decoder = load(case, tmp_path, Decoder, TorchAttention(), "float32")
    decoder.reach(24)
    (table,) = decoder._angles  # noqa: SLF001
    before = table.cos.data_ptr(), table.sin.data_ptr()
    logits(decoder)
    assert (table.cos.data_ptr(), table.sin.data_ptr()) == before


def test_experts_in_integers_run_one_by_one_and_say_that_they_wait(tmp_path) -> None:
    case = next(case for case in CASES if case.name == "mixtral")
    case.save(tmp_path)
    ours, theirs = (
        load_model(tmp_path, ops=ops, attention=TorchAttention(), decoder=kind, quantization="int8", device=DEVICE)
        for ops, kind in ((TritonOps(CAPABILITY), GpuDecoder), (TorchOps(), Decoder))
    )
    assert ours.decoder.waits
    assert theirs.decoder.waits
    for mine, reference in zip(logits(ours.decoder), logits(theirs.decoder), strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=0.05)


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe"])
def test_a_graph_holds_a_step_that_waits_for_nothing(name: str, tmp_path) -> None:
    case = next(case for case in CASES if case.name == name)
    case.save(tmp_path)
    decoder = load(case, tmp_path, GpuDecoder, TritonAttention(CAPABILITY), "float32")
    sequences = PagedSequences(decoder, PROMPTS)
    sequences.step([(0, 20), (2, 3)])
    token_ids, batch = sequences.batch([(0, 1), (2, 1)])

    def step() -> torch.Tensor:
        return decoder.forward(token_ids, batch, sequences.pool)

    expected = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    graph.replay()
    torch.testing.assert_close(held, expected, rtol=1e-5, atol=1e-5)


def test_adapters(tmp_path) -> None:
    case = next(case for case in CASES if case.name == "llama-bias")
    case.save(tmp_path)
    path = save_adapter(tmp_path / "adapter", shapes_of(AutoConfig.from_pretrained(tmp_path)), rank=6, alpha=12)
    found = []
    for ops, kind in ((TritonOps(CAPABILITY), GpuDecoder), (TorchOps(), Decoder)):
        model = load_model(tmp_path, ops=ops, attention=TorchAttention(), decoder=kind, dtype="float32", device=DEVICE)
        adapter = AdapterLoader(model.spec, model.names, ops, model.dtype, model.decoder.device, 64).load(path, 1 << 40)
        for tokens in (torch.arange(4, 9, device=DEVICE), torch.arange(0, device=DEVICE)):
            sequences = PagedSequences(model.decoder, PROMPTS)
            token_ids, batch = sequences.batch([(0, 7), (2, 5)])
            found.append(model.decoder.forward(token_ids, batch, sequences.pool, None, [(adapter, tokens)]))
    ours, base, theirs, base_of_theirs = found
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    torch.testing.assert_close(base, base_of_theirs, rtol=0, atol=1e-4)
    assert (ours - base)[4:9].abs().max() > 0.1
