"""The front end as a deployment of Ray Serve: the same HTTP application as on one machine, over a fleet of replicas."""

from __future__ import annotations

import contextlib
import sys
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
from pagemill.server.proxied import stand_behind_proxies

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve.handle import DeploymentHandle

_applications: list[FastAPI] = []
"""The one of this process, once its ingress has made it."""


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
        stand_behind_proxies(app, self._llm, keys, plan.tenants, AUDIT.info)
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
