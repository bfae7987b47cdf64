"""The tested model families, by transformers' `model_type`. Anything else is refused by name."""

from __future__ import annotations

from pagemill.errors import UnsupportedModelError
from pagemill.models.families.base import Family, ModelConfig
from pagemill.models.families.gemma import GEMMA2, GEMMA3
from pagemill.models.families.llama import LLAMA, MISTRAL
from pagemill.models.families.mixtral import MIXTRAL
from pagemill.models.families.phi3 import PHI3
from pagemill.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from pagemill.models.families.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "smollm3": SMOLLM3,
}

__all__ = ["FAMILIES", "Family", "ModelConfig", "find_family"]


def find_family(model_type: str, architectures: list[str] | None) -> Family:
    """Raises UnsupportedModelError, listing what is supported, for another family or another head (a classifier)."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}", param="model_type"
        )
    if architectures and family.architecture not in architectures:
        raise UnsupportedModelError(
            f"architecture {', '.join(map(str, architectures))} is not supported; of model type {model_type!r}, "
            f"{family.architecture} is",
            param="architectures",
        )
    return family
