"""Chooses tokens where the logits lie, so that the host need not wait for them; `kernels.py` says what is drawn from.

Nothing here depends on what logits hold but the tokens, so that a graph may capture it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagemill.sampling.kernels import ALL_FORBIDDEN, NOT_FINITE
from pagemill.sampling.torch_kernels import draw


class DeviceChoices(NamedTuple):
    """Holds how rows choose, as `Choices` does, on the device: tensors [rows], of the same dtypes."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniforms: torch.Tensor


def choose_on_device(logits: torch.Tensor, choices: DeviceChoices | None) -> torch.Tensor:
    """Returns a token for each row, int32 [m]; NOT_FINITE or ALL_FORBIDDEN where there is none.

    logits: float32 [m, vocab]. choices: untruncated; None: all rows take the argmax.
    """
    largest, best = logits.max(-1)
    if choices is not None:
        drawn = choices.temperature > 0
        scaled = logits / torch.where(drawn, choices.temperature, 1.0)[:, None]
        best = torch.where(drawn, draw(torch.softmax(scaled, -1), choices.uniforms), best)
    tokens = best.masked_fill(largest == -torch.inf, ALL_FORBIDDEN)
    return tokens.masked_fill(~(largest < torch.inf), NOT_FINITE).int()
