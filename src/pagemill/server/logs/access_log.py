"""One line of log for each request, and an id by which client and log name it."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.errors import InvalidRequestError, shown
from pagemill.frontend.outputs import RequestMetrics
from pagemill.server.logs.output import fields
from pagemill.server.protocol.anthropic_errors import is_anthropic
from pagemill.server.protocol.errors import CLIENT_CLOSED_REQUEST, error_answer
from pagemill.server.protocol.events import CLIENT_GONE

LOGGER = logging.getLogger("pagemill.access")
REQUEST_ID = "X-Request-Id"
ANTHROPICS_ID = "Request-Id"
"""Anthropic's name of the same header."""
MAX_REQUEST_ID = 128
MAX_PATH = 256
"""Characters of a path that a line has."""
NO_ROUTE = "other"
"""Stands for the path of a request that was refused before it came to a route, or for which there is none."""
LINES_PER_S, MOST_LINES = 20.0, 200
"""Lines of one status that requests may cause which generate nothing: so many come back each second, up to so many."""

NO_SNIFFING = (b"x-content-type-options", b"nosniff")
"""Keeps browsers from taking an answer for a page because of the words in it."""

_REQUEST_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID}}}")


class Generating(Protocol):
    """What a handler leaves in `request.state.call`, for the line to say what it came to."""

    def figures(self) -> dict[str, Any]: ...

    def times(self) -> list[RequestMetrics]: ...


class EndedRequest(NamedTuple):
    """An HTTP request that has ended.

    path: as its route declares it, `NO_ROUTE` for none. state: `request.state`. began_s, ended_s: on the
    clock of `time.monotonic()`.
    """

    scope: Scope
    state: dict[str, Any]
    path: str
    status: int
    began_s: float
    ended_s: float


class Lines:
    """Allows so many lines of a kind, and counts the others."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[float, float]] = {}
        self._left_out: dict[int, int] = {}

    def allow(self, kind: int) -> bool:
        """Returns True for a line that may be written."""
        now = time.monotonic()
        left, at_s = self._left.get(kind, (float(MOST_LINES), now))
        left = min(left + (now - at_s) * LINES_PER_S, MOST_LINES)
        if left < 1:
            self._left[kind] = left, now
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._left[kind] = left - 1, now
        return True

    def take_left_out(self, kind: int) -> int | None:
        """Returns how many lines have been left out since the last one, None for none."""
        return self._left_out.pop(kind, None)


class AccessLog:
    """ASGI middleware around everything: sets `request.state.request_id`, gives it out with the answer, and logs the
    request once it has ended. Neither bodies nor query strings are logged. Browsers are told to take an answer for what
    it says it is."""

    def __init__(
        self, app: ASGIApp, on_end: Callable[[EndedRequest], None] | None = None, *, tells_ids: bool = True
    ) -> None:
        """on_end: is called for each request that has ended. tells_ids: False where a proxy gives each request its id,
        and tells the client by itself."""
        self._app = app
        self._on_end = on_end
        self._tells_ids = tells_ids
        self._lines = Lines()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        state = scope.setdefault("state", {})
        wanted = Headers(scope=scope).get(REQUEST_ID)
        right = wanted is None or _REQUEST_ID.fullmatch(wanted) is not None
        request_id = state["request_id"] = wanted if wanted is not None and right else uuid.uuid4().hex

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ())]
                if self._tells_ids:
                    names = (REQUEST_ID, ANTHROPICS_ID) if is_anthropic(scope["path"]) else (REQUEST_ID,)
                    headers[:0] = [(name.lower().encode(), request_id.encode()) for name in names]
                if NO_SNIFFING not in headers:
                    headers.append(NO_SNIFFING)
                message = {**message, "headers": headers}
            await send(message)

        try:
            if right:
                await self._app(scope, receive, tell)
            else:
                refused = InvalidRequestError(
                    f"{REQUEST_ID} is {shown(wanted)}; it must be 1 to {MAX_REQUEST_ID} printable ASCII characters "
                    f"without spaces; leave it out to get one",
                    param=REQUEST_ID,
                )
                answer = error_answer(refused, scope)
                answer.headers["Connection"] = "close"  # its body may still be on its way
                await answer(scope, receive, tell)
        finally:
            status, ended = status or CLIENT_CLOSED_REQUEST, time.monotonic()
            if self._on_end is not None:
                path = getattr(scope.get("route"), "path", NO_ROUTE)
                self._on_end(EndedRequest(scope, state, path, status, began, ended))
            self._log(scope, state, status, ended - began)

    def _log(self, scope: Scope, state: dict[str, Any], status: int, duration_s: float) -> None:
        call: Generating | None = state.get("call")
        figures = {} if call is None else call.figures()
        failed = status >= 500 or figures.get("broke_off") not in (None, CLIENT_GONE)
        level = logging.WARNING if failed else logging.INFO
        if not LOGGER.isEnabledFor(level):
            return
        if call is None and not self._lines.allow(status):
            return
        LOGGER.log(
            level,
            "request",
            extra=fields(
                request_id=state["request_id"],
                client=client_address(scope),
                tenant=state.get("tenant"),
                method=scope["method"],
                path=scope["path"][:MAX_PATH],
                status=status,
                **figures,
                duration_ms=round(duration_s * 1000, 1),
                left_out=self._lines.take_left_out(status),
            ),
        )


def client_address(scope: Scope) -> str | None:
    """Returns the address that a request came from."""
    client = scope.get("client")
    return None if client is None else str(client[0])
