"""Carries calls to replicas into Ray, for a front end that is outside it and outlives it.

Ray ends each process of a cluster whose raylet dies. So a front end that listens by itself is in none: a process that
is in the cluster calls replicas for it (`Relay`), and where that is gone, the next cluster's takes its place. What
engines say seldom comes this way: replicas offer connections of their own (`direct`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pagemill.distributed import listing
from pagemill.engine.wire import HEADER, framed
from pagemill.errors import EngineDeadError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

AGAIN_S = 0.1
"""Seconds after which what is not there is tried again: a relay, or a replica."""
STREAM = "outputs"
"""The method of a replica that yields; others return nothing."""


class Call(NamedTuple):
    """Asks for a call of a replica's method."""

    number: int
    method: str
    arguments: tuple[Any, ...]
    replica: str


class Cancel(NamedTuple):
    """Ends a call whose caller is gone."""

    number: int


class Came(NamedTuple):
    """Brings what a call has yielded."""

    number: int
    batch: bytes


class Ended(NamedTuple):
    """Tells that a call has ended, and what it has raised."""

    number: int
    error: str | None


class Listed(NamedTuple):
    """Tells which replicas take requests."""

    names: set[str]


class Relay:
    """Calls replicas for who connects. Belongs to one event loop, of a process that is in Ray."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._listed: set[str] = set()
        self._callers: set[asyncio.StreamWriter] = set()

    async def run(self, path: str) -> None:
        """Listens at a path, and tells who is connected which replicas there are, until cancelled."""
        self._loop = asyncio.get_running_loop()
        listing.watchers.append(self._list_from_router)
        server = await asyncio.start_unix_server(self._serve, path)
        while not await self._is_used():
            await asyncio.sleep(AGAIN_S)
        await server.serve_forever()

    async def _is_used(self) -> bool:
        """Calls any replica: Ray Serve lists replicas for a handle that is used. Returns whether one has answered."""
        with contextlib.suppress(Exception):
            await self._handle.wait_ready.remote(replica=None)
            return True
        return False

    def _list_from_router(self, names: set[str]) -> None:
        self._loop.call_soon_threadsafe(self._note_listed, names)

    def _note_listed(self, names: set[str]) -> None:
        self._listed = names
        for caller in self._callers:
            _write(caller, Listed(names))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls: dict[int, asyncio.Task[None]] = {}
        self._callers.add(writer)
        _write(writer, Listed(self._listed))
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    match await _read(reader):
                        case Call() as call:
                            calls[call.number] = asyncio.create_task(self._call(writer, call, calls))
                        case Cancel(number) if number in calls:
                            calls[number].cancel()
        finally:
            self._callers.discard(writer)
            for each in [*calls.values()]:
                each.cancel()
            writer.close()

    async def _call(self, writer: asyncio.StreamWriter, call: Call, calls: dict[int, asyncio.Task[None]]) -> None:
        """Makes a call, and tells what comes of it. calls: those of its caller that have not ended."""
        error = None
        try:
            if call.method == STREAM:
                await self._stream(writer, call)
            else:
                await getattr(self._handle, call.method).remote(*call.arguments, replica=call.replica)
        except Exception as raised:  # Ray raises children of several classes for what is gone
            error = type(raised).__name__
        finally:
            del calls[call.number]
        _write(writer, Ended(call.number, error))

    async def _stream(self, writer: asyncio.StreamWriter, call: Call) -> None:
        listing.kept.add(call.replica)
        try:
            stream = self._handle.options(stream=True).outputs.remote(*call.arguments, replica=call.replica)
            async for batch in stream:
                _write(writer, Came(call.number, batch))
                await writer.drain()
        finally:
            listing.kept.discard(call.replica)


class _Method:
    """Is called as the method of a handle is."""

    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote


class RelayedHandle:
    """Does what `Fleet` needs of Ray Serve's handle through a `Relay`, and through the next one where that is gone:
    all calls raise `EngineDeadError` then, and no replica is listed until there is one.

    Belongs to one event loop, from the first call on: that is `wait_ready`.
    """

    def __init__(self, path: str) -> None:
        self.outputs = _Method(self._stream)
        self.send = _Method(partial(self._call, "send"))
        self.close = _Method(partial(self._call, "close"))
        self.wait_ready = _Method(self._connect)
        self._path = path
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Queue[Came | Ended]] = {}
        """Holds what has come for each call that has not ended."""
        self._writer: asyncio.StreamWriter | None = None
        self._following: asyncio.Task[None] | None = None

    def options(self, *, stream: bool) -> RelayedHandle:
        """Returns this handle: what streams is known by its name."""
        return self

    async def _connect(self, replica: str | None) -> None:
        self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        """Takes what relays send, one relay after another."""
        while True:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                while True:
                    self._take(await _read(reader))
            if self._writer is not None:
                self._writer.close()
                self._writer = None
                for number, calls in self._calls.items():
                    calls.put_nowait(Ended(number, "the Ray cluster is gone"))
                self._take(Listed(set()))
            await asyncio.sleep(AGAIN_S)

    def _take(self, message: Came | Ended | Listed) -> None:
        if isinstance(message, Listed):
            for watcher in listing.watchers:
                watcher(message.names)
        elif message.number in self._calls:
            self._calls[message.number].put_nowait(message)

    async def _call(self, method: str, *arguments: Any, replica: str) -> None:
        """Returns once a replica's method has."""
        async for _ in self._begin(method, arguments, replica):
            pass

    def _stream(self, *arguments: Any, replica: str) -> AsyncGenerator[bytes, None]:
        """Yields what a replica's stream does."""
        return self._begin(STREAM, arguments, replica)

    async def _begin(self, method: str, arguments: tuple[Any, ...], replica: str) -> AsyncGenerator[bytes, None]:
        if (writer := self._writer) is None:
            raise EngineDeadError("the Ray cluster is gone")
        number = next(self._numbers)
        calls = self._calls[number] = asyncio.Queue()
        _write(writer, Call(number, method, arguments, replica))
        try:
            while isinstance(message := await calls.get(), Came):
                yield message.batch
        except BaseException:
            _write(writer, Cancel(number))
            raise
        finally:
            del self._calls[number]
        if message.error is not None:
            raise EngineDeadError(message.error)


def _write(writer: asyncio.StreamWriter, message: NamedTuple) -> None:
    """Sends a message; it is lost where nobody reads any more."""
    writer.write(framed(pickle.dumps(message)))


async def _read(reader: asyncio.StreamReader) -> Any:
    """Returns the next message. Both ends are processes of one user, in a folder that nobody else may enter."""
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return pickle.loads(await reader.readexactly(length))
