"""Applies `hf_overrides`: settings that replace those of a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill.errors import UnknownArgumentError

_LEGACY = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")


def apply_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with `overrides` on top.

    rope_theta and rope_scaling, the names of older configurations, reach into `rope_parameters` where that exists, so
    that they have their effect whichever form the checkpoint uses.
    """
    merged = dict(config)
    for key, value in overrides.items():
        parameters = merged.get("rope_parameters")
        if key not in ("rope_theta", "rope_scaling") or not isinstance(parameters, dict):
            merged[key] = value
            continue
        kinds = [kind for kind in ("full_attention",) if isinstance(parameters.get(kind), dict)]
        flat = parameters[kinds[0]] if kinds else parameters
        if key == "rope_theta":
            flat = {**flat, "rope_theta": value}
        else:
            scaling = dict(value or {})
            scaling["rope_type"] = scaling.pop("type", None) or scaling.get("rope_type", "default")
            flat = {"rope_theta": flat.get("rope_theta"), "partial_rotary_factor": flat.get("partial_rotary_factor")}
            flat = {name: given for name, given in flat.items() if given is not None} | scaling
        merged["rope_parameters"] = {**parameters, kinds[0]: flat} if kinds else flat
    return merged


def check_overrides(overrides: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises UnknownArgumentError for a key that the configuration does not have: it would be ignored."""
    for key in overrides:
        if key not in known and key not in _LEGACY:
            raise UnknownArgumentError.of("hf_overrides", key, [*known, *_LEGACY])
