from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pagemill import _kernels
from pagemill.attention import selection
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.torch_backend import TorchAttention
from pagemill.config import EngineConfig
from pagemill.errors import ConfigError
from pagemill.executor import backend
from pagemill.executor.backend import cpu_backend, select_backend
from pagemill.executor.share import load_share
from pagemill.ops.cpu_ops import CpuOps
from pagemill.ops.torch_ops import TorchOps
from pagemill.sampling.cpu_kernels import CpuSamplingKernels


def test_each_device_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = _kernels.num_threads()
    on_cpu = select_backend("cpu", 3)
    assert _kernels.num_threads() == 3
    cpu_backend(threads)
    assert list(map(type, (on_cpu.ops, on_cpu.attention, on_cpu.sampling))) == [
        CpuOps,
        CpuAttention,
        CpuSamplingKernels,
    ]


@pytest.mark.parametrize("name", ["cuda", "auto"])
@pytest.mark.parametrize(
    ("capability", "refusal", "kernels"),
    [
        ((7, 5), None, ["TritonQuantizedOps", "TritonAttention", "GpuDecoder", "TritonSamplingKernels"]),
        ((7, 0), None, ["TorchOps", "TorchAttention", "Decoder", "TorchSamplingKernels"]),
        ((9, 0), "no C compiler", ["TorchOps", "TorchAttention", "Decoder", "TorchSamplingKernels"]),
    ],
)
def test_gpus_get_the_kernels_that_they_can_run(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    capability: tuple[int, int],
    refusal: str | None,
    kernels: list[str],
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "triton_refusal", lambda: refusal)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    on_gpu = select_backend(name)
    assert on_gpu.device == torch.device("cuda")
    ops, attention, sampling = type(on_gpu.ops), type(on_gpu.attention), type(on_gpu.sampling)
    assert [kind.__name__ for kind in (ops, attention, on_gpu.decoder, sampling)] == kernels
    assert refusal is None or refusal in caplog.text


def test_gpus_of_rocm_get_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    on_gpu = select_backend("cuda")
    assert list(map(type, (on_gpu.ops, on_gpu.attention))) == [TorchOps, TorchAttention]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert select_backend("cuda:1").device == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="'cuda:2', but GPUs are numbered 0 to 1") as caught:
        select_backend("cuda:2")
    assert caught.value.param == "device"


def test_kernels_that_this_cpu_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_ISA", "altivec")
    with pytest.raises(ConfigError, match="altivec"):
        select_backend("cpu")


def test_attention_on_cpu_is_its_own_or_torchs() -> None:
    for name in ("torch", "sdpa"):
        assert isinstance(select_backend("cpu", attention=name).attention, TorchAttention)
    for name in ("triton", "flash_attn", "flashinfer"):
        with pytest.raises(ConfigError, match=r"needs an NVIDIA GPU.*use 'auto' or 'torch'") as caught:
            select_backend("cpu", attention=name)
        assert caught.value.param == "attention_backend"


def test_a_gpus_attention_is_chosen_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    for module in (backend, selection):
        monkeypatch.setattr(module, "triton_refusal", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="A100", multi_processor_count=108)
    )
    config = EngineConfig(model="smollm2-135m", device="cuda", dtype="float32", attention_backend="FLASH_ATTN")
    with pytest.raises(ConfigError, match="'flash_attn' cannot be used") as caught:
        load_share(config, progress=lambda *_: pytest.fail("weights are read"))
    assert caught.value.param == "attention_backend"


def test_attention_that_is_named_runs_the_model() -> None:
    share = load_share(EngineConfig(model="smollm2-135m", device="cpu", attention_backend="TORCH_SDPA"))
    assert isinstance(share.backend.attention, TorchAttention)
    assert share.model.decoder.attention is share.backend.attention
