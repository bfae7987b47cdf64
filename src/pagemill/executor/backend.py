"""Backend: the operators, attention, layers, sampling and layout of K/V that a device runs, chosen together."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import torch

from pagemill import _kernels
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.interface import AttentionBackend
from pagemill.attention.torch_backend import TorchAttention
from pagemill.errors import ConfigError
from pagemill.kvcache.layout import LayoutMaker, block_major, layer_major
from pagemill.machine import usable_cores
from pagemill.models.cpu_decoder import cpu_decoder
from pagemill.models.decoder import Decoder, DecoderMaker
from pagemill.ops.cpu_ops import CpuOps
from pagemill.ops.interface import Ops
from pagemill.ops.torch_ops import TorchOps
from pagemill.ops.triton_driver import triton_refusal
from pagemill.sampling.cpu_kernels import CpuSamplingKernels
from pagemill.sampling.kernels import SamplingKernels
from pagemill.sampling.torch_kernels import TorchSamplingKernels

logger = logging.getLogger(__name__)

TRITON_CAPABILITY = (7, 5)
"""The least compute capability that Triton's kernels are made for."""


class Backend(NamedTuple):
    """Holds what belongs together on a device. layout: the one that the attention reads fastest."""

    device: torch.device
    ops: Ops
    attention: AttentionBackend
    decoder: DecoderMaker
    sampling: SamplingKernels
    layout: LayoutMaker


def torch_backend(device: torch.device) -> Backend:
    """Returns the readable reference, for any device."""
    return Backend(device, TorchOps(), TorchAttention(), Decoder, TorchSamplingKernels(), block_major)


def cpu_backend(num_threads: int | None = None) -> Backend:
    """Returns the C++ kernels, with `num_threads` threads (default: one per physical core).

    Raises ConfigError if the environment's PAGEMILL_ISA names kernels that this CPU cannot run.
    """
    asked = os.environ.get("PAGEMILL_ISA")
    if asked and asked not in _kernels.available_isas():
        raise ConfigError(
            f"PAGEMILL_ISA is {asked!r}; this CPU runs {', '.join(_kernels.available_isas())}", param="PAGEMILL_ISA"
        )
    _kernels.set_num_threads(num_threads or usable_cores())
    return Backend(torch.device("cpu"), CpuOps(), CpuAttention(), cpu_decoder, CpuSamplingKernels(), layer_major)


def select_backend(name: str, num_threads: int | None = None, attention: str = "auto") -> Backend:
    """Returns the C++ kernels for "cpu", Triton's for "cuda", the better of what the machine has for "auto".

    attention: as in EngineConfig; what a GPU attends with follows from the model too (see `gpu_attention`).
    Raises ConfigError for a device that is not there, for attention that CPUs do not have, and as `cpu_backend` does.
    """
    device = find_device(name)
    if device.type != "cpu":
        return cuda_backend(device)
    if attention not in ("auto", "torch", "sdpa"):  # vLLM's TORCH_SDPA is torch on a CPU
        raise ConfigError(
            f"attention_backend {attention!r} cannot be used: it needs an NVIDIA GPU, and the engine runs on CPU; use "
            "'auto' or 'torch'",
            param="attention_backend",
        )
    backend = cpu_backend(num_threads)
    return backend if attention == "auto" else backend._replace(attention=TorchAttention(), decoder=Decoder)


def cuda_backend(device: torch.device) -> Backend:
    """Returns Triton's operators, attention and sampling; torch's where Triton is missing or cannot start, or the GPU
    is AMD's or older than the kernels."""
    backend = torch_backend(device)
    if torch.version.hip is not None:
        logger.warning("everything runs in plain torch: Triton's kernels are made for NVIDIA GPUs, not for ROCm")
        return backend
    capability = torch.cuda.get_device_capability(device)
    if capability < TRITON_CAPABILITY:
        logger.warning("everything runs in plain torch: Triton needs compute capability 7.5, not %d.%d", *capability)
        return backend
    if (refusal := triton_refusal()) is not None:
        logger.warning("everything runs in plain torch, far slower than in Triton: %s", refusal)
        return backend
    from pagemill.attention.triton_backend import TritonAttention  # these import triton
    from pagemill.models.gpu_decoder import GpuDecoder
    from pagemill.ops.triton_quantized import TritonQuantizedOps
    from pagemill.sampling.triton_sampling import TritonSamplingKernels

    return backend._replace(
        ops=TritonQuantizedOps(capability, early=True),
        attention=TritonAttention(capability, early=True),
        decoder=GpuDecoder,
        sampling=TritonSamplingKernels(),
    )


def find_device(name: str) -> torch.device:
    """Returns the device of a setting. Raises ConfigError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; it must be 'auto', 'cpu' or 'cuda'", param="device") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device {name!r} is not available on this machine; use 'auto' or 'cpu'", param="device")
    if device.index is not None and device.type == "cuda" and device.index >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"device is {name!r}, but GPUs are numbered 0 to {count - 1} (of those that CUDA_VISIBLE_DEVICES leaves); "
            "use one of these, or 'cuda'",
            param="device",
        )
    return device
