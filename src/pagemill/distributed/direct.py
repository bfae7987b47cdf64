"""A connection of its own between a front end and a replica, past Ray, whose cost for each message is milliseconds.

A replica listens, and gives each front end a token through Ray. Who connects with it gets, and sends, the batches that
Ray would carry, each with its length before it. A token is random, for one connection, and for a few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket

from pagemill.distributed.messages import Offer
from pagemill.engine.wire import HEADER, framed

TOKEN_BYTES = 32
CONNECT_S = 2.0
"""The longest time until a connection is there and has said its token; Ray carries everything where it is not."""
FIRST_S = 15.0
"""The longest time until a first batch has come; who does not take the connection ends it at once."""
MAX_STRANGERS = 64
"""Connections at once that have not said a token. For one more, the one ends that has waited longest."""
MAX_BATCH_BYTES = 1 << 30
"""A longer batch is none: what comes is not from a front end."""


class DirectConnection:
    """Sends and takes batches, in order. Belongs to one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def send(self, batch: bytes) -> None:
        """Sends a batch; waits while the other side is behind. Raises `OSError` where it is gone."""
        self._writer.write(framed(batch))
        await self._writer.drain()

    async def receive(self) -> bytes | None:
        """Returns the next batch; None once nothing comes any more."""
        try:
            (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            return await self._reader.readexactly(length) if length <= MAX_BATCH_BYTES else None
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def receive_first(self) -> bytes | None:
        """Returns the first batch; None where it does not come soon, and then the connection is closed."""
        try:
            first = await asyncio.wait_for(self.receive(), FIRST_S)
        except asyncio.TimeoutError:
            first = None
        if first is None:
            self.close()
        return first

    def abort(self) -> None:
        """Ends it at once, also where the other side takes nothing."""
        self._writer.transport.abort()

    def close(self) -> None:
        """Ends it, behind what has been sent. Nothing happens where it has ended."""
        self._writer.close()


class DirectServer:
    """Listens from `start` until `close`. Belongs to one event loop."""

    def __init__(self) -> None:
        self._offers: dict[bytes, asyncio.Future[DirectConnection]] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """Connections that have not said a token; the oldest comes first."""
        self._server: asyncio.Server | None = None
        self._address = "", 0

    async def start(self, host: str) -> None:
        """Listens on an address of this machine, or on that which it has by a name: others may know another by that.
        Raises `OSError` where it cannot."""
        self._server = await asyncio.start_server(self._take, host, 0)
        address, port, *_ = self._server.sockets[0].getsockname()
        self._address = address, port

    def offer(self) -> tuple[Offer, asyncio.Future[DirectConnection]]:
        """Returns what a front end connects with, and the connection once it is there. Cancelling that ends the
        offer."""
        token = secrets.token_bytes(TOKEN_BYTES)
        made: asyncio.Future[DirectConnection] = asyncio.get_running_loop().create_future()
        self._offers[token] = made
        made.add_done_callback(lambda _: self._offers.pop(token, None))
        asyncio.get_running_loop().call_later(CONNECT_S, self._offers.pop, token, None)
        return Offer(*self._address, token), made

    def close(self) -> None:
        """Listens no more. Connections that there are stay."""
        if self._server is not None:
            self._server.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        made: asyncio.Future[DirectConnection] | None = None
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, asyncio.TimeoutError, OSError):
                token = await asyncio.wait_for(reader.readexactly(TOKEN_BYTES), CONNECT_S)
                made = self._offers.get(token)
        finally:
            self._strangers.pop(writer, None)
        with contextlib.suppress(OSError):
            if made is not None and not made.done():
                made.set_result(DirectConnection(reader, writer))
                return
        writer.close()


async def connect(offer: Offer) -> DirectConnection | None:
    """Returns a connection to who has made an offer; None where there is no way to it."""
    try:
        opened = asyncio.open_connection(offer.host, offer.port)
        reader, writer = await asyncio.wait_for(opened, CONNECT_S)
        writer.write(offer.token)
        return DirectConnection(reader, writer)
    except (OSError, asyncio.TimeoutError):
        return None
