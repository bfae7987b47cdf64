"""Connections: a bounded number of them, in all and for each client, none of which waits for ever.

A connection is idle while no request has begun on it and nothing is left to send. An idle one gives way where a
newcomer would find no place, and is closed when the head of a request does not come in time. So half-open connections
cost a place only until it is needed. Whatever is left to send, the client must go on taking it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr

from pagemill.errors import ServerBusyError
from pagemill.server.access.turns import Turns
from pagemill.server.protocol.errors import RETRY_AFTER_S, error_response
from pagemill.server.protocol.events import WRITER

MAX_HEAD_BYTES = 16 << 10
MOST_READ_BYTES = 32 << 10
"""The most that is read of a connection in one turn of the event loop; by itself asyncio takes 256 KiB of each."""
LOOKS = 4
"""How often in its time a client is looked at, whether it has taken something."""


def client_of(address: str) -> str:
    """Returns whom an address counts for: an IPv4 address for itself, an IPv6 address for its network of 64 bits, which
    one client may have to itself."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))
    return address


def _refusal(error: ServerBusyError) -> bytes:
    body = error_response(error).model_dump_json().encode()
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: {RETRY_AFTER_S}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


@dataclass
class _Client:
    """The connections of one client. idle: in the order in which they became so."""

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

    def take(self, connection: Connection) -> None:
        """Takes a place for a new connection, an idle one's if need be. Raises ServerBusyError if there is none."""
        client = self._clients.get(connection.address)
        if client is not None and client.open >= self._per_client:
            if not client.idle:
                raise ServerBusyError(
                    f"{connection.address} has {client.open} of at most {self._per_client} connections of one address "
                    f"open; close one, or start the server with a higher --max-connections-per-client"
                )
            next(iter(client.idle)).give_up()
        elif self._open >= self._limit:
            if not self._idle:
                raise ServerBusyError(
                    f"all clients together have {self._open} of at most {self._limit} connections open; try again "
                    f"later, or start the server with a higher --max-connections and limit on descriptors (ulimit -n)"
                )
            next(iter(self._idle)).give_up()
        self._clients.setdefault(connection.address, _Client()).open += 1
        self._open += 1

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


class _Counted(h11.Connection):
    """The state of HTTP/1.1, which counts the bytes that are to be sent, and refuses a long head that comes at once,
    too."""

    num_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            size = len(event.target) + sum(len(name) + len(value) for name, value in event.headers)
            if size > MAX_HEAD_BYTES:
                raise h11.RemoteProtocolError(f"the head has {size} bytes or more")
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        parts = super().send_with_data_passthrough(event)
        self.num_bytes += sum(map(len, parts or ()))
        return parts


class _ChunkWriter:
    """Writes parts of one answer in chunks (RFC 9112, section 7.1)."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    def ready(self) -> bool:
        return not (self._connection.flow.write_paused or self._cycle.disconnected)

    def write(self, data: bytes) -> None:
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        self._connection.conn.num_bytes += len(chunk)
        self._connection.transport.write(chunk)


class Connection(H11Protocol):
    """uvicorn's connection, with a place among others and limits on what it may wait for. What its client sends, and
    its end, wait for their turn."""

    def __init__(self, places: Places, turns: Turns, tls: ssl.SSLContext | None, **how: Any) -> None:
        """tls: None for plain connections."""
        super().__init__(**how)
        self._app, self.app = self.app, self._serve
        self.conn: _Counted = _Counted(h11.SERVER, MAX_HEAD_BYTES)
        self.address = ""
        self._places = places
        self._turns = turns
        self._tls = tls
        self._handshake: asyncio.Task[None] | None = None
        self._early: list[bytes] | None = None
        """What came behind the handshake before this connection knew that it had ended."""
        self._has_place = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None
        self._num_taken = 0
        self._taken_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = self.transport = transport
        transport.max_size = MOST_READ_BYTES  # type: ignore[attr-defined]
        client = get_remote_addr(transport)
        self.address = client_of(client[0]) if client else ""
        try:
            self._places.take(self)
        except ServerBusyError as refused:
            self.logger.warning(f"A connection was refused: {refused.message}")
            if self._tls is None:
                transport.write(_refusal(refused))
            transport.close()
            return
        self._has_place = True
        self._taken_s = self.loop.time()
        if self._tls is None:
            super().connection_made(transport)
        else:
            self._early = []
            self._handshake = self.loop.create_task(self._secure(transport, self._tls))
        self._look()

    async def _secure(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        """Shakes hands. The connection is idle meanwhile, so half a handshake costs a place only until it is needed."""
        secured: Any = None
        with contextlib.suppress(OSError):  # the client has gone, is too slow, or speaks no TLS
            secured = await self.loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=self._places.head_timeout_s
            )
        early, self._early = self._early, None
        if secured is None:
            transport.abort()
            self._end()
            return
        super().connection_made(secured)
        for data in early or ():
            self.data_received(data)

    def send_400_response(self, msg: str) -> None:
        with contextlib.suppress(h11.LocalProtocolError):  # an answer to HEAD has no body
            super().send_400_response(msg)
        self.transport.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if self.conn.their_http_version == b"1.1" and scope["method"] != "HEAD":
            scope["extensions"] = {WRITER: _ChunkWriter(self, self.cycle)}
        try:
            await self._app(scope, receive, send)
        finally:
            scope.pop("extensions", None)  # which would keep it, and a refused body with it, until a collection

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early.append(data)
            return
        self.transport.pause_reading()  # nothing gathers here
        self._turns.add(partial(self._take, data))

    def _take(self, data: bytes) -> None:
        if not self._has_place:  # it was refused, or has given way
            return
        self.transport.resume_reading()
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._turns.add(partial(self._lost, exc))

    def _lost(self, exc: Exception | None) -> None:
        try:
            super().connection_lost(exc)
        finally:
            self._end()

    @property
    def is_busy(self) -> bool:
        """Whether a request runs here or its answer is still sent."""
        runs = self.cycle is not None and not self.cycle.response_complete
        return runs or self._unsent() > 0

    def give_up(self) -> None:
        """Closes an idle connection at once, and gives its place back."""
        self._give_back()
        self.transport.abort()

    def _look(self) -> None:
        """Ends the connection if its client has taken nothing for too long of what waits for it. Looks again later."""
        unsent, now = self._unsent(), self.loop.time()
        num_taken = self.conn.num_bytes - unsent
        if not unsent or num_taken > self._num_taken:
            self._num_taken, self._taken_s = num_taken, now
        elif now - self._taken_s >= self._places.reading_timeout_s:
            self.transport.abort()
            return
        self._follow()
        self._reading_timer = self.loop.call_later(self._places.reading_timeout_s / LOOKS, self._look)

    def _unsent(self) -> int:
        """Returns how many bytes wait to be sent, here and behind the encryption."""
        unsent = self._raw.get_write_buffer_size()
        if self.transport is self._raw or self._raw.is_closing():  # Python 3.10 has nothing before it any more then
            return unsent
        return unsent + self.transport.get_write_buffer_size()

    def _follow(self) -> None:
        """Notes whether a request runs here or its answer is still sent, and limits the time until the next one."""
        if not self._has_place:
            return
        if self.is_busy:
            self._cancel_head_timer()
            self._places.busy(self)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._places.head_timeout_s, self.give_up)
            self._places.idle(self)

    def _end(self) -> None:
        self.app = self._app
        if self._reading_timer is not None:
            self._reading_timer.cancel()
        self._give_back()

    def _give_back(self) -> None:
        self._cancel_head_timer()
        if self._has_place:
            self._has_place = False
            self._places.leave(self)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
