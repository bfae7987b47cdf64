"""Finds the sizes of a model: by the name of a known shape, or from a model's own configuration, without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagemill.errors import ConfigError, ModelNotFoundError
from pagemill.simulate.roofline import SHAPES, ModelShape, names_in, read_shape

if TYPE_CHECKING:
    from pagemill.models.spec import DecoderSpec


def find_shape(name: str) -> ModelShape:
    """Returns the shape of this name in `shapes.json` or in a .json file of the same form; else that of a model.

    Raises ModelNotFoundError where there is neither, and as a model that cannot be loaded does.
    """
    if name in names_in(SHAPES) or name.endswith(".json"):
        return read_shape(name)
    from pagemill.hub import resolve_config
    from pagemill.models.families import ModelConfig, find_family
    from pagemill.models.loading.load import read_config

    try:
        path = resolve_config(name)
    except ModelNotFoundError as error:
        known = ", ".join(names_in(SHAPES))
        raise ModelNotFoundError(f"{error.message}; shapes known without a model: {known}", param="model") from None
    config = read_config(path)
    family = find_family(config["model_type"], config.get("architectures"))
    return shape_of(family.describe(ModelConfig(config), None), name)


def shape_of(spec: DecoderSpec, name: str) -> ModelShape:
    """Returns a decoder's shape. Raises ConfigError for a mixture of experts, which is not modelled."""
    if spec.moe is not None:
        raise ConfigError(
            f"{name} is a mixture of experts, whose steps are not modelled: which weights a step reads depends on its "
            "tokens; choose a dense model"
        )
    windows = [layer.window for layer in spec.layers]
    return ModelShape(
        about=name,
        layers=len(spec.layers),
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden=spec.hidden_size,
        intermediate=spec.intermediate_size,
        gated=True,
        vocabulary=spec.vocab_size,
        tied=spec.tied_embeddings,
        positions=0,
        source=f"the configuration of {name}",
        windows=windows if any(windows) else None,
    )
