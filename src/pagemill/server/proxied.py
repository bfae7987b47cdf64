"""The application behind another server's proxies, which have the address, connections and TLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from pagemill.frontend.async_llm import AsyncLLM
from pagemill.server.access.api_keys import ApiKeys
from pagemill.server.lifecycle.loop_lag import watch_loop_lag
from pagemill.server.lifecycle.reload import TenantsReload
from pagemill.server.logs.access_log import AccessLog, EndedRequest
from pagemill.tenant_limits import TenantsFile

if TYPE_CHECKING:
    from fastapi import FastAPI


class Proxied:
    """ASGI application with what `run_server` has around it too: each request has an id, a line in the log and a count.

    Between the server's startup and shutdown it watches the event loop, and reads the tenants file when that changes.
    """

    def __init__(
        self, app: FastAPI, llm: AsyncLLM, keys: ApiKeys, tenants: TenantsFile | None, say: Callable[[str], None]
    ) -> None:
        """tenants: the file that `keys` came from, None for none. say: is called with what came of reading it again."""
        self._app = AccessLog(app, self._ended)
        self._metrics = app.state.metrics
        self._open: set[int] = set()
        self._reload = None if tenants is None else TenantsReload(tenants, keys, llm, say)
        app.router.lifespan_context = self._watching

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._open.add(id(scope))
        try:
            await self._app(scope, receive, send)
        finally:
            self._open.discard(id(scope))

    def _ended(self, request: EndedRequest) -> None:
        self._metrics.observe_answer(request.path, request.status)

    @contextlib.asynccontextmanager
    async def _watching(self, _: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(watch_loop_lag(self._metrics.observe_lag, self._open))]
        if self._reload is not None:
            tasks.append(asyncio.create_task(self._reload.watch()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
