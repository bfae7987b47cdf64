"""Selection of the attention on a GPU: what was asked for, or the fastest of what takes the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from pagemill.attention.flash_attn_backend import flash_attn_libraries
from pagemill.attention.flashinfer_backend import flashinfer_libraries
from pagemill.attention.interface import AttentionBackend
from pagemill.attention.library_backend import AttentionLibrary, LibraryAttention
from pagemill.attention.sdpa_operators import LONG_QUERIES, HeadShape, Operator, working_operator
from pagemill.attention.support import HALF_FORMATS, HALVES, NO_GPU, AttentionNeeds, Support
from pagemill.attention.torch_backend import TorchAttention
from pagemill.errors import ConfigError
from pagemill.ops.triton_driver import triton_refusal

logger = logging.getLogger(__name__)

TRITON_SUPPORT = Support(least_capability=(7, 5))
SDPA_FORMATS = (*HALF_FORMATS, "int8", "fp8_e4m3", "fp8_e5m2")
SDPA_SUPPORT = Support(
    HALVES,
    SDPA_FORMATS,
    head_dims=range(8, 257, 8),
    unequal_widths=False,
    soft_cap=False,
    same_format=True,
    least_capability=(8, 0),
)
TORCH_SUPPORT = Support()


@dataclass(frozen=True, slots=True)
class Candidate:
    """Names a backend, what it takes, and how it is made. missing: what to install, where it is not there. trial: tries
    it on the device, and returns why it does not run there."""

    name: str
    support: Support
    make: Callable[[], AttentionBackend]
    missing: str | None = None
    trial: Callable[[], str | None] = lambda: None

    def refusal(self, needs: AttentionNeeds) -> str | None:
        """Returns why it cannot be used, with the way out."""
        return self.missing or self.support.refusal(needs) or self.trial()


Measure = Callable[[Mapping[str, AttentionBackend]], str]
"""Returns the name of the fastest."""


def candidates(needs: AttentionNeeds, device: torch.device) -> list[Candidate]:
    """Returns all backends for a GPU, in the order in which they are taken without a measurement."""
    capability = needs.capability
    no_triton = NO_GPU if capability is None else triton_refusal()

    def rest() -> AttentionBackend:
        if capability is None or no_triton is not None or TRITON_SUPPORT.refusal(needs) is not None:
            return TorchAttention()
        from pagemill.attention.triton_backend import TritonAttention  # imports triton

        return TritonAttention(capability, early=True)

    def with_rest(library: AttentionLibrary[Any]) -> AttentionBackend:
        return LibraryAttention(library, rest())

    @cache
    def operator() -> Operator | str:
        return working_operator(HeadShape(needs.dtype, needs.heads, needs.kv_heads, needs.head_dim), device)

    def no_operator() -> str | None:
        if needs.step_tokens is not None and needs.step_tokens < LONG_QUERIES:
            return (
                f"it attends {LONG_QUERIES} tokens of a prompt and more, and a step has at most {needs.step_tokens}; "
                f"raise max_num_batched_tokens"
            )
        found = operator()
        return found if isinstance(found, str) else None

    def sdpa() -> AttentionBackend:
        from pagemill.attention.sdpa_backend import SdpaAttention  # imports triton

        found = operator()
        assert not isinstance(found, str), "the trial has refused it"
        assert capability is not None, "so has the support"
        shape = HeadShape(needs.dtype, needs.heads, needs.kv_heads, needs.head_dim)
        return SdpaAttention(found, shape, rest(), capability)

    found = [Candidate("triton", TRITON_SUPPORT, rest, no_triton)]
    for name, package, installed in (
        ("flash_attn", "flash-attn", flash_attn_libraries),
        ("flashinfer", "flashinfer-python", flashinfer_libraries),
    ):
        libraries: Sequence[AttentionLibrary[Any]] = [] if capability is None else installed()
        found.extend(Candidate(name, each.support, partial(with_rest, each)) for each in libraries)
        if not libraries:
            extra = name.replace("_", "-")
            missing = NO_GPU if capability is None else f"{package} is missing; install pagemill[{extra}]"
            found.append(Candidate(name, Support(), TorchAttention, missing))
    found.append(Candidate("sdpa", SDPA_SUPPORT, sdpa, no_triton, no_operator))
    found.append(Candidate("torch", TORCH_SUPPORT, TorchAttention))
    return found


def choose_attention(name: str, needs: AttentionNeeds, among: list[Candidate], measure: Measure) -> AttentionBackend:
    """Returns the backend of this name; for "auto", the fastest by `measure` of those that take the model, of which
    plain torch's is the last resort.

    Raises ConfigError, with the reason and the way out, where none of this name takes it.
    """
    if name == "auto":
        fit = {each.name: each for each in reversed(among) if each.name != "torch" and each.refusal(needs) is None}
        if not fit:
            reasons = "; ".join(f"{each.name}: {each.refusal(needs)}" for each in among if each.name != "torch")
            logger.warning("attention runs in plain torch, far slower (%s)", reasons)
            return TorchAttention()
        made = {each.name: each.make() for each in reversed(fit.values())}
        return made[next(iter(made)) if len(made) == 1 else measure(made)]
    of_name = [each for each in among if each.name == name]
    for candidate in of_name:
        if candidate.refusal(needs) is None:
            return candidate.make()
    reasons = "; or ".join(dict.fromkeys(str(each.refusal(needs)) for each in of_name))
    raise ConfigError(
        f"attention_backend {name!r} cannot be used: {reasons}; or use attention_backend 'auto'",
        param="attention_backend",
    )
