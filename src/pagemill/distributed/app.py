"""The application for Ray Serve: `serve run pagemill.distributed.app:build model=smollm2-135m replicas=3`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import yaml
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from pagemill.arguments import arguments_of
from pagemill.config import EngineConfig
from pagemill.distributed.front_end import ListeningFrontEnd, proxied_ingress
from pagemill.distributed.plan import FleetPlan
from pagemill.distributed.replica import EngineReplica, ScaledReplica
from pagemill.distributed.routing import ROUTING_POLICIES
from pagemill.errors import ConfigError, shown
from pagemill.server.access.limits import ServerLimits
from pagemill.server.access.server_access import ServerAccess
from pagemill.server.logs.output import ServerLogs
from pagemill.server.routes.models import check_served_names
from pagemill.tenant_limits import read_tenants_file

FRONT_END, ENGINE = "FrontEnd", "Engine"
"""Names of the two deployments."""
MAX_CALLS = 10_000
"""Calls that a replica takes at once: a stream for each front end, and what these send. Requests are not calls."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 60.0
"""How often Ray Serve asks for health, and after how long without an answer it starts another replica."""
ENDING_S = 15.0
"""Seconds, beside those in which answers may go on, in which a replica may end."""
AUTOSCALER = "pagemill.distributed.autoscaling:by_queue_and_memory"


def build(args: Mapping[str, Any]) -> serve.Application:
    """Returns the application that these arguments ask for.

    Beside `model` they are: `replicas`, or `min_replicas` and `max_replicas`; `routing`; `served_model_name`;
    `tenants`, a file; `engine_resources` and `front_end_resources`, Ray's actor options; and all settings of
    `pagemill serve` that concern neither its address nor its connections. Texts are read as YAML, since a command line
    has nothing else. Raises `ConfigError`.
    """
    return application(plan_of({name: _value(value) for name, value in args.items()}))


def plan_of(args: Mapping[str, Any]) -> FleetPlan:
    """Returns the plan that arguments ask for. Raises `ConfigError`."""
    left = dict(args)
    model = left.pop("model", None)
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model is {shown(model)}; name one: model=smollm2-135m", param="model")
    names = left.pop("served_model_name", None) or [model]
    names = [names] if isinstance(names, str) else names
    check_served_names(names)
    tenants = left.pop("tenants", None)
    routing = left.pop("routing", "least-work")
    if routing not in ROUTING_POLICIES:
        raise ConfigError(f"routing is {shown(routing)}; it must be one of {', '.join(ROUTING_POLICIES)}")
    replicas = _replicas(left)
    groups: dict[str, dict[str, Any]] = {}
    for kind in (ServerLimits, ServerAccess, ServerLogs, EngineConfig):
        declared = arguments_of(kind)
        groups[kind.__name__] = {name: left.pop(name) for name in [*left] if name in declared}
    plan = FleetPlan(
        model=model,
        names=names,
        settings=groups["EngineConfig"],
        replicas=replicas,
        routing=routing,
        tenants=None if tenants is None else read_tenants_file(tenants),
        limits=ServerLimits(**groups["ServerLimits"]),
        access=ServerAccess(**groups["ServerAccess"]),
        logs=ServerLogs(**groups["ServerLogs"]),
        engine_resources=left.pop("engine_resources", {"num_cpus": 1}),
        front_end_resources=left.pop("front_end_resources", {"num_cpus": 0}),
    )
    if left:
        name = next(iter(left))
        known = sorted({each.name for each in fields(EngineConfig)} | {"replicas", "routing", "tenants"})
        raise ConfigError(f"there is no argument {shown(name)}; known are {', '.join(known)} and those of the server")
    plan.engine_config()
    return plan


def application(plan: FleetPlan) -> serve.Application:
    """Returns the application of a plan: a front end, and engines behind it. Raises `ConfigError`."""
    scaled: dict[str, Any] = {"num_replicas": plan.replicas}
    if isinstance(plan.replicas, tuple):
        least, most = plan.replicas
        policy = AutoscalingPolicy(policy_function=AUTOSCALER)
        scaled = {"autoscaling_config": AutoscalingConfig(min_replicas=least, max_replicas=most, policy=policy)}
    ending: dict[str, Any] = {
        "graceful_shutdown_timeout_s": plan.limits.drain_timeout + ENDING_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_ongoing_requests": MAX_CALLS,
    }
    engine = serve.deployment(
        ScaledReplica if isinstance(plan.replicas, tuple) else EngineReplica,
        name=ENGINE,
        ray_actor_options=dict(plan.engine_resources),
        request_router_config=RequestRouterConfig(
            request_router_class="pagemill.distributed.request_router:NamedReplicaRouter"
        ),
        **scaled,
        **ending,
    )
    front_end = serve.deployment(
        ListeningFrontEnd if plan.address is not None else proxied_ingress,
        name=FRONT_END,
        num_replicas=1,
        ray_actor_options=dict(plan.front_end_resources),
        **ending,
    )
    return front_end.bind(engine.bind(plan.engine_config(), plan.log_path), plan)


def _replicas(args: dict[str, Any]) -> int | tuple[int, int]:
    """Takes how many replicas there are out of the arguments."""
    least, most = args.pop("min_replicas", None), args.pop("max_replicas", None)
    count = args.pop("replicas", None)
    if (least is None) != (most is None) or (least is not None and count is not None):
        raise ConfigError("give replicas, or both min_replicas and max_replicas", param="replicas")
    numbers = (
        {"replicas": 1 if count is None else count} if least is None else {"min_replicas": least, "max_replicas": most}
    )
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ConfigError(f"{name} is {shown(number)}; it must be an integer from 1 on", param=name)
    if least is None:
        return numbers["replicas"]
    if least > most:
        raise ConfigError(f"min_replicas is {least}, more than max_replicas, {most}; lower it", param="min_replicas")
    return least, most


def _value(value: Any) -> Any:
    """Returns what a text of a command line says."""
    return yaml.safe_load(value) if isinstance(value, str) else value
