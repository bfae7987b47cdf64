"""Runs the application: listens first, loads the model behind it, ends both together."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from pagemill.engine.messages import EngineReady
from pagemill.errors import PagemillError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.server.access.api_keys import ApiKeys
from pagemill.server.access.connections import Connection, Places
from pagemill.server.access.hosts import AllowedHosts
from pagemill.server.access.limits import ServerLimits, room_for
from pagemill.server.access.server_access import ServerAccess, is_loopback
from pagemill.server.access.turns import ListeningConfig, Turns
from pagemill.server.app import create_app
from pagemill.server.lifecycle.drain import Drain
from pagemill.server.lifecycle.freed_memory import give_back_freed_memory
from pagemill.server.lifecycle.loop_lag import watch_loop_lag
from pagemill.server.lifecycle.reload import TenantsReload
from pagemill.server.lifecycle.signals import obey_signals
from pagemill.server.lifecycle.stopping import StoppingServer
from pagemill.server.logs.access_log import AccessLog, EndedRequest
from pagemill.server.logs.quiet import quieten
from pagemill.server.routes.pins import FilePin, pin
from pagemill.tenant_limits import TenantsFile

if TYPE_CHECKING:
    from pagemill.server.logs.traces import Traces


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
    traces: Traces | None = None,
    stop: asyncio.Event | None = None,
    on_listening: Callable[[], None] = lambda: None,
) -> None:
    """Serves on a socket that already listens, until SIGINT or SIGTERM, or until the engine is gone.

    The tenants file is read again when it changes, it and the certificate on SIGHUP. SIGUSR1 gives back the KV memory
    that running requests do not need, SIGUSR2 takes as much as at the start again.
    host: the name that the address was given by. traces: where spans of requests go, None for nowhere. stop: once it is
    set, the server stops as after a signal.
    `on_listening` is called when requests and signals are taken, `on_ready` when the model is loaded and `pins` are
    computed, `say` with what came of these signals, and where the system allows fewer connections than the limits.
    Raises what kept it from being ready, or `EngineDeadError`; returns after a signal to stop.
    """
    give_back_freed_memory()
    limits = limits or ServerLimits()
    access, on_loopback = access or ServerAccess(), is_loopback(sock.getsockname()[0])
    keys = ApiKeys(tenants, access, on_loopback=on_loopback)
    any_name = not access.allowed_hosts and (keys.are_there or not on_loopback)
    hosts = None if any_name else AllowedHosts([host, *access.allowed_hosts], access.allowed_origins)
    # Connections inherit it. Without it the system holds small parts back until the client, which waits 40 ms, has
    # acknowledged those before; asyncio sets it only where a socket names its protocol, and this one need not.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    app = create_app(llm, served_model_name, keys, limits, access, hosts, llm.config.lora_requests())
    drain = Drain(app)

    def ended(request: EndedRequest) -> None:
        app.state.metrics.observe_answer(request.path, request.status)
        if traces is not None:
            traces.observe(request)

    certificate = access.certificate()
    tls = None if certificate is None else certificate.context
    config = server_config(AccessLog(drain, ended), limits, say, access.forwarded_allow_ips, tls)
    server = StoppingServer(config, llm, app.state.feed, drain, limits.drain_timeout, say, on_listening)

    async def watch() -> PagemillError:
        try:
            await asyncio.to_thread(app.openapi)  # else the first request of each kind builds its route in the loop
            ready = await llm.ready()
            for body in pins:
                await pin(llm, body, body.tenant)
            on_ready(ready)
            return await llm.wait_dead()
        except PagemillError as error:
            return error
        finally:
            server.should_exit = True

    async with llm:
        watcher = asyncio.create_task(watch())
        tasks = {asyncio.create_task(watch_loop_lag(app.state.metrics.observe_lag, server.server_state.tasks))}
        if stop is not None:
            tasks.add(asyncio.create_task(server.stop_after(stop)))
        reload = None if tenants is None else TenantsReload(tenants, keys, llm, say)
        app.state.tenants_reload = reload
        if reload is not None:
            tasks.add(asyncio.create_task(reload.watch()))
        obey_signals(llm, reload, certificate, say, tasks)
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
    say("the server has stopped")


def server_config(
    app: ASGIApp,
    limits: ServerLimits,
    say: Callable[[str], None],
    proxies: Sequence[str] = (),
    tls: ssl.SSLContext | None = None,
) -> ListeningConfig:
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
    config = ListeningConfig(
        app,
        http=partial(Connection, places, Turns(), tls),
        ws="none",
        queue=room.queue,
        log_config=None,
        log_level="warning",
        proxy_headers=bool(proxies),
        forwarded_allow_ips=",".join(proxies),
        access_log=False,
        lifespan="off",
        server_header=False,
    )
    quieten()
    return config
