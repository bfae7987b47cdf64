"""Shares the event loop out: whatever many clients do at the same moment is taken a few at a time, and running streams
get their next parts in between."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

ACCEPTS_AT_ONCE = 8
"""Connections that are accepted in one turn of the event loop: each takes about 0.2 ms."""
EVENTS_AT_ONCE = 4
"""Requests that begin, and connections that end, in one turn of the event loop: each takes about a millisecond, most of
it in the turns that follow."""


class Turns:
    """Calls functions in the order in which they come, `EVENTS_AT_ONCE` in a turn of the running event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, function: Callable[[], None]) -> None:
        """Calls the function when all that were added before have been called."""
        self._waiting.append(function)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        try:
            for _ in range(min(EVENTS_AT_ONCE, len(self._waiting))):
                function = self._waiting[0]
                try:
                    function()
                finally:
                    self._waiting.popleft()
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._run)


class ListeningConfig(uvicorn.Config):
    """uvicorn's settings, and how many connections may wait until they are accepted."""

    def __init__(self, app: ASGIApp, *, queue: int, **more: Any) -> None:
        super().__init__(app, backlog=ACCEPTS_AT_ONCE, **more)
        self.queue = queue


class ListeningServer(uvicorn.Server):
    """uvicorn's server. asyncio accepts in one turn all connections that may wait, so it is told of a few; the system,
    of many."""

    config: ListeningConfig

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(self.config.queue)
