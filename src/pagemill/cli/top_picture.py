"""What `pagemill top` knows of a server: the last picture of `/v1/kv_map`, and speeds from successive ones."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pagemill.engine.kv_map import KVTable
from pagemill.engine.stats import EngineStats
from pagemill.errors import RemoteServerError

WINDOW_S = 3.0
"""Speeds are those of so many seconds."""


class Tier(NamedTuple):
    """The frames of one tier, `frames_per_cell` to a row of `cells`."""

    name: str
    num_frames: int
    frames_per_cell: int
    cells: npt.NDArray[np.uint16]


class Moment(NamedTuple):
    at_s: float
    stats: EngineStats
    first_tokens: int
    first_token_s: float


class Picture:
    """Takes the stream's events in, the first of which is whole. Raises `RemoteServerError` for what it cannot read."""

    def __init__(self) -> None:
        self.columns: list[str] = []
        self.tiers: list[Tier] = []
        self.tables: list[KVTable] = []
        self.num_tables = 0
        self.block_size = 0
        self._moments: tuple[Moment, ...] = ()

    @property
    def stats(self) -> EngineStats:
        return self._moments[-1].stats

    def apply(self, event: Mapping[str, Any], at_s: float) -> None:
        """Takes in what has changed. at_s: when it came, by any clock."""
        try:
            self.columns = event.get("columns", self.columns)
            self.block_size = event.get("block_size", self.block_size)
            self.num_tables = event.get("num_tables", self.num_tables)
            before = {tier.name: tier for tier in self.tiers}
            if "tiers" in event:
                self.tiers = [_tier(one, before.get(one["name"]), len(self.columns)) for one in event["tiers"]]
            if "tables" in event:
                self.tables = msgspec.convert(event["tables"], list[KVTable])
            first = event["first_token"]
            moment = Moment(
                at_s, msgspec.convert(event["stats"], EngineStats), int(first["requests"]), float(first["seconds"])
            )
        except (msgspec.ValidationError, LookupError, TypeError, ValueError) as error:
            raise RemoteServerError(
                f"the server's block map cannot be read ({error}); it is another version of pagemill than this one"
            ) from error
        earlier = self._moments
        if earlier and moment.stats.steps < earlier[-1].stats.steps:
            earlier = ()  # another engine counts from 0
        late = [one for one in earlier[1:] if at_s - one.at_s >= WINDOW_S]
        self._moments = (*earlier[len(late) :], moment)

    def per_second(self, *counters: str) -> float:
        """Returns how fast counters grow together."""
        first, last = self._moments[0], self._moments[-1]
        grown = sum(getattr(last.stats, name) - getattr(first.stats, name) for name in counters)
        return float(grown) / max(last.at_s - first.at_s, 1e-9) if last is not first else 0.0

    @property
    def time_per_token_s(self) -> float | None:
        """Seconds per token of a sequence that generates; None while none does."""
        first, last = self._moments[0], self._moments[-1]
        tokens = last.stats.generated_tokens - first.stats.generated_tokens
        running = (first.stats.running + last.stats.running) / 2
        return (last.at_s - first.at_s) * running / tokens if tokens and running else None

    @property
    def first_token_s(self) -> float | None:
        """Mean seconds to the first token of requests that had theirs now, or else ever; None for none."""
        first, last = self._moments[0], self._moments[-1]
        if (count := last.first_tokens - first.first_tokens) > 0:
            return (last.first_token_s - first.first_token_s) / count
        return last.first_token_s / last.first_tokens if last.first_tokens else None


def _tier(news: Mapping[str, Any], before: Tier | None, columns: int) -> Tier:
    """Returns a tier: whole, or an earlier one with those rows that have changed."""
    cells = np.frombuffer(base64.b64decode(news["cells"]), "<u2").reshape(-1, columns)
    if "changed" in news:
        if before is None:
            raise ValueError("changes of a tier that never came whole")
        changed = np.frombuffer(base64.b64decode(news["changed"]), "<u2")
        rows, cells = cells, before.cells.copy()
        cells[changed] = rows
    return Tier(news["name"], news["num_frames"], news["frames_per_cell"], cells)
