"""The application behind another server's proxies, which have the address, connections and TLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from pagemill.frontend.async_llm import AsyncLLM
from pagemill.server.access.api_keys import ApiKeys
from pagemill.server.lifecycle.loop_lag import watch_loop_lag
from pagemill.server.lifecycle.reload import TenantsReload
from pagemill.server.logs.access_log import AccessLog, EndedRequest
from pagemill.tenant_limits import TenantsFile

if TYPE_CHECKING:
    from fastapi import FastAPI


def stand_behind_proxies(
    app: FastAPI, llm: AsyncLLM, keys: ApiKeys, tenants: TenantsFile | None, say: Callable[[str], None]
) -> None:
    """Gives an application, before its first request, what `run_server` has around it: each request gets an id, a line
    in the log and a count. From the other server's startup to its shutdown the event loop is watched, and the tenants
    file is read again when it changes.

    tenants: the file that `keys` came from, None for none. say: is called with what came of reading it again.
    """
    metrics, requests = app.state.metrics, set[int]()
    app.state.tenants_reload = reload = None if tenants is None else TenantsReload(tenants, keys, llm, say)
    build = app.build_middleware_stack

    def ended(request: EndedRequest) -> None:
        metrics.observe_answer(request.path, request.status)

    @contextlib.asynccontextmanager
    async def watching(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(watch_loop_lag(metrics.observe_lag, requests))]
        if reload is not None:
            tasks.append(asyncio.create_task(reload.watch()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Around all that the application has, which also answers for errors of its own.
    app.build_middleware_stack = lambda: InFlight(  # type: ignore[method-assign]
        AccessLog(build(), ended, tells_ids=False), requests
    )
    app.router.lifespan_context = watching


class InFlight:
    """ASGI middleware that keeps the ids of the scopes of requests which are under way."""

    def __init__(self, app: ASGIApp, requests: set[int]) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._requests.add(id(scope))
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests.discard(id(scope))
