"""What Triton's kernels promise beside right results: bits that depend on a query's own row only, no waiting for the
device, and code that fits every GPU they are meant for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from elsewhere import Elsewhere
from interpreter import DEVICE
from paged_case import PagedCase

from pagemill.attention import triton_backend
from pagemill.attention.triton_backend import CHUNK, CHUNKS, LONGEST_CHUNK, TritonAttention, most_chunks
from pagemill.kvcache.layout import block_major


@pytest.fixture
def backend(triton_attention: TritonAttention) -> Elsewhere:
    return Elsewhere(triton_attention, DEVICE)


def attend(
    backend: Elsewhere, case: PagedCase, parts: list[tuple[int, int, int]], **options: object
) -> list[torch.Tensor]:
    """Outputs of parts (row, begin, end)."""
    query, batch = case.batch(parts)
    output, _ = backend.attend(query, case.cache, batch, 0, scale=0.125, **options)
    return list(output.split([end - begin for _, begin, end in parts]))


@pytest.mark.parametrize(("dtype", "options"), [(torch.float32, {}), (torch.bfloat16, {"window": 100})])
def test_a_row_keeps_its_bits_in_any_batch(backend: Elsewhere, dtype: torch.dtype, options: dict[str, object]) -> None:
    rows = [(600, 1), (300, 3), (70, 40), (5, 5), (1, 1)]
    case = PagedCase(rows, heads=6, dtype=dtype, query_dtype=dtype, layout=block_major, seed=31)
    case.write_all(backend)
    everything = [(row, 0, length) for row, (_, length) in enumerate(rows)]
    together = attend(backend, case, everything, **options)
    for part, expected in zip(everything, together, strict=True):
        assert torch.equal(attend(backend, case, [part], **options)[0], expected)
    for part, again in zip(everything[::-1], attend(backend, case, everything[::-1], **options), strict=True):
        assert torch.equal(again, together[part[0]])


def test_long_rows_keep_their_bits_in_any_chunks_of_prefill(backend: Elsewhere) -> None:
    case = PagedCase([(90, 90)], heads=6, layout=block_major, seed=32)
    case.write_all(backend)
    whole = attend(backend, case, [(0, 0, 90)])[0]
    for begin, end in ((0, 7), (7, 50), (50, 90)):
        assert torch.equal(attend(backend, case, [(0, begin, end)])[0], whole[begin:end])


def test_there_are_as_many_chunks_as_the_kernel_cuts() -> None:
    for context in [*range(1, 3000, 7), *(CHUNK * CHUNKS * i + j for i in (1, 2, 4, 8, 9) for j in (-1, 0, 1))]:
        chunk = CHUNK
        while chunk < LONGEST_CHUNK and chunk * CHUNKS < context:
            chunk *= 2
        assert most_chunks(context, None) >= -(-context // chunk)
    assert most_chunks(100_000, 1024) == 1024 // CHUNK + 2
    assert most_chunks(CHUNK, None) == 1


def test_chunks_grow_with_the_context(backend: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "CHUNKS", 2)
    monkeypatch.setattr(triton_backend, "LONGEST_CHUNK", 1024)
    case = PagedCase([(300, 1), (700, 2), (2100, 1)], layout=block_major, seed=33)
    case.write_all(backend)
    for options in ({}, {"window": 900}):
        outputs = attend(backend, case, [(0, 0, 1), (1, 0, 2), (2, 0, 1)], **options)
        expected, _ = case.expected(scale=0.125, **options)
        torch.testing.assert_close(torch.cat(outputs).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_nothing_waits_for_the_gpu() -> None:
    backend, case = TritonAttention(), PagedCase([(600, 1), (77, 33)], layout=block_major, device=DEVICE)
    query, batch = case.whole()
    key, value = (torch.cat(rows).to(DEVICE) for rows in (case.keys, case.values))
    slots = torch.cat([case.slots(0, 0, 600), case.slots(1, 0, 77)]).to(DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.write(key, value, case.cache, slots)
        output, _ = backend.attend(query, case.cache, batch, 0, scale=0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, _ = case.expected(scale=0.125)
    torch.testing.assert_close(output.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_attended_is_refused() -> None:
    case, backend = PagedCase([(20, 1)], dtype=torch.bfloat16), TritonAttention()
    query, batch = case.whole()
    with pytest.raises(ValueError, match="in pairs"):
        backend.attend(query, case.cache, batch, 0, scale=0.1)
    case = PagedCase([(20, 1)], layout=block_major)
    query, batch = case.whole()
    with pytest.raises(ValueError, match="heads must be a multiple of 2"):
        backend.attend(query[:, :3], case.cache, batch, 0, scale=0.1)
    with pytest.raises(ValueError, match="scale is 0"):
        backend.attend(query, case.cache, batch, 0, scale=0.0)
    with pytest.raises(ValueError, match="last dimension contiguous"):
        backend.write(query[:, :2, ::2], query[:, :2, ::2], case.cache, torch.tensor([0]))


def test_kernels_compile_for_every_gpu_and_fit() -> None:
    script = Path(__file__).with_name("compile_for_gpus.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = [line.split() for line in done.stdout.splitlines()[1:]]
    assert all(stack == "0" for _, kernel, _, stack, *_ in compiled if kernel != "attend"), done.stdout
    kernels = ["write_tokens", "attend", "attend_in_chunks", "merge_chunks"]
    assert [line[:2] for line in compiled] == [
        [capability, kernel] for capability in ("75", "80", "90", "100") for kernel in kernels
    ]
