"""Resolves a checkpoint's parameters of rotary embedding (RoPE) into inverse frequencies and an attention factor,
and keeps their cosines and sines by position.

Arithmetic is float32 in the order of the reference implementations, so that angles at far positions have their bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pagemill.errors import ModelConfigError, UnsupportedModelError
from pagemill.models.spec import RopeSpec

Parameters = Mapping[str, Any]
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def resolve_rope(
    parameters: Parameters, head_dim: int, *, max_position: int, max_model_len: int, partial: bool = False
) -> RopeSpec:
    """Returns the rotary embedding of one kind of layer.

    parameters: transformers' normalised `rope_parameters` of that kind.
    partial:    True if the family honours `partial_rotary_factor`.
    Raises UnsupportedModelError for an unknown type or parameter, ModelConfigError for one that is missing or wrong.
    """
    kind = parameters.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise UnsupportedModelError(
            f"RoPE type {kind!r} is not supported; supported are {', '.join(sorted(_SCALINGS))}", param="rope_type"
        )
    scale, known = _SCALINGS[kind]
    given = {key for key, value in parameters.items() if value is not None}
    if unknown := given - known - _COMMON:
        raise UnsupportedModelError(
            f"RoPE type {kind!r} with {', '.join(sorted(unknown))} is not supported; known parameters are "
            f"{', '.join(sorted(known | _COMMON))}",
            param="rope_parameters",
        )
    share = parameters.get("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial:
        raise UnsupportedModelError(
            f"partial_rotary_factor is {share}; this family is supported with 1.0 only", param="partial_rotary_factor"
        )
    rotary_dim = int(head_dim * share)
    try:
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
        wavelengths = float(parameters["rope_theta"]) ** exponent
        inv_freq, factor = scale(wavelengths, {**parameters, "max_position": max_position}, max_model_len)
        if not (math.isfinite(factor) and factor > 0 and bool((inv_freq.isfinite() & (inv_freq > 0)).all())):
            raise ValueError("a frequency or the attention factor is not a positive number")
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ModelConfigError(
            f"the parameters of RoPE type {kind!r} are incomplete or wrong ({error!r}); given: "
            f"{dict(parameters)}; compare config.json with the model's original",
            param="rope_parameters",
        ) from error
    return RopeSpec(tuple(inv_freq.tolist()), factor)


def scaled_max_position(parameters: Parameters, max_position: int) -> int:
    """Returns the longest context after scaling: linear and yarn multiply the length that the model was trained with.

    llama3 and longrope checkpoints declare the scaled length already.
    """
    factor = parameters.get("factor") or 1.0
    trained = parameters.get("original_max_position_embeddings") or max_position
    for what, value in (("factor", factor), ("original length", trained)):
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelConfigError(
                f"the RoPE {what} is {value!r}; it must be a positive number", param="rope_parameters"
            )
    if parameters.get("rope_type") == "linear":
        return int(max_position * factor)
    if parameters.get("rope_type") == "yarn":
        return max(max_position, int(trained * factor))
    return max_position


def magnitude(factor: float, weight: float = 1.0) -> float:
    """Returns by how much yarn raises queries and keys where positions are stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _default(wavelengths: Tensor, _: Parameters, __: int) -> tuple[Tensor, float]:
    return 1.0 / wavelengths, 1.0


def _linear(wavelengths: Tensor, parameters: Parameters, _: int) -> tuple[Tensor, float]:
    return 1.0 / wavelengths / parameters["factor"], 1.0


def _frequency_factors(wavelengths: Tensor, parameters: Parameters, _: int) -> tuple[Tensor, float]:
    """Divides each frequency by its own factor, which GGUF files hold in `rope_freqs.weight`."""
    return 1.0 / wavelengths / _per_frequency(parameters, "factors", wavelengths), 1.0


def _llama3(wavelengths: Tensor, parameters: Parameters, _: int) -> tuple[Tensor, float]:
    """Scales as Llama 3.1 does: slows long waves by `factor`, keeps short ones, and blends those between."""
    factor, low, high = (parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = parameters["original_max_position_embeddings"]
    inv_freq = 1.0 / wavelengths
    period = 2 * math.pi / inv_freq
    blend = (trained / period - low) / (high - low)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    scaled = torch.where(period > trained / low, inv_freq / factor, blended)
    return torch.where(period < trained / high, inv_freq, scaled), 1.0


def _yarn(wavelengths: Tensor, parameters: Parameters, _: int) -> tuple[Tensor, float]:
    """Scales as YaRN does (Peng et al. 2023, section 3.2): interpolates slow frequencies, keeps fast ones, and ramps
    between.
    """
    trained = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or parameters["max_position"] / trained
    theta, dim = float(parameters["rope_theta"]), 2 * wavelengths.numel()

    def dimension_with(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_with(parameters.get("beta_fast") or 32)
    high = dimension_with(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    keep = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / span, 0, 1)
    inv_freq = 1.0 / (factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention_factor = magnitude(factor)
        if mscale and all_dim:
            attention_factor = magnitude(factor, mscale) / magnitude(factor, all_dim)
    return inv_freq, float(attention_factor)


def _longrope(wavelengths: Tensor, parameters: Parameters, max_model_len: int) -> tuple[Tensor, float]:
    """Scales as LongRoPE does: divides each frequency by its factor from the short list or from the long one.

    `max_model_len` decides once: over the trained length it is the long list, as in vLLM. If each sequence's length
    decided, the keys of a growing sequence would change, and with them every cached block.
    """
    trained = parameters["original_max_position_embeddings"]
    factors = _per_frequency(parameters, "long_factor" if max_model_len > trained else "short_factor", wavelengths)
    inv_freq = 1.0 / (factors * wavelengths)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        factor = parameters.get("factor") or parameters["max_position"] / trained
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return inv_freq, float(attention_factor)


def _per_frequency(parameters: Parameters, key: str, wavelengths: Tensor) -> Tensor:
    factors = torch.tensor(parameters[key], dtype=torch.float32, device="cpu")
    if factors.shape != wavelengths.shape:
        raise ValueError(f"{key} has {factors.numel()} factors for {wavelengths.numel()} frequencies")
    return factors


_SCALINGS: dict[str, tuple[Callable[[Tensor, Parameters, int], tuple[Tensor, float]], set[str]]] = {
    "default": (_default, set()),
    "linear": (_linear, {"factor"}),
    "frequency_factors": (_frequency_factors, {"factors"}),
    "llama3": (_llama3, {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": (
        _yarn,
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": (
        _longrope,
        {"short_factor", "long_factor", "original_max_position_embeddings", "attention_factor", "factor"},
    ),
}
"""By type, the function that scales, and the parameters that it knows."""


_PIECE = 512
"""Positions computed at a time, always the same ones together: a vectorized cos may differ by where an element lies."""


class AngleTable:
    """Holds the cosines and sines of one rotary embedding, up to the longest context seen.

    cos, sin: fp32 [positions, rotary_dim / 2], contiguous, multiplied by the attention factor.
    """

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        self._inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
        self._factor = rope.factor
        self.cos = self.sin = torch.empty(0, len(rope.inv_freq), dtype=torch.float32, device=device)

    def reach(self, positions: int) -> None:
        """Adds rows until positions 0 to positions - 1 have one."""
        begin = self.cos.shape[0]
        if begin >= positions:
            return
        cos, sin = [self.cos], [self.sin]
        for first in range(begin, positions, _PIECE):
            piece = torch.arange(first, first + _PIECE, dtype=torch.int64, device=self._inv_freq.device)
            angles = piece.unsqueeze(-1).float() * self._inv_freq
            cos.append(torch.cos(angles) * self._factor)
            sin.append(torch.sin(angles) * self._factor)
        self.cos, self.sin = torch.cat(cos), torch.cat(sin)
