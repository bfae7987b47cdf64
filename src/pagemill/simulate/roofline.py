"""Models step times and KV memory of a model on a device that need not be here: a roofline with stated efficiencies.

Devices and model shapes are data: `devices.json` and `shapes.json` beside this file, where each figure has its source.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pagemill.errors import CalibrationError, ConfigError, shown
from pagemill.simulate.step_time import KVShape, StepWork

DEVICES = Path(__file__).with_name("devices.json")
SHAPES = Path(__file__).with_name("shapes.json")
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1}
"""Bytes of a weight. K/V and attention are in bfloat16 where weights are smaller."""

Described = TypeVar("Described")
EFFICIENCIES = ("memory", "kv", "products", "attention", "link", "peers")
ACTIVATION_BYTES = 2
"""Bytes of a number that ranks exchange."""


@dataclass(frozen=True)
class DeviceModel:
    """Describes what bounds a step. Rates are peaks; multiplied by their efficiency, they are what a step gets.

    flop_per_s:       by dtype.
    link_bytes_per_s: between device and host memory, one direction; None where both are the same memory.
    peer_bytes_per_s: from one device to the others of a machine, one direction; None where none can work as one.
    efficiency:       the share of each peak that is reached: "memory" (of weights), "kv" (of keys and values),
                      "products", "attention" (of prompts), "link", "peers".
    kv_formats:       the share of the "kv" efficiency that attention over a KV format reaches, by its name; all of it
                      where not named.
    overlap:          how reading weights and multiplying with them, of a and b seconds, run beside each other: together
                      they take (a^overlap + b^overlap)^(1 / overlap). 1: one after the other; None: the longer one.
    step_s, row_s:    seconds that each step takes whatever is in it, and that each of its rows adds.
    new_row_s:        seconds that taking a request in adds to its first step.
    peers:            the most devices of one machine. all_reduce_s: seconds of a collective beside its bytes.
    price_per_hour:   US dollars for one device; None: nobody has said.
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
    overlap: float | None = None
    peer_bytes_per_s: float | None = None
    peers: int = 1
    all_reduce_s: float = 0.0
    price_per_hour: float | None = None
    new_row_s: float = 0.0
    kv_formats: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if set(self.efficiency) != set(EFFICIENCIES):
            raise ValueError(f"efficiency has {sorted(self.efficiency)}; it must have {sorted(EFFICIENCIES)}")
        if unknown := set(self.flop_per_s) - set(ITEMSIZE):
            raise ValueError(f"flop_per_s has {sorted(unknown)}; its dtypes are {sorted(ITEMSIZE)}")
        if not self.flop_per_s:
            raise ValueError(f"flop_per_s is empty; give the rate of one dtype or more: {', '.join(ITEMSIZE)}")
        rates = {f"flop_per_s of {dtype}": rate for dtype, rate in self.flop_per_s.items()}
        rates |= {f"efficiency of {name}": share for name, share in self.efficiency.items()}
        rates |= {f"kv_formats of {name}": share for name, share in self.kv_formats.items()}
        rates |= {name: getattr(self, name) for name in ("memory_bytes", "bytes_per_s")}
        for name in ("link_bytes_per_s", "peer_bytes_per_s"):
            if (rate := getattr(self, name)) is not None:
                rates[name] = rate
        for name, rate in rates.items():
            _check(name, rate, 0 < rate < math.inf, "above 0")
        _check("memory_share", self.memory_share, 0 < self.memory_share <= 1, "above 0 and at most 1")
        for name in ("step_s", "row_s", "new_row_s", "working_bytes", "all_reduce_s"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "0 or more")
        _check("peers", self.peers, self.peers >= 1, "1 or more")
        if self.price_per_hour is not None:
            _check("price_per_hour", self.price_per_hour, 0 <= self.price_per_hour < math.inf, "0 or more, or null")
        if self.overlap is not None:
            _check("overlap", self.overlap, 1 <= self.overlap < math.inf, "1 or more, or null for the longer of two")


@dataclass(frozen=True)
class ModelShape:
    """Describes a decoder's sizes. Biases and norms are too small to count.

    gated:     True for three products in an MLP, False for two.
    tied:      True if the head and the embedding are the same weights.
    positions: rows of learned position embeddings; 0 without any.
    windows:   by layer, the sliding window in tokens, None for full attention; None where all layers have that.
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
    windows: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads", "head_dim", "hidden", "intermediate", "vocabulary"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        _check("positions", self.positions, self.positions >= 0, "0 or more")
        _check("kv_heads", self.kv_heads, self.heads % self.kv_heads == 0, f"a divisor of heads, {self.heads}")
        if self.windows is not None:
            right = len(self.windows) == self.layers and all(size is None or size >= 1 for size in self.windows)
            _check("windows", self.windows, right, "null, or for each layer null or 1 or more tokens")

    @property
    def layer_weights(self) -> int:
        """Returns how many weights each token is multiplied with, in all layers."""
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
    at the memory's rate, and its FLOP at the products' rate, as far as the two do not overlap. Attention takes the
    bytes of the keys and values that each row attends, plus the FLOP of its (query, key) pairs: rows that generate are
    bound by the one, prompts by the other, and they are computed one after the other.

    kv_dtype: as `kv_cache_dtype`; "auto": as the weights, and 16 bits where these are smaller.
    ranks:    devices that work as one (`tensor_parallel_size`). Each holds and computes its part of the heads, of the
              MLPs, of the head and of the K/V. A layer takes two all-reduces of all tokens' activations, as a ring:
              each rank sends 2 (ranks - 1) / ranks of the bytes (Shoeybi et al., "Megatron-LM", 2019, section 3). The
              logits are gathered. Nothing of that overlaps with computing.

    Raises ConfigError for what the device or the model cannot do.
    """

    device: DeviceModel
    model: ModelShape
    dtype: str
    kv_dtype: str = "auto"
    ranks: int = 1

    def __post_init__(self) -> None:
        rates = self.device.flop_per_s
        if self.dtype not in rates:
            raise ConfigError(f"{self.device.about} has no rate for {self.dtype}; choose one of {', '.join(rates)}")
        if self._attends_in not in rates:
            raise ConfigError(
                f"{self.device.about} has no rate for {self._attends_in}, in which attention is computed where weights "
                f"are in {self.dtype}; give one, or choose a wider dtype"
            )
        if not 1 <= self.ranks <= self.device.peers or (self.ranks > 1 and self.device.peer_bytes_per_s is None):
            raise ConfigError(
                f"tensor_parallel_size is {self.ranks}; {self.device.about} works as one with up to "
                f"{self.device.peers}; choose fewer"
            )
        if uneven := [count for count in (self.model.heads, self.model.intermediate) if count % self.ranks]:
            raise ConfigError(
                f"tensor_parallel_size is {self.ranks}, which does not divide {uneven[0]} of {self.model.about}'s "
                f"heads or MLP; choose one that divides {self.model.heads} and {self.model.intermediate}"
            )
        if self.kv_heads * self.ranks != self.model.kv_heads and self.ranks % self.model.kv_heads:
            raise ConfigError(
                f"tensor_parallel_size is {self.ranks} and {self.model.about} has {self.model.kv_heads} KV heads; one "
                "must divide the other"
            )

    @property
    def _attends_in(self) -> str:
        return self.dtype if ITEMSIZE[self.dtype] > 1 else "bfloat16"

    @property
    def kv_heads(self) -> int:
        """Returns the KV heads of one rank; where there are more ranks than heads, some hold the same."""
        return max(1, self.model.kv_heads // self.ranks)

    @cached_property
    def shape(self) -> KVShape:
        """Returns the shape of K/V on one rank."""
        model, itemsize = self.model, max(2, ITEMSIZE[self.dtype])
        named = None if self.kv_dtype == "auto" else self.kv_dtype
        windows = (None,) * model.layers if model.windows is None else tuple(model.windows)
        return KVShape(windows, self.kv_heads, model.head_dim, itemsize, named)

    @property
    def description(self) -> str:
        ranks = "" if self.ranks == 1 else f"{self.ranks} x "
        kv = "" if self.kv_dtype == "auto" else f", K/V in {self.kv_dtype}"
        return f"*modelled* by a roofline: {self.model.about} in {self.dtype}{kv} on {ranks}{self.device.about}"

    @property
    def about(self) -> dict[str, Any]:
        return {
            "modelled": True,
            "model": self.model.about,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "tensor_parallel_size": self.ranks,
            "device": self.device.about,
            "efficiency": self.device.efficiency,
            "kv_formats": self.device.kv_formats,
            "sources": {**self.device.sources, "model": self.model.source},
        }

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of the weights of one rank."""
        return -(-self.model.parameters * ITEMSIZE[self.dtype] // self.ranks)

    @property
    def kv_bytes(self) -> int:
        """Returns the bytes of one rank's KV pool. Raises ConfigError if the weights leave none."""
        device = self.device
        used = int(device.memory_share * device.memory_bytes)
        left = used - self.weight_bytes - device.working_bytes
        if left <= 0:
            each = "" if self.ranks == 1 else f" on each of {self.ranks}"
            raise ConfigError(
                f"{self.model.about} in {self.dtype} has {self.weight_bytes / 1e9:.1f} GB of weights{each}; "
                f"{device.about} leaves {(used - device.working_bytes) / 1e9:.1f} GB for weights and K/V; choose a "
                "smaller dtype, a larger device or more of them"
            )
        return left

    @cached_property
    def _costs(self) -> _Costs:
        device, model, share, ranks = self.device, self.model, self.device.efficiency, self.ranks
        byte_s = 1 / (share["memory"] * device.bytes_per_s * ranks)
        flop_s = 1 / (share["products"] * device.flop_per_s[self.dtype] * ranks)
        attention_flop_s = 1 / (share["attention"] * device.flop_per_s[self._attends_in] * ranks)
        kv_bytes_per_s = share["kv"] * device.kv_formats.get(self.shape.format_name, 1.0) * device.bytes_per_s
        sent_s = 0.0
        if device.peer_bytes_per_s is not None:
            sent_s = (ranks - 1) / ranks * ACTIVATION_BYTES / (share["peers"] * device.peer_bytes_per_s)
        return _Costs(
            step_s=device.step_s + (2 * model.layers + 1) * device.all_reduce_s * (ranks > 1),
            layers_s=model.layer_weights * ITEMSIZE[self.dtype] * byte_s,
            token_s=2 * model.layer_weights * flop_s,
            head_s=model.head_weights * ITEMSIZE[self.dtype] * byte_s,
            logits_s=2 * model.head_weights * flop_s,
            key_s=self.shape.key_bytes / kv_bytes_per_s,
            pair_s=4 * model.heads * model.head_dim * attention_flop_s,
            sent_token_s=2 * model.layers * 2 * model.hidden * sent_s,
            sent_logits_s=model.vocabulary * sent_s,
        )

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds that a step with this work takes."""
        cost = self._costs
        total = cost.step_s + self.device.row_s * work.rows + self.device.new_row_s * work.new_rows
        if work.tokens:
            total += self._together(cost.layers_s, cost.token_s * work.tokens) + cost.sent_token_s * work.tokens
        if work.logits:
            total += self._together(cost.head_s, cost.logits_s * work.logits) + cost.sent_logits_s * work.logits
        return total + cost.key_s * work.keys + cost.pair_s * work.pairs

    def _together(self, read_s: float, multiply_s: float) -> float:
        """Returns the seconds of reading weights and multiplying with them."""
        longer, shorter, overlap = max(read_s, multiply_s), min(read_s, multiply_s), self.device.overlap
        return longer if overlap is None else longer * (1 + (shorter / longer) ** overlap) ** (1 / overlap)


@dataclass(frozen=True)
class _Costs:
    """Holds seconds: of a step; of reading the layers' weights and the head's; of one token, row of logits, key and
    pair; of exchanging one token's activations, and one row of logits."""

    step_s: float
    layers_s: float
    token_s: float
    head_s: float
    logits_s: float
    key_s: float
    pair_s: float
    sent_token_s: float
    sent_logits_s: float


def read_device(name: str) -> DeviceModel:
    """Returns the device of this name in `devices.json`, or the only one in a .json file of the same form.

    Raises ConfigError for an unknown name, CalibrationError for a file that cannot be read as a device.
    """
    return _read(DeviceModel, DEVICES, name, "device")


def read_shape(name: str) -> ModelShape:
    """Returns the model shape of this name in `shapes.json`, or the only one in a .json file of the same form.

    Raises ConfigError for an unknown name, CalibrationError for a file that cannot be read as a shape.
    """
    return _read(ModelShape, SHAPES, name, "shape")


def names_in(path: Path) -> list[str]:
    """Returns the names of what one of these files describes."""
    return [*json.loads(path.read_text())]


def _check(name: str, value: object, right: bool, must: str) -> None:
    if not right:
        raise ValueError(f"{name} is {value!r}; it must be {must}")


def whole_where_possible(text: str) -> int | float:
    """Returns a number such as 80e9 as an integer where it is whole, so that fields of integers take it."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _read(kind: type[Described], known: Path, name: str, what: str) -> Described:
    own = name.endswith(".json")
    path = Path(name) if own else known
    try:
        found = json.loads(path.read_text(), parse_float=whole_where_possible)
        if not isinstance(found, dict):
            raise ValueError(f"it is {shown(found)}; it must be an object with one entry, the {what} by its name")
        if own and len(found) != 1:
            raise ValueError(f"it has {len(found)} entries; it must have one")
        if own or name in found:
            entry = next(iter(found.values())) if own else found[name]
            if not isinstance(entry, dict):
                raise ValueError(f"its entry is {shown(entry)}; it must be an object of the {what}'s fields")
            names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
            if unknown := sorted(set(entry) - set(names)):
                raise ValueError(f"it has {', '.join(unknown)}, which mean nothing; its fields are {', '.join(names)}")
            return msgspec.convert(entry, kind)
    except (OSError, ValueError, TypeError) as error:
        raise CalibrationError(f"{path} cannot be read as a {what}: {error}") from error
    raise ConfigError(f"there is no {what} {name!r}; choose one of {', '.join(found)}, or give a .json file")
