"""The front end as a deployment of Ray Serve: the same HTTP application as on one machine, over a fleet of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ray import serve

from pagemill.distributed.fleet_llm import FleetLLM
from pagemill.distributed.output import write_to
from pagemill.distributed.plan import FleetPlan
from pagemill.server.access.api_keys import ApiKeys
from pagemill.server.access.hosts import AllowedHosts
from pagemill.server.app import create_app
from pagemill.server.logs.output import AUDIT, logging_to
from pagemill.server.pauses import spare_streams
from pagemill.server.run import run_server

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve.handle import DeploymentHandle

_applications: list[FastAPI] = []
"""The one of this process, once its ingress has made it."""


class ListeningFrontEnd:
    """Listens at an address of its own, as `pagemill serve` does: with its limits, its TLS, its way to end.

    It has a thread for its event loop, which is asyncio's own: Ray Serve's is uvloop's, whose transports lack what
    bounds the memory of connections.
    """

    def __init__(self, replicas: DeploymentHandle[Any], plan: FleetPlan) -> None:
        assert plan.address is not None
        family, *_ = socket.getaddrinfo(*plan.address, type=socket.SOCK_STREAM)[0]
        self._sock = socket.create_server(plan.address, family=family)
        self._replicas = replicas
        self._plan = plan
        self._loop = asyncio.SelectorEventLoop()
        self._llm: FleetLLM | None = None
        self._stop = asyncio.Event()
        self._serving: Future[None] = Future()
        threading.Thread(target=self._run, name="front end", daemon=True).start()

    async def describe(self) -> str:
        """Waits until requests are answered, and returns what the engines are. Raises what kept them from loading."""
        while self._llm is None:
            await self.check_health()
            await asyncio.sleep(0.05)
        ready = asyncio.run_coroutine_threadsafe(self._llm.ready(), self._loop)
        return (await asyncio.wrap_future(ready)).description

    async def check_health(self) -> None:
        """Raises what ended the server. Ray Serve calls it, and starts another front end then."""
        if self._serving.done():
            self._serving.result()
            raise RuntimeError("the server has ended")

    async def __del__(self) -> None:
        """Refuses new requests, lets answers go on for a while, and ends."""
        self._loop.call_soon_threadsafe(self._stop.set)
        with contextlib.suppress(Exception):
            await asyncio.wrap_future(self._serving)

    def _run(self) -> None:
        try:
            asyncio.set_event_loop(self._loop)
            with _logging(self._plan):
                self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._serving.set_exception(error)
        else:
            self._serving.set_result(None)

    async def _serve(self) -> None:
        plan = self._plan
        assert plan.address is not None
        self._llm = _llm(self._replicas, plan)
        await run_server(
            *(self._llm, plan.names, self._sock, lambda ready: spare_streams(), AUDIT.info),
            *(plan.pins, plan.tenants, plan.limits, plan.access, plan.address[0]),
            stop=self._stop,
        )


class ProxiedFrontEnd:
    """Is asked through Ray Serve's proxies, which have the address, connections and TLS. It keeps keys, tenants, and
    limits on bodies."""

    def __init__(self, replicas: DeploymentHandle[Any], plan: FleetPlan) -> None:
        self._logging = contextlib.ExitStack()
        self._logging.enter_context(_logging(plan))
        self._llm = _llm(replicas, plan)
        keys = ApiKeys(plan.tenants, plan.access, on_loopback=False)
        hosts = AllowedHosts(plan.access.allowed_hosts, plan.access.allowed_origins)
        named = hosts if plan.access.allowed_hosts else None
        adapters = self._llm.config.lora_requests()
        app = create_app(self._llm, plan.names, keys, plan.limits, plan.access, named, adapters)
        self._body_reader = app.state.body_reader
        _applications[:] = [app]
        spare_streams()

    async def check_health(self) -> None:
        """Raises why requests cannot be answered any more. Ray Serve calls it."""
        if self._llm.error is not None:
            raise self._llm.error

    async def __del__(self) -> None:
        """Ends the connections to the replicas. Ray Serve calls it once no request is left."""
        await self._llm.shutdown()
        self._body_reader.close()
        self._logging.close()


def application() -> FastAPI:
    """Returns the application of this process's ingress, for Ray Serve to call."""
    return _applications[0]


proxied_ingress = serve.ingress(application)(ProxiedFrontEnd)
"""`ProxiedFrontEnd`, with its application where Ray Serve's proxies find it."""


def _llm(replicas: DeploymentHandle[Any], plan: FleetPlan) -> FleetLLM:
    settings = {**plan.all_settings(), **asdict(plan.restarts)}
    return FleetLLM(plan.model, replicas, plan.routing, plan.prefill_replicas, **settings)


def _logging(plan: FleetPlan) -> Any:
    """Makes this process log as the plan says."""
    write_to(plan.log_path)
    return logging_to(sys.stderr, plan.logs)
