"""Refuses new requests once the server has been asked to stop, while those that run go on to their end."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from pagemill.errors import ServerBusyError
from pagemill.server.protocol.errors import error_answer

STILL_ANSWERED = frozenset({"/live", "/metrics"})
"""What watches the process goes on to see it."""


class Drain:
    """ASGI middleware, which refuses nothing until it has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.has_begun or scope["type"] != "http" or scope["path"] in STILL_ANSWERED:
            await self._app(scope, receive, send)
            return
        answer = error_answer(
            ServerBusyError(
                "the server was asked to stop and takes no more requests; send this again when it has started anew, or "
                "to another server"
            ),
            scope,
        )
        answer.headers["Connection"] = "close"
        await answer(scope, receive, send)
