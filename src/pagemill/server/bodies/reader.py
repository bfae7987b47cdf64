"""Reads large bodies beside the event loop: one of millions of short entries takes half a second to parse and check,
in which no stream would go on.
"""

from __future__ import annotations

import inspect
import pickle
import re
import typing
from collections.abc import Callable, Coroutine
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from pagemill.child_process import Child, start_child
from pagemill.engine.messages import EngineReady, Failure
from pagemill.errors import BodyTooLargeError, PagemillError, ServerBusyError
from pagemill.frontend.worker import WorkerThreads
from pagemill.server.access.large_bodies import SMALL_BODY_BYTES
from pagemill.server.protocol.errors import without_frames
from pagemill.server.protocol.events import ClientGone, until_disconnect
from pagemill.server.protocol.refusals import refusal_of

B = TypeVar("B", bound=BaseModel)

PROCESS = "pagemill.server.bodies.process"
NICENESS = 10
"""How far the process stands back: behind running streams, and the engine too."""
LARGE_BODY_BYTES = 1 << 20
"""A body of more bytes takes long to parse whatever is in it."""
MOST_MARKS = 5_000
"""A body of more bytes than a small one is read here if it has at most so many marks."""
MARKS = b",[{\\"
"""Characters that parsing a body takes time for: each entry of a list or an object has one before it or behind it."""
MOST_OBJECTS = 500
"""A body is read here if it has at most so many objects: to check one, as a message, takes ten microseconds."""
OBJECT = re.compile(rb'\{\s*"')
"""Begins an object that has fields. Within a text, a backslash stands before the quote: code in a prompt has none."""


def is_large(body: bytes | bytearray) -> bool:
    """Returns whether reading a body may take more than some milliseconds."""
    if len(body) > LARGE_BODY_BYTES:
        return True
    if len(body) > SMALL_BODY_BYTES and sum(body.count(mark) for mark in MARKS) > MOST_MARKS:
        return True
    return next(islice(OBJECT.finditer(body), MOST_OBJECTS, None), None) is not None


class BodyReader:
    """A child process that reads one large body after another. It is started when the first comes.

    facts: returns the engine's facts, None while it loads. A prompt of too many token ids is refused by the child.
    """

    def __init__(self, facts: Callable[[], EngineReady | None]) -> None:
        self._facts = facts
        self._worker = WorkerThreads("large bodies", num_threads=1)
        self._child: Child | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while there is none."""
        return None if self._child is None else self._child.process.pid

    async def read(self, kind: type[B], body: bytes | bytearray, tenant: str) -> B:
        """Returns the checked body, whose lists of integers are arrays. Tenants take turns.

        Raises why it is refused; `ServerBusyError` if the process ended over it.
        """
        return await self._worker.run_for(tenant, len(body), self._read, kind, body)

    def close(self) -> None:
        """Ends the process. Bodies that wait for it are dropped."""
        self._worker.close()
        self._end_child()

    def _read(self, kind: type[B], body: bytes | bytearray) -> B:
        try:
            if self._connection is None:
                self._child = start_child(PROCESS, NICENESS)
                self._connection = Connection(self._child.socket.detach())
            self._connection.send_bytes(pickle.dumps((kind, self._facts())))
            self._connection.send_bytes(body)
            answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._end_child()
            raise ServerBusyError(
                f"the process that reads large bodies ended over one of {len(body)} bytes, perhaps for want of memory; "
                f"send a shorter one, or try again"
            ) from None
        if isinstance(answer, Failure):
            raise answer.to_error()
        read = kind.__new__(kind)
        read.__setstate__(answer)
        return read

    def _end_child(self) -> None:
        connection, self._connection = self._connection, None
        child, self._child = self._child, None
        if connection is not None:
            connection.close()
        if child is not None:
            child.end()


class BodyRoute(APIRoute):
    """A route whose large bodies are read by the application's `BodyReader`, and freed when they are refused."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler, kind = super().get_route_handler(), _body_kind(self.endpoint)

        async def handle(request: Request) -> Response:
            refused: Exception
            try:
                return await handler(_BodyRequest(request, kind))
            except RequestValidationError as invalid:
                refused = refusal_of(without_frames(invalid).errors(), invalid.body, kind)
            except (PagemillError, HTTPException, ClientGone) as error:
                refused = error
            try:
                raise without_frames(refused)
            finally:
                del refused  # this frame is the error's first, so it must not keep the error in turn

        return handle


class _BodyRequest(Request):
    """A request whose `json` is the checked body already, if that is large; it raises ClientGone if nobody waits."""

    def __init__(self, request: Request, kind: type[BaseModel] | None) -> None:
        super().__init__(request.scope, request.receive)
        self._kind = kind

    async def body(self) -> bytes:
        """Returns the body as the gate gives it, in one piece: a copy of 8 MiB holds the event loop for 25 ms."""
        if not hasattr(self, "_body"):
            pieces = [piece async for piece in self.stream() if piece]
            self._body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return self._body

    async def json(self) -> Any:
        body = await self.body()
        if self._kind is None and len(body) > SMALL_BODY_BYTES:
            raise BodyTooLargeError(
                f"the body has {len(body)} bytes; {self.url.path} takes at most {SMALL_BODY_BYTES}; send a shorter one"
            )
        if self._kind is None or not is_large(body):
            return await super().json()
        reading = self.app.state.body_reader.read(self._kind, body, self.state.tenant)
        return await until_disconnect(self.receive, reading)


def _body_kind(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """Returns the class of the parameter that is a body, None where there is none."""
    hints = typing.get_type_hints(endpoint)
    kinds = (hints.get(name) for name in inspect.signature(endpoint).parameters)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
