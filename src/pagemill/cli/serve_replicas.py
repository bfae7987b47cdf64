"""`pagemill serve --replicas`: several engines on this machine, behind one address."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from pagemill.errors import ConfigError
from pagemill.machine import usable_cores
from pagemill.server.logs.output import fields, logging_to

if TYPE_CHECKING:
    from pagemill.distributed.plan import FleetPlan
    from pagemill.server.routes.pins import FilePin

SHARE_OF_MEMORY = 0.4
"""Share of free memory that the KV pools of all replicas take together where nothing says how much."""
SIZES = ("kv_memory", "kv_cache_memory_bytes", "gpu_memory_utilization")


def plan_for(
    replicas: int, model: str, names: list[str], address: tuple[str, int], settings: dict[str, Any],
    pins: list[FilePin], **others: Any,
) -> FleetPlan:  # fmt: skip
    """Returns the plan of a fleet that shares this machine. Raises `ConfigError`.

    settings: of each engine; cores and memory are divided where they say nothing of them.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "replicas needs Ray, which is not installed; pip install 'pagemill[ray]', or leave --replicas out",
            param="replicas",
        )
    from pagemill.distributed.plan import FleetPlan

    # No host memory unless asked for: beside a GPU, each would take what is for all.
    shared: dict[str, Any] = {"num_threads": max(1, usable_cores() // replicas), "kv_host_memory": 0}
    if not any(size in settings for size in SIZES):
        shared["kv_memory"] = SHARE_OF_MEMORY / replicas
    plan = FleetPlan(
        model=model,
        names=names,
        settings={**shared, **settings},
        replicas=replicas,
        address=address,
        pins=pins,
        engine_resources={"num_cpus": 0},
        **others,
    )
    if plan.logs.otlp_traces_endpoint is not None:
        raise ConfigError(
            "otlp_traces_endpoint is not known to a fleet; leave it out, or serve one engine without --replicas",
            param="otlp_traces_endpoint",
        )
    plan.check()
    return plan


def serve_plan(plan: FleetPlan, url: str) -> None:
    """Serves a fleet until it is told to stop. url: its address here. Raises `ModelNotFoundError` and
    `EngineDeadError`."""
    from pagemill.cli.loading import invite, messages
    from pagemill.distributed.local import LOGGER, serve_fleet

    plan.engine_config()  # the model is fetched once, before the replicas load it

    def ready(description: str) -> None:
        about = f"{plan.replicas} replicas, each {description}"
        if plan.logs.log_format == "json":
            LOGGER.info("ready", extra=fields(model=plan.names[0], address=url, engine=about))
        else:
            invite(about, plan.names[0], url, has_keys=plan.access.has_keys(plan.tenants))

    with logging_to(sys.stderr, plan.logs):
        if plan.logs.log_format == "text":
            messages.print(f"starting {plan.replicas} replicas of {plan.names[0]}", style="dim")
        serve_fleet(plan, plan.restarts, ready)
