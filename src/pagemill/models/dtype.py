"""Chooses the dtype that a model computes in, by what this machine has instructions for."""

from __future__ import annotations

import platform

import torch

from pagemill.errors import ConfigError
from pagemill.machine import cpu_features

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_X86 = {torch.bfloat16: {"avx512_bf16", "amx_bf16"}, torch.float16: {"avx512_fp16", "amx_fp16"}}
_ARM = {torch.bfloat16: {"bf16", "svebf16"}, torch.float16: {"asimdhp"}}


def is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether `device` has instructions for matrix products in `dtype`."""
    if dtype == torch.float32:
        return True
    if device.type == "cuda":
        return dtype == torch.float16 or torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return dtype == torch.float16
    table = _ARM if platform.machine().lower() in ("aarch64", "arm64") else _X86
    return not table[dtype].isdisjoint(cpu_features())


def resolve_dtype(
    requested: str, stored: dict[torch.dtype, int], *, quantized: bool, device: torch.device
) -> torch.dtype:
    """Returns the dtype to compute in. Raises ConfigError for an unknown one.

    requested: "auto", "float32", "bfloat16" or "float16".
    stored:    bytes of the checkpoint by dtype; auto takes the most frequent if the device has instructions for it.
    quantized: dequantized weights fit no 16-bit format exactly: auto takes float32 on CPU, and elsewhere 16 bits, which
               are faster there.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise ConfigError(f"dtype is {requested!r}; it must be one of auto, {', '.join(DTYPES)}", param="dtype")
        return DTYPES[requested]
    if quantized:
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if is_native(torch.bfloat16, device) else torch.float16
    dtype = max(stored, key=lambda kind: stored[kind], default=torch.float32)
    return dtype if is_native(dtype, device) else torch.float32
