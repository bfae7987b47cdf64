"""Models how long a step takes: a sum of costs of the work in it, fitted to steps that a real engine ran."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import CalibrationError
from pagemill.kvcache.kv_format import KVFormat, VectorFormat, kv_format
from pagemill.kvcache.layer_groups import LayerGroups, add_remainders, group_layers
from pagemill.kvcache.layout import FrameShape, layer_major
from pagemill.scheduling.step_plan import StepPlan


@dataclass(frozen=True)
class KVShape:
    """Holds what the bytes of K/V and the work of attending depend on.

    windows:  by layer, None for full attention.
    itemsize: bytes of an element, where no `format` is named. format: as `kv_cache_dtype`.
    """

    windows: tuple[int | None, ...]
    num_kv_heads: int
    head_dim: int
    itemsize: int
    format: str | None = None

    @property
    def groups(self) -> LayerGroups:
        groups, precise = group_layers(self.windows), self._format.precise
        return add_remainders(groups, precise) if precise else groups

    @property
    def _format(self) -> KVFormat:
        if self.format is not None:
            return kv_format(self.format)
        vector = VectorFormat("", "")
        return KVFormat("", vector, vector, self.itemsize)

    @property
    def format_name(self) -> str:
        """Returns the name of the format; empty for elements of `itemsize`."""
        return self._format.name

    @property
    def key_bytes(self) -> int:
        """Returns the bytes of one token's K and V in one layer, scales included."""
        return self._format.slot_bytes(self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def slot_bytes(self) -> float:
        """Returns the bytes of one token's K and V in one layer group, without padding; the mean where groups
        differ."""
        groups = self.groups.groups
        layers = sum(len(group.layers) for group in groups) / len(groups)
        return layers * self.key_bytes

    def frame_bytes(self, block_size: int) -> int:
        """Returns the bytes of a frame as it lies in the pool on CPU, padding included."""
        groups, dim = self.groups, self.head_dim
        shape = FrameShape(groups, self.num_kv_heads, block_size, dim, dim, self._format)
        return layer_major(shape, 1).frame_bytes


class StepWork(NamedTuple):
    """Counts what a step computes.

    logits: rows whose logits are needed.
    pairs:  (query token, key) pairs, summed over layers.
    keys:   keys that rows attend, each once per row, summed over layers.
    new_rows: rows of requests that were taken in since the last step.
    """

    rows: int
    tokens: int
    logits: int
    pairs: int
    keys: int
    new_rows: int = 0

    def join(self, other: StepWork) -> StepWork:
        """Returns the work of both, as of one step."""
        return StepWork(*(one + another for one, another in zip(self, other, strict=True)))


def work_of(plan: StepPlan, groups: LayerGroups) -> StepWork:
    """Returns the work in a plan, for a model of these layer groups."""
    starts, lens = plan.starts.astype(np.int64), plan.query_lens.astype(np.int64)
    ends = starts + lens
    pairs = keys = 0
    for group in groups.groups:
        layers = len(group.layers)
        if group.window is None:
            pairs += layers * int((lens * (starts + ends + 1) // 2).sum())
            keys += layers * int(ends.sum())
        else:
            # Query tokens before position `window` see all keys, later ones a window of them.
            early = np.clip(group.window - starts, 0, lens)
            seen = early * (2 * starts + early + 1) // 2 + (lens - early) * group.window
            pairs += layers * int(seen.sum())
            keys += layers * int(np.minimum(ends, lens + group.window - 1).sum())
    logits = len(np.unique(plan.sample_from))
    return StepWork(len(plan.rows), plan.num_tokens, logits, pairs, keys, len(plan.new_rows))


class StepModel(Protocol):
    """Gives the seconds of a step, for a model whose K/V have this shape.

    about:       what the seconds come from, for files. description: the same in one line, for people.
    """

    @property
    def shape(self) -> KVShape: ...

    @property
    def about(self) -> dict[str, Any]: ...

    @property
    def description(self) -> str: ...

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds that a step with this work takes."""


KNEES = (8, 32, 128)
"""Numbers of tokens at which the cost of one more changes: weights' bytes bound small steps, products large ones."""
COSTS = ("step", "row", *(f"token to {knee}" for knee in KNEES), "token beyond", "logits", "pair", "key")


def _amounts(works: Sequence[StepWork]) -> NDArray[np.float64]:
    """Returns how much of each cost there is in each step, [steps, COSTS]."""
    rows, tokens, logits, pairs, keys, _ = np.array(works, dtype=np.float64).reshape(-1, 6).T
    knees = (0, *KNEES, np.inf)
    pieces = [np.clip(tokens, low, high) - low for low, high in pairwise(knees)]
    return np.stack([np.ones_like(rows), rows, *pieces, logits, pairs, keys], axis=1)


@dataclass(frozen=True)
class StepTimes:
    """Gives the seconds of a step, and says what they were fitted to.

    seconds_of: by name in COSTS, the seconds that one of it takes.
    about:      the machine, the model and its precision, how well the fit holds; for people.
    """

    seconds_of: dict[str, float]
    shape: KVShape
    about: dict[str, Any]

    def __post_init__(self) -> None:
        if set(self.seconds_of) != set(COSTS):
            raise CalibrationError(f"the calibration has costs {sorted(self.seconds_of)}; it must have {sorted(COSTS)}")

    @property
    def description(self) -> str:
        about = self.about
        return f"{about['model']} in {about['dtype']} on {about['cpu']}, {about['cores']} cores"

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds that a step with this work takes."""
        cost = self.seconds_of
        total = cost["step"] + cost["row"] * work.rows + cost["logits"] * work.logits
        total += cost["pair"] * work.pairs + cost["key"] * work.keys
        low = 0
        for knee in KNEES:
            if work.tokens <= low:
                return total
            total += cost[f"token to {knee}"] * (min(work.tokens, knee) - low)
            low = knee
        return total + cost["token beyond"] * max(0, work.tokens - low)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> StepTimes:
        """Reads a calibration. Raises CalibrationError for a file that is missing or is none."""
        try:
            found = json.loads(path.read_text())
            shape = KVShape(**{**found["shape"], "windows": tuple(found["shape"]["windows"])})
            return cls(found["seconds_of"], shape, found["about"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CalibrationError(
                f"{path} cannot be read as a calibration: {type(error).__name__}: {error}; make one with "
                "python -m benchmarks.replay calibrate"
            ) from error


def fit(works: Sequence[StepWork], seconds: Sequence[float]) -> dict[str, float]:
    """Returns the costs, none below 0, with the least sum of squared relative errors over these steps.

    Raises CalibrationError if there are fewer steps than costs.
    """
    if len(works) < len(COSTS):
        raise CalibrationError(f"{len(works)} steps cannot fix {len(COSTS)} costs; measure more steps")
    measured = np.array(seconds, dtype=np.float64)
    relative = _amounts(works) / measured[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-30)
    costs = least_nonnegative(relative / scale, np.ones(len(measured))) / scale
    return dict(zip(COSTS, costs.tolist(), strict=True))


def least_nonnegative(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns x >= 0 with the least |a x - b| (Lawson and Hanson, "Solving Least Squares Problems", 1974, ch. 23)."""
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], dtype=bool)
    tolerance = 1e-10 * len(b)
    while True:
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        if gradient.max() <= tolerance:
            return x
        free[gradient.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if wanted[free].min() > 0:
                x = wanted
                break
            falling = free & (wanted <= 0)
            step = (x[falling] / (x[falling] - wanted[falling])).min()
            x = x + step * (wanted - x)
            free &= x > 1e-15
            x[~free] = 0.0
