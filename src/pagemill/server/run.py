"""Runs the application: listens first, loads the model behind it, ends both together."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import uvicorn

from pagemill.engine.async_llm import AsyncLLM
from pagemill.engine.messages import EngineReady
from pagemill.errors import PagemillError
from pagemill.server.app import create_app

GRACE_S = 5
"""How long running answers may go on after the first request to stop."""


async def run_server(
    llm: AsyncLLM, served_model_name: str, sock: socket.socket, on_ready: Callable[[EngineReady], None]
) -> None:
    """Serves on a socket that already listens, until SIGINT or SIGTERM, or until the engine is gone.

    `on_ready` is called when the model is loaded. Raises what kept it from loading, or `EngineDeadError`.
    """
    config = uvicorn.Config(
        create_app(llm, served_model_name), log_level="warning", lifespan="off", timeout_graceful_shutdown=GRACE_S
    )
    server = uvicorn.Server(config)

    async def watch() -> PagemillError:
        try:
            on_ready(await llm.ready())
            return await llm.wait_dead()
        except PagemillError as error:
            return error
        finally:
            server.should_exit = True

    async with llm:
        watcher = asyncio.create_task(watch())
        try:
            await server.serve(sockets=[sock])
            if watcher.done():
                raise watcher.result()
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
