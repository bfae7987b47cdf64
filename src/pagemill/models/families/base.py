"""Holds what families share: typed access to a configuration, and the parts of `DecoderSpec` that all fill in alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagemill.errors import ConfigError, ModelConfigError, UnsupportedModelError
from pagemill.models.names import HUGGING_FACE, WeightNames
from pagemill.models.rope import resolve_rope, scaled_max_position
from pagemill.models.spec import Activation, DecoderSpec, LayerSpec, RopeSpec

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


_LARGEST = 2**24
"""The largest size or number of positions: ten times what models have, and tables of it still fit into memory."""


class ModelConfig:
    """Looks up values, by type, in a normalised configuration: one with all of transformers' defaults filled in.

    Every look-up raises ModelConfigError, naming the key and what it holds, if the value is missing or of a wrong type.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def integer(self, key: str, maximum: int = _LARGEST) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
            raise self._wrong(key, f"be an integer from 1 to {maximum}")
        return value

    def layer_count(self) -> int:
        return self.integer("num_hidden_layers", maximum=10_000)

    def number(self, key: str) -> float:
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self._wrong(key, "be a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "be true or false")
        return bool(value)

    def sequence(self, key: str, length: int) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list | tuple) or len(value) < length:
            raise self._wrong(key, f"list one value for each of {length} layers")
        return list(value[:length])

    def refuse(self, key: str, *supported: Any) -> None:
        """Refuses the model unless `key` is absent, None, or one of `supported`."""
        value = self.get(key)
        if value is not None and value not in supported:
            shown = " or ".join(map(repr, supported)) or "nothing"
            raise UnsupportedModelError(
                f"{key} is {value!r}; this model family is supported with {shown} only", param=key
            )

    def _wrong(self, key: str, demand: str) -> ModelConfigError:
        return ModelConfigError(f"{key} is {self.get(key)!r} in the model's configuration; it must {demand}", param=key)


@dataclass(frozen=True)
class Family:
    """Says how one family's configuration becomes a spec, and what its weights are called.

    architecture: the transformers class that its checkpoints name.
    describe:     takes the configuration and max_model_len, or None for the longest, and returns the spec.
    """

    architecture: str
    describe: Callable[[ModelConfig, int | None], DecoderSpec]
    names: WeightNames = HUGGING_FACE


def layers_by_type(config: ModelConfig) -> list[LayerSpec]:
    """Returns layers whose windows follow `layer_types` (`full_attention`, `sliding_attention`)."""
    layers = []
    for kind in config.sequence("layer_types", config.layer_count()):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"layer type {kind!r} is not supported; supported are full_attention and sliding_attention",
                param="layer_types",
            )
        layers.append(LayerSpec(config.integer("sliding_window") if kind == "sliding_attention" else None))
    return layers


def equal_layers(config: ModelConfig) -> list[LayerSpec]:
    """Returns layers that all have `sliding_window` as their window, or none."""
    config.refuse("layer_types")
    window = None if config.get("sliding_window") is None else config.integer("sliding_window")
    return [LayerSpec(window)] * config.layer_count()


def attention_bias(config: ModelConfig) -> dict[str, Any]:
    """Returns the features of a family in which one flag gives all four projections of attention a bias."""
    return dict.fromkeys(("qkv_bias", "o_bias"), config.flag("attention_bias"))


def head_dim_of(config: ModelConfig) -> int:
    if config.get("head_dim") is not None:
        return config.integer("head_dim")
    return config.integer("hidden_size") // config.integer("num_attention_heads")


def check_model_len(max_model_len: int | None, max_position: int) -> int:
    """Returns the context length to prepare for. Raises ConfigError if it is longer than the model declares."""
    if max_model_len is not None and max_model_len > max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}, over the {max_position} positions that the model declares; lower it, "
            f"or give hf_overrides a larger max_position_embeddings or a rope_scaling if the model was made for that",
            param="max_model_len",
        )
    return max_model_len or max_position


class Positions(NamedTuple):
    """Holds the rotary embeddings that layers refer to by index, and the longest context that is declared."""

    ropes: tuple[RopeSpec, ...]
    max_position: int


def _one_rope(config: ModelConfig, max_model_len: int | None, partial: bool) -> Positions:
    """Returns the positions of a model that has one rotary embedding for all layers."""
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        raise ModelConfigError(
            f"rope_parameters is {parameters!r}; it must be a table of parameters", param="rope_parameters"
        )
    declared = config.integer("max_position_embeddings")
    max_position = scaled_max_position(parameters, declared)
    if max_position > _LARGEST:
        raise ModelConfigError(
            f"rope_parameters scale {declared} positions by {parameters['factor']}, to more than {_LARGEST}; give "
            f"hf_overrides a smaller factor",
            param="rope_parameters",
        )
    length = check_model_len(max_model_len, max_position)
    rope = resolve_rope(parameters, head_dim_of(config), max_position=declared, max_model_len=length, partial=partial)
    return Positions((rope,), max_position)


def describe_decoder(
    config: ModelConfig,
    max_model_len: int | None,
    layers: list[LayerSpec],
    *,
    positions: Positions | None = None,
    partial_rope: bool = False,
    activation_key: str = "hidden_act",
    scale: float | None = None,
    **features: Any,
) -> DecoderSpec:
    """Returns the spec with all common sizes.

    positions:    one rotary embedding for all layers by default.
    partial_rope: True if that one honours `partial_rotary_factor`.
    features:     the fields in which the family differs.
    """
    config.refuse("is_causal", True)
    positions = positions or _one_rope(config, max_model_len, partial_rope)
    activation = config.get(activation_key)
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{activation_key} is {activation!r}; supported are {', '.join(sorted(_ACTIVATIONS))}", param=activation_key
        )
    heads, kv_heads = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    if heads % kv_heads:
        raise ModelConfigError(
            f"num_attention_heads is {heads}, not a multiple of num_key_value_heads ({kv_heads})",
            param="num_key_value_heads",
        )
    head_dim = head_dim_of(config)
    return DecoderSpec(
        family=str(config.get("model_type")),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        layers=tuple(layers),
        ropes=positions.ropes,
        norm_eps=config.number("rms_norm_eps"),
        activation=_ACTIVATIONS[activation],
        scale=head_dim**-0.5 if scale is None else scale,
        max_position=positions.max_position,
        tied_embeddings=config.flag("tie_word_embeddings"),
        **features,
    )
