"""The front end's hold on an engine process: starts it, speaks with it over a socket pair, and ends it.

The child is started afresh (no fork of this process, no second import of `__main__`), so this process needs no torch.
It has its own process session: a Ctrl-C in the terminal reaches the front end alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import weakref
from typing import Any

import msgspec

from pagemill.config import EngineConfig
from pagemill.engine.messages import FromEngine, Shutdown, Start
from pagemill.engine.wire import HEADER, frame

SOCKET_BUFFER_BYTES = 1 << 20
SHUTDOWN_TIMEOUT_S = 10.0

_CHILD = (
    "import sys; sys.path[:] = sys.argv[2:]; from pagemill.engine.process import main; sys.exit(main(int(sys.argv[1])))"
)


class EngineClient:
    """One engine process. Loading begins with construction; all coroutines belong to one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            # The child gets this process's module path, so that it finds the same package wherever it was started from.
            # What it prints goes to stderr: stdout may be somebody's JSON.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(theirs.fileno()), *(path or os.getcwd() for path in sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )
        self._socket = ours
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._finalizer = weakref.finalize(self, _end, self._process, ours)
        ours.sendall(frame(Start(config)))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def connect(self) -> None:
        """Attaches to the running event loop; before any `send` or `receive`."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)

    def send(self, message: Any) -> None:
        """Queues a message, in order. Nothing happens if the process is gone: `receive` says so."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def receive(self) -> FromEngine | None:
        """The next message; None when the process has closed its end."""
        assert self._reader is not None
        try:
            (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def wait(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> int:
        """Waits for the process to end, kills it when the time is over, and returns its exit status."""
        try:
            return await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)

    async def close(self, *, now: bool = False) -> None:
        """Ends the process: after its current step, or `now` (nothing it holds needs saving). May be called twice."""
        if now:
            self._process.kill()
        else:
            self.send(Shutdown())
        await self.wait()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        self._finalizer()


def _end(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    """For an engine that nobody closed, and at interpreter exit: no orphan, no zombie."""
    sock.close()
    if process.poll() is None:
        process.kill()
        process.wait()
