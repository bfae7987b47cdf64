"""Runs the benchmarks of attention on GPUs over tiny cases, so that they work where there is a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import gpu_attention, gpu_shared_prefixes, on_gpu
from interpreter import CAPABILITY, DEVICE
from pagemill.attention import sdpa_backend
from pagemill.attention.selection import SDPA_FORMATS
from pagemill.attention.triton_backend import TritonAttention
from pagemill.kvcache.kv_format import kv_format

pytestmark = pytest.mark.gpu


def timed(run: Callable[[], object]) -> float:
    result = run()
    output = result[0] if isinstance(result, tuple) else result
    assert not output.isnan().any()
    return 2.0


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets benchmarks find a GPU, which takes 2 ms for everything."""
    for module in (gpu_attention, gpu_shared_prefixes, on_gpu):
        monkeypatch.setattr(module, "DEVICE", DEVICE)
        monkeypatch.setattr(module, "median_ms", timed)
    for name, value in {"GEMM_SIZE": 16, "COPY_BYTES": 1 << 20}.items():
        monkeypatch.setattr(on_gpu, name, value)
    for name, value in {
        "is_available": True, "get_device_capability": CAPABILITY, "get_device_name": "none",
        "mem_get_info": (1 << 22, 0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.mark.usefixtures("triton_attention", "small_gpu")
def test_every_format_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "DECODE": [(2, 150), (1, 1 << 30)], "PREFILL": [20], "CHUNKS": [(8, 20)], "captured": lambda step: step,
    }.items():  # fmt: skip
        monkeypatch.setattr(gpu_attention, name, value)
    gathered, cut = [], sdpa_backend.cut
    monkeypatch.setattr(sdpa_backend, "cut", lambda *lengths: gathered.append(lengths) or cut(*lengths))
    monkeypatch.setattr(sdpa_backend, "LONG_QUERIES", 8)
    report = tmp_path / "report.json"
    arguments = ["--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["gpu_attention", *arguments])
    gpu_attention.main()
    said = json.loads(report.read_text())
    assert list(said["results"]) == list(gpu_attention.FORMATS)
    printed = capsys.readouterr().out
    copies = said["ceilings"]["copy_bytes_per_s"]
    assert copies == 2 * (1 << 20) / 2e-3
    for name, results in said["results"].items():
        cases = [("decode", 2, 150), ("prefill", 1, 20), ("chunk of 8", 1, 20)]
        assert [(at["name"], at["batch"], at["context"]) for at in results] == cases
        assert [at["sdpa_ms"] for at in results] == [2.0, 2.0, None]
        by_torch = 2.0 if name in SDPA_FORMATS else None
        assert [at["gathered_ms"] for at in results] == [None, by_torch, by_torch]
        read = 2 * (150 + (128 if name == "int4_mixed" else 0)) * kv_format(name).slot_bytes(2, 64, 64)
        assert results[0]["share"] == pytest.approx(read / 2e-3 / copies)
        assert f"| decode | 2 | 150 | 2.000 | {results[0]['share']:.0%} | 2.000 | – |" in printed
    assert gathered == [(20, 0), (8, 12)] * len({*SDPA_FORMATS} & {*gpu_attention.FORMATS})


@pytest.mark.usefixtures("triton_attention", "small_gpu")
def test_shared_prefixes_are_measured_both_ways(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_shared_prefixes, "CASES", [(3, 512, 40)])
    monkeypatch.setattr(gpu_shared_prefixes, "capture", lambda step: (step, step()))
    batches, attend = [], TritonAttention.attend
    monkeypatch.setattr(TritonAttention, "attend", lambda *args, **how: batches.append(args[3]) or attend(*args, **how))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    report = tmp_path / "report.json"
    arguments = ["--heads", "4", "--kv-heads", "1", "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["gpu_shared_prefixes", *arguments])
    gpu_shared_prefixes.main()
    (found,) = json.loads(report.read_text())["results"]
    assert found == {"rows": 3, "prefix": 512, "own": 40, "alone_ms": 2.0, "together_ms": 2.0, "same": True}
    assert "| 3 | 512 | 40 | 2.000 | 2.000 | 1.00x | yes |" in capsys.readouterr().out
    assert [None if batch.common is None else batch.common.tolist() for batch in batches[1:3]] == [None, [0, 512, 512]]
