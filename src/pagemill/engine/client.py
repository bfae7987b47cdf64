"""The front end's hold on an engine process: speaks with it over a socket pair, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from typing import Any

import msgspec

from pagemill.config import EngineConfig
from pagemill.engine.messages import EngineFault, FromEngine, Shutdown, Start
from pagemill.engine.spawn import spawn
from pagemill.engine.wire import HEADER, frame
from pagemill.errors import EngineDeadError, PagemillError, error_of

SHUTDOWN_TIMEOUT_S = 10.0
"""A process that has not ended after so long is killed."""
KEEPING_TIMEOUT_S = 300.0
"""The same of one with a disk tier, on which it may have gigabytes to keep."""


class EngineClient:
    """One engine process. Loading begins with construction; all coroutines belong to one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._child = spawn()
        self._timeout_s = SHUTDOWN_TIMEOUT_S if config.kv_disk_memory is None else KEEPING_TIMEOUT_S
        self._process, self._socket = self._child.process, self._child.socket
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._socket.sendall(frame(Start(config)))

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

    async def wait(self) -> int:
        """Waits for the process to end, kills it when the time is over, and returns its exit status."""
        try:
            return await asyncio.to_thread(self._process.wait, self._timeout_s)
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
        self._child.end()


def cause_of_death(fault: EngineFault | None, status: int, *, loaded: bool) -> PagemillError:
    """Before it has loaded, the engine's own error is the answer; afterwards its users get `EngineDeadError`."""
    if fault is not None and not loaded:
        return error_of(fault.error_type, fault.message)
    if fault is not None:
        why = f"{fault.error_type}: {fault.message}"
    elif status < 0:
        why = f"killed by {signal.Signals(-status).name}"
        if status == -signal.SIGKILL:
            why += ", perhaps for want of memory: lower kv_memory or max_num_batched_tokens"
    else:
        why = f"exit status {status}, see its messages on stderr"
    return EngineDeadError(f"the engine process is gone ({why}); start a new one")
