"""Models step times and KV memory of a model on a device that need not be here: a roofline with stated efficiencies.

Devices and model shapes are data: `devices.json` and `shapes.json` beside this file, where each figure has its source.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pagemill.errors import CalibrationError, ConfigError
from pagemill.simulate.step_time import KVShape, StepWork

DEVICES = Path(__file__).with_name("devices.json")
SHAPES = Path(__file__).with_name("shapes.json")
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1}
"""Bytes of a weight. K/V and attention are in bfloat16 where weights are smaller."""

Described = TypeVar("Described")
EFFICIENCIES = ("memory", "products", "attention", "link")


@dataclass(frozen=True)
class Device:
    """Describes what bounds a step. Rates are peaks; multiplied by their efficiency, they are what a step gets.

    flop_per_s:       by dtype.
    link_bytes_per_s: between device and host memory, one direction; None where both are the same memory.
    efficiency:       the share of each peak that is reached: "memory", "products", "attention" (of prompts), "link".
    step_s, row_s:    seconds that each step takes whatever is in it, and that each of its rows adds.
    memory_share:     the share of memory_bytes that the engine uses; working_bytes of it hold neither weights nor K/V.
    sources:          says where each figure comes from.
    """

    about: str
    memory_bytes: int
    bytes_per_s: float
    flop_per_s: dict[str, float]
    link_bytes_per_s: float | None
    efficiency: dict[str, float]
    step_s: float
    row_s: float
    memory_share: float
    working_bytes: int
    sources: dict[str, str]

    def __post_init__(self) -> None:
        if set(self.efficiency) != set(EFFICIENCIES):
            raise ValueError(f"efficiency has {sorted(self.efficiency)}; it must have {sorted(EFFICIENCIES)}")
        if unknown := set(self.flop_per_s) - set(ITEMSIZE):
            raise ValueError(f"flop_per_s has {sorted(unknown)}; its dtypes are {sorted(ITEMSIZE)}")
        rates = [self.memory_bytes, self.bytes_per_s, *self.flop_per_s.values(), *self.efficiency.values()]
        if min(rates) <= 0 or (self.link_bytes_per_s is not None and self.link_bytes_per_s <= 0):
            raise ValueError("memory, rates and efficiencies must be above 0")


@dataclass(frozen=True)
class ModelShape:
    """Describes a decoder's sizes. Biases and norms are too small to count.

    gated:     True for three products in an MLP, False for two.
    tied:      True if the head and the embedding are the same weights.
    positions: rows of learned position embeddings; 0 without any.
    """

    about: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    gated: bool
    vocabulary: int
    tied: bool
    positions: int
    source: str

    @property
    def layer_weights(self) -> int:
        """The weights that each token is multiplied with, in all layers."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + (2 + self.gated) * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        embeddings = self.hidden * ((not self.tied) * self.vocabulary + self.positions)
        return self.layer_weights + self.head_weights + embeddings


@dataclass(frozen=True)
class Roofline:
    """Gives the seconds of a step of this model on this device, and the bytes that are left for K/V.

    Williams et al., "Roofline", 2009, for each part of a step by itself: a product takes what its weights' bytes take
    at the memory's rate, or its FLOP at the products' rate, whichever is longer. Attention takes the bytes of the keys
    and values that each row attends, plus the FLOP of its (query, key) pairs: rows that generate are bound by the one,
    prompts by the other, and they are computed one after the other.
    """

    device: Device
    model: ModelShape
    dtype: str

    def __post_init__(self) -> None:
        rates = self.device.flop_per_s
        if self.dtype not in rates:
            raise ConfigError(f"{self.device.about} has no rate for {self.dtype}; choose one of {', '.join(rates)}")
        if self._attends_in not in rates:
            raise ConfigError(
                f"{self.device.about} has no rate for {self._attends_in}, in which attention is computed where weights "
                f"are in {self.dtype}; give one, or choose a wider dtype"
            )

    @property
    def _attends_in(self) -> str:
        return self.dtype if ITEMSIZE[self.dtype] > 1 else "bfloat16"

    @cached_property
    def shape(self) -> KVShape:
        """The shape of K/V."""
        model, itemsize = self.model, max(2, ITEMSIZE[self.dtype])
        return KVShape((None,) * model.layers, model.kv_heads, model.head_dim, itemsize)

    @property
    def description(self) -> str:
        return f"*modelled* by a roofline: {self.model.about} in {self.dtype} on {self.device.about}"

    @property
    def about(self) -> dict[str, Any]:
        return {
            "modelled": True,
            "model": self.model.about,
            "dtype": self.dtype,
            "device": self.device.about,
            "efficiency": self.device.efficiency,
            "sources": {**self.device.sources, "model": self.model.source},
        }

    @property
    def weight_bytes(self) -> int:
        return self.model.parameters * ITEMSIZE[self.dtype]

    @property
    def kv_bytes(self) -> int:
        """The bytes of the KV pool. Raises ConfigError if the weights leave none."""
        device = self.device
        used = int(device.memory_share * device.memory_bytes)
        left = used - self.weight_bytes - device.working_bytes
        if left <= 0:
            raise ConfigError(
                f"{self.model.about} in {self.dtype} has {self.weight_bytes / 1e9:.1f} GB of weights; {device.about} "
                f"leaves {(used - device.working_bytes) / 1e9:.1f} GB for weights and K/V; choose a smaller dtype or a "
                "larger device"
            )
        return left

    @cached_property
    def _costs(self) -> _Costs:
        device, model, share = self.device, self.model, self.device.efficiency
        byte_s = 1 / (share["memory"] * device.bytes_per_s)
        flop_s = 1 / (share["products"] * device.flop_per_s[self.dtype])
        attention_flop_s = 1 / (share["attention"] * device.flop_per_s[self._attends_in])
        return _Costs(
            layers_s=model.layer_weights * ITEMSIZE[self.dtype] * byte_s,
            token_s=2 * model.layer_weights * flop_s,
            head_s=model.head_weights * ITEMSIZE[self.dtype] * byte_s,
            logits_s=2 * model.head_weights * flop_s,
            key_s=2 * model.kv_heads * model.head_dim * self.shape.itemsize * byte_s,
            pair_s=4 * model.heads * model.head_dim * attention_flop_s,
        )

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds that a step with this work takes."""
        cost = self._costs
        total = self.device.step_s + self.device.row_s * work.rows
        if work.tokens:
            total += max(cost.layers_s, cost.token_s * work.tokens)
        if work.logits:
            total += max(cost.head_s, cost.logits_s * work.logits)
        return total + cost.key_s * work.keys + cost.pair_s * work.pairs


@dataclass(frozen=True)
class _Costs:
    """Holds seconds: of reading the layers' weights and the head's; of one token, row of logits, key and pair."""

    layers_s: float
    token_s: float
    head_s: float
    logits_s: float
    key_s: float
    pair_s: float


def read_device(name: str) -> Device:
    """Returns the device of this name in `devices.json`, or the only one in a .json file of the same form.

    Raises ConfigError for an unknown name, CalibrationError for a file that cannot be read as a device.
    """
    return _read(Device, DEVICES, name, "device")


def read_shape(name: str) -> ModelShape:
    """Returns the model shape of this name in `shapes.json`, or the only one in a .json file of the same form.

    Raises ConfigError for an unknown name, CalibrationError for a file that cannot be read as a shape.
    """
    return _read(ModelShape, SHAPES, name, "shape")


def _read(kind: Callable[..., Described], known: Path, name: str, what: str) -> Described:
    own = name.endswith(".json")
    path = Path(name) if own else known
    try:
        found = json.loads(path.read_text())
        if own and len(found) != 1:
            raise ValueError(f"it has {len(found)} entries; it must have one")
        if own or name in found:
            return kind(**(next(iter(found.values())) if own else found[name]))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{path} cannot be read as a {what}: {type(error).__name__}: {error}") from error
    raise ConfigError(f"there is no {what} {name!r}; choose one of {', '.join(found)}, or give a .json file")
