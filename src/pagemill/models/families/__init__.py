"""Lists the tested model families by transformers' `model_type`, and refuses all others by name."""

from __future__ import annotations

from pagemill.errors import UnsupportedModelError
from pagemill.models.families import deepseek, gemma, llama, qwen
from pagemill.models.families.base import Family, ModelConfig

FAMILIES: dict[str, Family] = dict(
    sorted({**deepseek.FAMILIES, **gemma.FAMILIES, **llama.FAMILIES, **qwen.FAMILIES}.items())
)

__all__ = ["FAMILIES", "Family", "ModelConfig", "find_family"]


def find_family(model_type: str, architectures: list[str] | None) -> Family:
    """Returns the family of a model type.

    Raises UnsupportedModelError, which lists the supported ones, for another family or another head (a classifier).
    """
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}", param="model_type"
        )
    if architectures and family.architecture not in architectures:
        raise UnsupportedModelError(
            f"architecture {', '.join(architectures)} is not supported; of model type {model_type!r}, "
            f"{family.architecture} is",
            param="architectures",
        )
    return family
