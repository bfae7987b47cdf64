"""Torch's own attention over contiguous keys and values, by the operators that return log-sum-exps, which no public one
does. Which of them runs on a device is found by a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LONG_QUERIES = 2048
"""Rows of fewer queries are not worth the gathering, and what it takes to start several operators."""
GRANULE = 256
"""Numbers of queries and keys that operators are given are multiples of it."""
TRIAL_QUERIES, TRIAL_KEYS = 512, 256
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.float32: 1e-4}
"""How far an output of the trial, of numbers about 1, may be from what it must be."""


class HeadShape(NamedTuple):
    """States what queries are: their dtype, how many heads they and keys have, and how wide these are."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int


Attend = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
"""Attends from query [n, heads, head_dim] to key and value [keys, kv_heads, head_dim], with a scale; if the flag says
so, each query to no key behind its own index (there are as many keys as queries then).

Returns the output [n, heads, head_dim] and the log-sum-exp fp32 [n, heads], as views with any strides of tokens and
heads."""


class Operator(NamedTuple):
    """Names an operator and its version, and calls it."""

    name: str
    attend: Attend


def working_operator(shape: HeadShape, device: torch.device) -> Operator | str:
    """Returns the first operator for a device that computes what it must for such heads; else why none does.

    Runs on the device, and waits for it.
    """
    reasons = []
    for make in (cudnn, flash) if device.type == "cuda" else (flash_of_cpu,):
        found = make(device)
        if isinstance(found, str):
            reasons.append(found)
            continue
        try:
            error = _trial_error(found, shape, device)
        except Exception as raised:  # whatever a version does not take
            reasons.append(f"{found.name} fails here ({str(raised).partition(chr(10))[0]})")
            continue
        if error <= TOLERANCE[shape.dtype]:
            return found
        reasons.append(f"{found.name} is wrong by {error:.2g}")
    return f"none of torch's operators runs: {', '.join(reasons)}"


def cudnn(device: torch.device) -> Operator | str:
    """Returns cuDNN's operator, or why it is not to be used."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "cuDNN's is for compute capability 9.0 and higher"
    there: bool = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    if not (there and torch.backends.cudnn.enabled):
        return "cuDNN is missing or switched off"
    if not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return "torch.backends.cuda.enable_cudnn_sdp is off"

    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001
            _by_head(query), _by_head(key), _by_head(value), None, True, 0.0, causal, False, scale=scale
        )
        # The sums are [1, heads, n, 1], and were [1, heads, n] in earlier versions.
        return _by_token(result[0]), result[1].reshape(query.shape[1], query.shape[0]).transpose(0, 1)

    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return Operator(f"cudnn{version}", attend)


def flash(device: torch.device) -> Operator | str:
    """Returns FlashAttention's, as torch has it, or why it is not to be used."""
    if not torch.backends.cuda.is_flash_attention_available():
        return "torch was built without FlashAttention"
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return "torch.backends.cuda.enable_flash_sdp is off"

    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        result = torch.ops.aten._scaled_dot_product_flash_attention(  # noqa: SLF001
            _by_head(query), _by_head(key), _by_head(value), 0.0, causal, False, scale=scale
        )
        return _by_token(result[0]), result[1][0, :, : len(query)].transpose(0, 1)

    return Operator("flash", attend)


def flash_of_cpu(device: torch.device) -> Operator:
    """Returns the CPU's, by which the same code runs where there is no GPU."""

    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
            _by_head(query), _by_head(key), _by_head(value), 0.0, causal, scale=scale
        )
        return _by_token(output), lse[0].transpose(0, 1)

    return Operator("flash_for_cpu", attend)


def _by_head(x: Tensor) -> Tensor:
    """Returns [n, heads, dim] as [1, heads, n, dim], with the strides of a tensor [1, n, heads, dim]: cuDNN prepares
    itself for each new combination of sizes and strides, which takes long."""
    return x.unsqueeze(0).transpose(1, 2)


def _by_token(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def _trial_error(operator: Operator, shape: HeadShape, device: torch.device) -> float:
    """Returns how far an operator's results are from what they must be, with a mask and without."""
    random = torch.Generator().manual_seed(0)

    def draw(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, shape.head_dim, generator=random, dtype=torch.float32, device="cpu").to(
            device, shape.dtype
        )

    scale, errors = shape.head_dim**-0.5, []
    query = draw(TRIAL_QUERIES, shape.heads)
    for keys, causal in ((TRIAL_QUERIES, True), (TRIAL_KEYS, False)):
        key, value = draw(keys, shape.kv_heads), draw(keys, shape.kv_heads)
        output, lse = operator.attend(query, key, value, causal, scale)
        unseen = torch.ones(TRIAL_QUERIES, keys, dtype=torch.bool, device=device).triu(1) if causal else None
        for head in (0, shape.heads - 1):
            of_kv = head // (shape.heads // shape.kv_heads)
            scores = query[:, head].double() @ key[:, of_kv].double().T * scale
            if unseen is not None:
                scores = scores.masked_fill(unseen, -torch.inf)
            errors.append(output[:, head].double() - scores.softmax(1) @ value[:, of_kv].double())
            errors.append((lse[:, head].double() - scores.logsumexp(1)).unsqueeze(1))
    worst = torch.stack([each.abs().max() for each in errors]).max().item()
    return worst if worst == worst else float("inf")
