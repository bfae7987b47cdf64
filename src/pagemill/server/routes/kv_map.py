"""`/v1/kv_map`: the KV memory live, as server-sent events: the first whole, then what has changed.

Watching costs the engine a snapshot every now and then, shared by all who see the same, and nothing while nobody looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from pagemill.engine.kv_map import KVMap, KVTier, KVTreeNode
from pagemill.errors import PagemillError, ServerBusyError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.namespace import Namespace
from pagemill.server.protocol.errors import error_response
from pagemill.server.protocol.events import EventStream, event
from pagemill.server.routes.known_query import known_query
from pagemill.server.routes.metrics import Metrics

MAX_WATCHERS = 16
"""Streams that are open at once."""
MAX_WATCHERS_PER_TENANT = 4
PERIOD_S = 0.2
"""A snapshot that is younger is shared."""
TREE_PERIOD_S = 1.0
"""The same for the prefix tree, which costs most."""

View = Namespace | None
"""The namespace that looks; None for an admin."""


class Feed:
    """Takes snapshots for all who watch, at most one at a time and one per `PERIOD_S` for each view."""

    def __init__(self, llm: AsyncLLM, metrics: Metrics) -> None:
        self._llm = llm
        self._metrics = metrics
        self._watchers: Counter[View] = Counter()
        self._taken: dict[View, tuple[float, asyncio.Task[KVMap]]] = {}
        self._trees: dict[View, tuple[float, list[KVTreeNode] | None]] = {}
        self._closing = asyncio.Event()

    @property
    def num_watching(self) -> int:
        """Returns how many streams are open."""
        return self._watchers.total()

    def close(self) -> None:
        """Ends all streams."""
        self._closing.set()

    async def events(self, view: View, interval_s: float) -> AsyncGenerator[str, None]:
        """Returns a stream of events, which must be closed. Raises ServerBusyError, and what the engine raises."""
        self._check_room(view)
        events = self._events(view, interval_s)
        await anext(events)
        return events

    def _check_room(self, view: View) -> None:
        tenant = None if view is None else view.tenant
        watching = sum(count for each, count in self._watchers.items() if each is not None and each.tenant == tenant)
        if view is not None and watching >= MAX_WATCHERS_PER_TENANT:
            raise ServerBusyError(
                f"tenant {tenant!r} watches {watching} times, and {MAX_WATCHERS_PER_TENANT} are allowed; close another "
                f"page"
            )
        if (total := self.num_watching) >= MAX_WATCHERS:
            raise ServerBusyError(f"{total} streams of /v1/kv_map are open, and no more are allowed; try again later")

    async def _events(self, view: View, interval_s: float) -> AsyncGenerator[str, None]:
        self._watchers[view] += 1
        before: KVMap | None = None
        try:
            while not self._closing.is_set():
                try:
                    found = await self._snapshot(view)
                except PagemillError as error:
                    if before is None:
                        raise
                    yield event(error_response(error))
                    return
                if before is None:
                    yield ""  # for `events`
                yield f"data: {msgspec.json.encode(self._news(found, before)).decode()}\n\n"
                before = found
                await self._wait(interval_s)
        finally:
            self._watchers[view] -= 1
            if not self._watchers[view]:
                del self._watchers[view]
                if (taken := self._taken.pop(view, None)) is not None:
                    taken[1].cancel()
                self._trees.pop(view, None)

    async def _wait(self, seconds: float) -> None:
        """Waits so long, or until the streams are to end."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def _snapshot(self, view: View) -> KVMap:
        """Returns a snapshot that is at most `PERIOD_S` old. Whoever leaves while it is taken leaves it to others."""
        now = time.monotonic()
        taken_s, task = self._taken.get(view, (0.0, None))
        if task is None or (task.done() and now - taken_s >= PERIOD_S):
            task = asyncio.ensure_future(self._take(view, now))
            self._taken[view] = now, task
        return await asyncio.shield(task)

    async def _take(self, view: View, now: float) -> KVMap:
        """Takes a snapshot, with a prefix tree that may be older."""
        tree_s, tree = self._trees.get(view, (0.0, None))
        renews = tree is None or now - tree_s >= TREE_PERIOD_S
        found = await self._llm.kv_map(with_tree=renews, **({} if view is None else view._asdict()))
        if renews:
            self._trees[view] = now, found.tree
        else:
            found.tree = tree
        return found

    def _news(self, found: KVMap, before: KVMap | None) -> dict[str, Any]:
        """Returns what is new since an earlier snapshot: fields that have not changed are left out, cells too."""
        whole = {name: getattr(found, name) for name in found.__struct_fields__}
        news = {
            name: value
            for name, value in whole.items()
            if name == "stats" or before is None or value != getattr(before, name)
        }
        news["first_token"] = self._metrics.first_tokens._asdict()
        if "tiers" in news:
            earlier = {} if before is None else {tier.name: tier for tier in before.tiers}
            news["tiers"] = [_tier_news(tier, earlier.get(tier.name), len(found.columns)) for tier in found.tiers]
        return news


def _tier_news(tier: KVTier, before: KVTier | None, columns: int) -> dict[str, Any]:
    """Returns a tier with the rows of those cells that have changed, and their numbers (`changed`); whole if that is
    shorter, or if it has other cells now."""
    shown: dict[str, Any] = msgspec.structs.asdict(tier)
    if before is None or (before.num_frames, before.frames_per_cell) != (tier.num_frames, tier.frames_per_cell):
        return shown
    cells, old = (np.frombuffer(one.cells, "<u2").reshape(-1, columns) for one in (tier, before))
    changed = np.flatnonzero((cells != old).any(axis=1))
    if 2 * len(changed) < len(cells):
        shown |= {"changed": changed.astype("<u2").tobytes(), "cells": cells[changed].tobytes()}
    return shown


def kv_map_routes(feed: Feed) -> APIRouter:
    """Returns the route."""
    routes = APIRouter(prefix="/v1/kv_map", dependencies=[known_query()])

    @routes.get("")
    async def watch(
        request: Request, cache_salt: str = "", interval_s: Annotated[float, Query(ge=0.1, le=60)] = 0.25
    ) -> Response:
        """Streams what lies where in the KV memory, as server-sent events.

        The first event has everything; the next ones have what has changed. A tenant sees the names of its own
        requests and pins, of this namespace; an admin sees all.
        """
        view = None if request.state.is_admin else Namespace(request.state.tenant, cache_salt)
        return EventStream(await feed.events(view, interval_s))

    return routes
