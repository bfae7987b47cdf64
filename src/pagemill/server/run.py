"""Runs the application: listens first, loads the model behind it, ends both together."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pagemill.engine.messages import EngineReady
from pagemill.errors import ConfigError, PagemillError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.server.access import ServerAccess, is_loopback
from pagemill.server.access_log import AccessLog
from pagemill.server.api_keys import ApiKeys
from pagemill.server.app import create_app
from pagemill.server.connections import Connection, Places
from pagemill.server.drain import Drain
from pagemill.server.hosts import AllowedHosts
from pagemill.server.kv_map import Feed
from pagemill.server.limits import ServerLimits, room_for
from pagemill.server.logs import quieten
from pagemill.server.loop_lag import watch_loop_lag
from pagemill.server.pins import FilePin, pin
from pagemill.server.reload import TenantsReload
from pagemill.tenant_limits import TenantsFile

ANSWER_S = 2.0
"""Seconds that a client may take to read the error that ends its request."""


async def run_server(
    llm: AsyncLLM,
    served_model_name: str | Sequence[str],
    sock: socket.socket,
    on_ready: Callable[[EngineReady], None],
    say: Callable[[str], None],
    pins: Sequence[FilePin] = (),
    tenants: TenantsFile | None = None,
    limits: ServerLimits | None = None,
    access: ServerAccess | None = None,
    host: str = "",
) -> None:
    """Serves on a socket that already listens, until SIGINT or SIGTERM, or until the engine is gone.

    The tenants file is read again when it changes, it and the certificate on SIGHUP. SIGUSR1 gives back the KV memory
    that running requests do not need, SIGUSR2 takes as much as at the start again.
    host: the name that the address was given by.
    `on_ready` is called when the model is loaded and `pins` are computed, `say` with what came of these signals, and
    where the system allows fewer connections than the limits.
    Raises what kept it from being ready, or `EngineDeadError`; returns after a signal to stop.
    """
    limits = limits or ServerLimits()
    access, on_loopback = access or ServerAccess(), is_loopback(sock.getsockname()[0])
    keys = ApiKeys(tenants, access, on_loopback=on_loopback)
    any_name = not access.allowed_hosts and (keys.are_there or not on_loopback)
    hosts = None if any_name else AllowedHosts([host, *access.allowed_hosts], access.allowed_origins)
    # Connections inherit it. Without it the system holds small parts back until the client, which waits 40 ms, has
    # acknowledged those before; asyncio sets it only where a socket names its protocol, and this one need not.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    app = create_app(llm, served_model_name, keys, limits, access, hosts)
    drain = Drain(app)
    certificate = access.certificate()
    tls = None if certificate is None else certificate.context
    config = server_config(AccessLog(drain), limits, say, access.forwarded_allow_ips, tls)
    server = _Server(config, llm, app.state.feed, drain, limits.drain_timeout, say)

    async def watch() -> PagemillError:
        try:
            ready = await llm.ready()
            for body in pins:
                await pin(llm, body, body.tenant)
            on_ready(ready)
            return await llm.wait_dead()
        except PagemillError as error:
            return error
        finally:
            server.should_exit = True

    async def resize(kv_memory: str | None) -> None:
        try:
            ready = await llm.resize_kv_memory(kv_memory)
            size = f"{ready.num_frames} {'block' if ready.num_frames == 1 else 'blocks'}"
            say(f"the KV pool has {size} now, {ready.kv_bytes / 2**20:.1f} MiB")
        except PagemillError as error:
            say(f"the KV pool keeps its size: {error}")

    async with llm:
        watcher = asyncio.create_task(watch())
        work: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "SIGUSR1": partial(resize, "used"),
            "SIGUSR2": partial(resize, None),
        }
        tasks = {asyncio.create_task(watch_loop_lag(app.state.metrics.observe_lag))}
        tenants_reload = None if tenants is None else TenantsReload(tenants, keys, llm, say)

        async def reload() -> None:
            if certificate is not None:
                try:
                    certificate.reload()
                    say("the certificate was read again")
                except ConfigError as error:
                    say(f"the certificate stays as it was: {error.message}")
            if tenants_reload is not None:
                await tenants_reload.reload()

        if tenants_reload is not None:
            tasks.add(asyncio.create_task(tenants_reload.watch()))
        if tenants_reload is not None or certificate is not None:
            work["SIGHUP"] = reload
        for name, begin in work.items():
            with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):  # no such signals, or a thread
                asyncio.get_running_loop().add_signal_handler(
                    getattr(signal, name), lambda begin: tasks.add(asyncio.create_task(begin())), begin
                )
        try:
            await server.serve(sockets=[sock])
            if watcher.done() and not server.num_signals:
                raise watcher.result()
        finally:
            for task in tasks:
                task.cancel()
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
            app.state.body_reader.close()


def server_config(
    app: ASGIApp,
    limits: ServerLimits,
    say: Callable[[str], None],
    proxies: Sequence[str] = (),
    tls: ssl.SSLContext | None = None,
) -> uvicorn.Config:
    """Returns uvicorn's settings: its switches where it has them, `Connection` for the other limits.

    `say` is called where the system allows fewer connections. proxies: whose word about a client's address is taken.
    tls: None for plain connections; those of `Connection` encrypt by themselves, so uvicorn is told of none.
    """
    room = room_for(limits.max_connections)
    if room.connections < limits.max_connections:
        say(
            f"the system allows {room.connections} of {limits.max_connections} connections (max_connections); raise "
            f"its limit on descriptors (ulimit -n) for more"
        )
    per_client = limits.max_connections_per_client or max(room.connections // 2, 1)
    places = Places(room.connections, per_client, limits.request_timeout_s, limits.reading_timeout_s)
    config = uvicorn.Config(
        app,
        http=partial(Connection, places, tls),  # type: ignore[arg-type]  # it is only called
        ws="none",
        backlog=room.queue,
        log_config=None,
        log_level="warning",
        proxy_headers=bool(proxies),
        forwarded_allow_ips=",".join(proxies),
        access_log=False,
        lifespan="off",
    )
    quieten()
    return config


class _Server(uvicorn.Server):
    """Ends open requests by ending the engine: each gets its error as an answer, which a cancelled task cannot give.

    uvicorn's own `timeout_graceful_shutdown` must stay unset, for it cancels. Signals are not raised again after the
    end, as uvicorn would: a server that was asked to stop, and did, has succeeded.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        llm: AsyncLLM,
        feed: Feed,
        drain: Drain,
        drain_timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self._llm = llm
        self._feed = feed
        self._drain = drain
        self._drain_timeout_s = drain_timeout_s
        self._say = say
        self.num_signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.num_signals += 1
        self.should_exit = self._drain.has_begun = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:  # open connections stay, so that a request on one learns why it is refused
            server.close()
        for sock in sockets or ():
            sock.close()
        self._feed.close()  # its streams have no end of their own
        await self._until(lambda: not self._feed.num_watching, ANSWER_S)
        if self._llm.is_ready and self._busy():  # else nothing runs that could finish
            self._say(
                f"stopping: {self._busy()} connections have running answers, which may go on for "
                f"{self._drain_timeout_s:g} s; a second signal ends them at once"
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
