"""TritonSamplingKernels: chooses tokens on an NVIDIA GPU, where the host need not wait for them."""

from __future__ import annotations

import numpy as np
import torch
import triton
from torch import Tensor

from pagemill.sampling import triton_kernels as kernels
from pagemill.sampling.kernels import ALL_FORBIDDEN, NOT_FINITE, Bits, Choices, DeviceChoices, Ids
from pagemill.sampling.torch_kernels import TorchSamplingKernels
from pagemill.triton_launch import launcher

SPLIT = 4096
"""A program's share of a row of logits. The same for any number of rows: sums depend on it in their last bits."""
CHUNK = 256
"""Logits that are compared with all pivots at a time, in registers."""


class TritonSamplingKernels(TorchSamplingKernels):
    """Implements `SamplingKernels`: log probabilities as torch's, the rest by Triton.

    A draw reads the inverse CDF in the order of the vocabulary, whether or not tokens are left out.
    """

    truncates_on_device = True

    def mask(self, logits: Tensor, places: Ids, bits: Bits, rows: Ids) -> None:
        if not len(places):
            return
        allowed = _sent(bits[rows].view(np.int32), logits.device)
        grid = (len(places), -(-logits.shape[1] // SPLIT), 1)
        at = _sent(places, logits.device)
        forbidding = launcher(kernels.forbid, SPLIT=SPLIT)
        forbidding(grid, logits, at, logits.stride(0), logits.shape[1], allowed, bits.shape[1])

    def choose(self, logits: Tensor, places: Ids, choices: Choices) -> Ids:
        if not len(places):
            return np.zeros(0, np.int64)
        sent = None
        if choices.temperature.any():
            sent = DeviceChoices(*(_sent(choice, logits.device) for choice in choices))
        tokens = _choose(logits, _sent(places, logits.device), len(places), sent, choices.truncate)
        return tokens.cpu().numpy().astype(np.int64)

    def choose_on_device(self, logits: Tensor, choices: DeviceChoices | None, *, truncate: bool = False) -> Tensor:
        """Returns what torch's does, the same tokens as `choose`. logits: of any floating-point type, and elements of
        a row side by side."""
        return _choose(logits, None, len(logits), choices, truncate)


def _sent(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns a copy on the device, which the host does not wait for."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _choose(logits: Tensor, places: Tensor | None, rows: int, choices: DeviceChoices | None, truncate: bool) -> Tensor:
    device, vocab = logits.device, logits.shape[1]
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    if not rows:
        return tokens
    splits = -(-vocab // SPLIT)
    sizes = {"SPLIT": SPLIT, "SPLITS": triton.next_power_of_2(splits)}
    source = (logits, places, logits.stride(0), vocab)
    maxima = torch.empty(rows, splits, dtype=torch.float32, device=device)
    first = torch.empty(rows, splits, dtype=torch.int32, device=device)
    launcher(kernels.find_largest, SPLIT=SPLIT)((rows, splits, 1), *source, maxima, first, splits)
    picking = launcher(kernels.pick, NOT_FINITE=NOT_FINITE, ALL_FORBIDDEN=ALL_FORBIDDEN, **sizes)
    if choices is None:
        nothing = (None, None, None, None, None)
        picking((rows, 1, 1), *source, maxima, first, *nothing, tokens, splits)
        return tokens
    log_min_p = choices.min_p.log()
    cuts = _cuts(source, maxima, choices, log_min_p, sizes) if truncate else None
    sums = torch.empty(rows, splits, dtype=torch.float32, device=device)
    weights = (choices.temperature, log_min_p, cuts, sums)
    launcher(kernels.weigh, **sizes)((rows, splits, 1), *source, maxima, *weights, splits)
    picking((rows, 1, 1), *source, maxima, first, *weights, choices.uniforms, tokens, splits)
    return tokens


def _cuts(
    source: tuple[Tensor, Tensor | None, int, int],
    maxima: Tensor,
    choices: DeviceChoices,
    log_min_p: Tensor,
    sizes: dict[str, int],
) -> Tensor:
    """Returns the place, in the order of fp32 numbers, of the least logit that top_k and top_p keep: int32 [m]."""
    rows, splits = maxima.shape
    device, pivots = maxima.device, kernels.PIVOTS.value
    intervals = torch.empty(2, rows, 2, dtype=torch.int64, device=device)
    targets = torch.empty(2, rows, dtype=torch.float64, device=device)
    parts = torch.empty(2, rows, splits, pivots, dtype=torch.float32, device=device)
    cuts: Tensor | None = None
    for of_k in (True, False):
        narrowing = launcher(kernels.narrow, OF_K=of_k, CHUNK=min(CHUNK, SPLIT), **sizes)
        starts, cuts = cuts, torch.empty(rows, dtype=torch.int32, device=device)
        for at in range(kernels.PASSES.value + 1):
            narrowing(
                (rows, splits if at < kernels.PASSES.value else 1, 1),
                *source, maxima, choices.temperature, choices.top_k, choices.top_p, log_min_p, starts, cuts,
                intervals, targets, parts, rows, splits, at,
            )  # fmt: skip
    assert cuts is not None
    return cuts
