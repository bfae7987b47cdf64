"""Attention to latents: values are the first numbers of keys, stored once. Every backend, against dense fp64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from elsewhere import Elsewhere
from paged_case import PagedCase

from gpu_compiler import compiled_by
from interpreter import DEVICE, multiply_rows_alike
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.torch_backend import TorchAttention
from pagemill.kvcache.layout import block_major, layer_major

ROWS = [(600, 1), (37, 37), (90, 3), (5, 5), (1, 1), (70, 20)]
ROUNDING = {torch.float32: 3e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}
FORMATS = [(each, each) for each in ROUNDING] + [("fp8_e4m3", torch.bfloat16), (torch.bfloat16, torch.float32)]
STARTS = torch.tensor([3, 0, 50, 1, 0, 9], dtype=torch.int32)
RANGES = ({}, {"key_start": STARTS, "key_end": STARTS + 40})


def close(backend, case: PagedCase, **options: object) -> None:
    case.write_all(backend)
    query, batch = case.whole()
    output, lse = backend.attend(query, case.cache, batch, 0, scale=0.1, return_lse=True, **options)
    assert output.shape == (*query.shape[:2], case.value_dim)
    expected, of_lse = case.expected(scale=0.1, **options)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=ROUNDING[case.query_dtype])
    torch.testing.assert_close(lse.double(), of_lse, rtol=1e-3, atol=ROUNDING[case.query_dtype])


def latents(dtype: torch.dtype | str = torch.float32, query: torch.dtype = torch.float32, **settings) -> PagedCase:
    sizes = {"rows": ROWS, "heads": 6, "kv_heads": 1, "head_dim": 48, "value_dim": 32, "seed": 41}
    return PagedCase(dtype=dtype, query_dtype=query, **(sizes | settings))


@pytest.mark.parametrize(("dtype", "query"), FORMATS)
@pytest.mark.parametrize("kind", [CpuAttention, TorchAttention])
def test_on_cpu(kind, dtype, query) -> None:
    layouts = zip((layer_major, block_major), RANGES, strict=True)
    for layout, options in layouts if kind is CpuAttention else [(block_major, RANGES[1])]:
        close(kind(), latents(dtype, query, layout=layout), **options)


@pytest.mark.parametrize("heads", [1, 30, 128])
def test_any_number_of_heads_shares_a_latent(heads: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = latents(dtype, dtype, rows=[(300, 1), (9, 9)], heads=heads, head_dim=576, value_dim=512)
        for part in (case.keys, case.queries):
            for row in part:
                row *= 0.4
        close(CpuAttention(), case)


def test_what_does_not_fit_is_refused() -> None:
    case = latents()
    query, batch = case.whole()
    slots = batch.groups[0].slots
    with pytest.raises(ValueError, match="a value is given where, and only where"):
        CpuAttention().write(query[:, :1], query[:, :1, :32], case.cache, slots)
    with pytest.raises(ValueError, match=r"key is .* it must be \(\d+, 1, 48\)"):
        CpuAttention().write(query[:, :1, :32], None, case.cache, slots)


@pytest.fixture
def triton_attention_at(monkeypatch: pytest.MonkeyPatch):
    """Gives attention in Triton for a capability; chunks are small, so that rows have several."""
    pytest.importorskip("triton")
    from pagemill.attention import triton_backend, triton_latent

    monkeypatch.setattr(triton_latent, "CHUNK", 64)
    monkeypatch.setattr(triton_latent, "LONGEST_CHUNK", 256)
    monkeypatch.setattr(triton_latent, "CHUNKS", 4)
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_backend, "VECTORS", 512)
    return lambda *capability: Elsewhere(triton_backend.TritonAttention(capability), DEVICE)


WITHOUT_UNITS, FIRST, WARP_GROUPS = (7, 5), (8, 0), (9, 0)
FEWER_ROWS = {"rows": [(200, 1), (25, 25), (70, 2), (1, 1)]}
FEWER_RANGES = {name: tensor[:4] for name, tensor in RANGES[1].items()}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(
    ("capability", "dtype", "query", "settings", "options"),
    [
        (FIRST, torch.bfloat16, torch.bfloat16, {}, {}),
        pytest.param(
            FIRST, torch.float16, torch.float16, {"heads": 20, "head_dim": 56, "value_dim": 40}, FEWER_RANGES,
            marks=pytest.mark.slow,
        ),
        (WARP_GROUPS, torch.bfloat16, torch.bfloat16, {"heads": 70}, FEWER_RANGES),
        (WARP_GROUPS, torch.bfloat16, torch.bfloat16, {"heads": 70, "head_dim": 128, "value_dim": 64}, {}),
        (WARP_GROUPS, "fp8_e4m3", torch.bfloat16, {"block_size": 8}, {}),
        pytest.param(
            FIRST, torch.float32, torch.float32, {"head_dim": 96, "value_dim": 80}, {}, marks=pytest.mark.slow
        ),
        (WITHOUT_UNITS, torch.float16, torch.float16, {"heads": 20}, FEWER_RANGES),
        pytest.param(FIRST, torch.bfloat16, torch.float32, {}, {}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_in_triton(triton_attention_at, capability, dtype, query, settings, options) -> None:
    case = latents(dtype, query, layout=block_major, **(FEWER_ROWS | settings))
    close(triton_attention_at(*capability), case, **options)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_in_triton_a_row_keeps_its_bits_in_any_batch(triton_attention_at, monkeypatch) -> None:
    multiply_rows_alike(monkeypatch)
    backend, case = (
        triton_attention_at(*FIRST),
        latents(torch.bfloat16, torch.bfloat16, layout=block_major, **FEWER_ROWS),
    )
    case.write_all(backend)

    def attend(*parts: tuple[int, int, int]) -> list[torch.Tensor]:
        query, batch = case.batch(list(parts))
        output, _ = backend.attend(query, case.cache, batch, 0, scale=0.1)
        return list(output.split([end - begin for _, begin, end in parts]))

    everything = [(row, 0, length) for row, (_, length) in enumerate(case.rows)]
    together = attend(*everything)
    for part, again in zip(everything[::-1], attend(*everything[::-1]), strict=True):
        assert torch.equal(again, together[part[0]])
    for part, expected in zip(everything[:2], together, strict=False):
        assert torch.equal(attend(part)[0], expected)
    assert torch.equal(torch.cat([attend((1, 0, 9))[0], attend((1, 9, 25))[0]]), together[1])


def test_the_kernel_compiles_for_gpus_and_fits() -> None:
    pytest.importorskip("triton")
    compiled = compiled_by(Path(__file__).with_name("compile_latents_for_gpus.py"))
    assert all(stack == "0" for _, _, _, stack, _ in compiled), compiled
    kernels = ["write_tokens", "attend_latents", "attend_latents_in_chunks", "merge_chunks"]
    assert [line[:2] for line in compiled] == [["90", kernel] for kernel in kernels] * 3
