"""Changes: what was changed in all replicas, for those that come later to do too."""

from __future__ import annotations

import itertools
from typing import Any

from pagemill.engine.messages import EngineReady
from pagemill.engine.queries import LoadAdapter, Query, ResizePool, SetTenant


class Changes:
    """Keeps the last change of each thing, with a number that rises."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._kept: dict[tuple[type, object], tuple[int, Query[EngineReady]]] = {}

    @staticmethod
    def is_one(query: Query[Any]) -> bool:
        """Returns whether a query changes an engine so that others must be changed too."""
        return isinstance(query, (SetTenant, LoadAdapter, ResizePool))

    def remember(self, query: Query[Any]) -> None:
        """Keeps a change in the place of an earlier one of the same thing; other queries are ignored."""
        match query:
            case SetTenant():
                self._kept[SetTenant, query.name] = next(self._numbers), query
            case LoadAdapter():
                self._kept[LoadAdapter, query.lora.lora_int_id] = next(self._numbers), query
            case ResizePool() if query.kv_memory != "used":
                self._kept[ResizePool, None] = next(self._numbers), query

    def next(self, done: int) -> tuple[int, Query[EngineReady]] | None:
        """Returns the first change behind number `done`, with its number; None if there is none."""
        return min((each for each in self._kept.values() if each[0] > done), key=lambda each: each[0], default=None)
