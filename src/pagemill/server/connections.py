"""Connections: a bounded number of them, in all and for each client, none of which waits for ever.

A connection is idle while no request has begun on it. An idle one gives way where a newcomer would find no place, and
is closed when the head of a request does not come in time. So half-open connections cost a place only until it is
needed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from pagemill.errors import ServerBusyError
from pagemill.server.errors import RETRY_AFTER_S, error_response


def _full() -> bytes:
    refused = error_response(ServerBusyError("the server has no place for another connection; try again later"))
    body = refused.model_dump_json().encode()
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: {RETRY_AFTER_S}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_FULL = _full()


@dataclass
class _Client:
    """The connections of one address. idle: in the order in which they became so."""

    open: int = 0
    idle: dict[Connection, None] = field(default_factory=dict)


class Places:
    """The places for connections, and who has them."""

    def __init__(self, limit: int, per_client: int, head_timeout_s: float, reading_timeout_s: float) -> None:
        self.head_timeout_s = head_timeout_s
        self.reading_timeout_s = reading_timeout_s
        self._limit = limit
        self._per_client = per_client
        self._open = 0
        self._idle: dict[Connection, None] = {}
        self._clients: dict[str, _Client] = {}

    def take(self, connection: Connection) -> bool:
        """Takes a place for a new connection, another idle one's if need be. Returns False if there is none."""
        client = self._clients.get(connection.address)
        if client is not None and client.open >= self._per_client:
            if not client.idle:
                return False
            next(iter(client.idle)).give_up()
        elif self._open >= self._limit:
            if not self._idle:
                return False
            next(iter(self._idle)).give_up()
        self._clients.setdefault(connection.address, _Client()).open += 1
        self._open += 1
        return True

    def leave(self, connection: Connection) -> None:
        """Gives a place back."""
        self.busy(connection)
        client = self._clients[connection.address]
        client.open -= 1
        self._open -= 1
        if not client.open:
            del self._clients[connection.address]

    def idle(self, connection: Connection) -> None:
        """Notes that no request runs on a connection."""
        self._idle[connection] = self._clients[connection.address].idle[connection] = None

    def busy(self, connection: Connection) -> None:
        """Notes that a request runs on a connection."""
        self._idle.pop(connection, None)
        self._clients[connection.address].idle.pop(connection, None)


class Connection(H11Protocol):
    """uvicorn's connection, with a place among others and limits on what it may wait for."""

    def __init__(self, places: Places, **how: Any) -> None:
        super().__init__(**how)
        self.address = ""
        self._places = places
        self._has_place = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._has_place = self._places.take(self)
        if self._has_place:
            self._follow()
        else:
            transport.write(_FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_timer = self.loop.call_later(self._places.reading_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_reading_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_reading_timer()
        self._give_back()

    def give_up(self) -> None:
        """Closes an idle connection at once, and gives its place back."""
        self._give_back()
        self.transport.abort()

    def _follow(self) -> None:
        """Notes whether a request runs here, and limits the time until the next one does."""
        if not self._has_place:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_head_timer()
            self._places.busy(self)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._places.head_timeout_s, self.give_up)
            self._places.idle(self)

    def _give_back(self) -> None:
        self._cancel_head_timer()
        if self._has_place:
            self._has_place = False
            self._places.leave(self)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None
