"""How a server stops: running answers go on for a while, then get an error, and the process ends with status 0."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

from pagemill.frontend.async_llm import AsyncLLM
from pagemill.server.access.connections import Connection
from pagemill.server.access.turns import ListeningConfig, ListeningServer
from pagemill.server.lifecycle.drain import Drain
from pagemill.server.routes.kv_map import Feed

ANSWER_S = 2.0
"""Seconds that a client may take to read the error that ends its request."""


class StoppingServer(ListeningServer):
    """Ends open requests by ending the engine: each gets its error as an answer, which a cancelled task cannot give.

    uvicorn's own `timeout_graceful_shutdown` must stay unset, for it cancels. Signals are not raised again after the
    end, as uvicorn would: a server that was asked to stop, and did, has succeeded.
    """

    def __init__(
        self,
        config: ListeningConfig,
        llm: AsyncLLM,
        feed: Feed,
        drain: Drain,
        drain_timeout_s: float,
        say: Callable[[str], None],
        on_listening: Callable[[], None],
    ) -> None:
        """on_listening: called when the server listens, and signals to stop no longer end the process at once."""
        super().__init__(config)
        self._llm = llm
        self._feed = feed
        self._drain = drain
        self._drain_timeout_s = drain_timeout_s
        self._say = say
        self._on_listening = on_listening
        self.num_signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.num_signals += 1
        self.should_exit = self._drain.has_begun = True

    async def stop_after(self, stop: asyncio.Event) -> None:
        """Stops as after a signal, once this is set."""
        await stop.wait()
        self.handle_exit(signal.SIGTERM, None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:  # open connections stay, so that a request on one learns why it is refused
            server.close()
        for sock in sockets or ():
            sock.close()
        self._feed.close()  # its streams have no end of their own
        await self._until(lambda: not self._feed.num_watching, ANSWER_S)
        if (self._llm.is_ready or self._llm.restarting) and self._busy():  # else nothing runs that could finish
            self._say(
                f"stopping; answers on {self._busy()} of the open connections may go on for {self._drain_timeout_s:g} "
                f"s; a second signal ends them at once"
            )
            await self._until(lambda: not self._busy() or self.num_signals >= 2, self._drain_timeout_s)
        await asyncio.gather(super().shutdown(sockets), self._end_requests())

    async def _end_requests(self) -> None:
        """Ends them while uvicorn, which no longer accepts, waits for the last connection to close."""
        await self._llm.shutdown()
        await self._until(lambda: not self.server_state.connections, ANSWER_S)
        for connection in list(self.server_state.connections):  # of clients that neither read nor go
            connection.transport.abort()

    def _busy(self) -> int:
        """Returns how many connections have an answer under way."""
        return sum(
            connection.is_busy for connection in self.server_state.connections if isinstance(connection, Connection)
        )

    async def _until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not reached() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
