"""The application for Ray Serve: `serve run pagemill.distributed.app:build model=smollm2-135m replicas=3`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import yaml
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from pagemill.distributed.front_end import proxied_ingress
from pagemill.distributed.plan import FleetPlan
from pagemill.distributed.plan_arguments import plan_of
from pagemill.distributed.replica import EngineReplica, ScaledReplica

FRONT_END, ENGINE = "FrontEnd", "Engine"
"""Names of the two deployments."""
MAX_CALLS = 10_000
"""Calls that a replica takes at once: a stream for each front end, and what these send. Requests are not calls."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 60.0
"""Seconds between two questions of Ray Serve for health, and those without an answer after which it starts another
replica."""
ENDING_S = 15.0
"""Seconds, beside those in which answers may go on and blocks are written to disk, in which a replica may end."""
AUTOSCALER = "pagemill.distributed.autoscaling:by_queue_and_memory"


def build(args: Mapping[str, Any]) -> serve.Application:
    """Returns the application that these arguments ask for.

    Beside `model` they are: `replicas`, or `min_replicas` and `max_replicas`; `routing`; `served_model_name`;
    `tenants`, a file; `engine_resources` and `front_end_resources`, Ray's actor options; and all settings of
    `pagemill serve` that concern neither its address nor its connections. Texts are read as YAML, since a command line
    has nothing else. API keys may also come from the environment of the process that builds it. Raises `ConfigError`.
    """
    return application(plan_of({name: _value(value) for name, value in args.items()}, os.environ))


def application(plan: FleetPlan) -> serve.Application:
    """Returns the application of a plan: engines, and before them a front end, unless that listens by itself. Raises
    `ConfigError`."""
    scaled: dict[str, Any] = {"num_replicas": plan.replicas}
    if isinstance(plan.replicas, tuple):
        least, most = plan.replicas
        policy = AutoscalingPolicy(policy_function=AUTOSCALER)
        scaled = {"autoscaling_config": AutoscalingConfig(min_replicas=least, max_replicas=most, policy=policy)}
    ending_s = plan.limits.drain_timeout + ENDING_S
    ending: dict[str, Any] = {
        "graceful_shutdown_timeout_s": ending_s,
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
        **(ending | {"graceful_shutdown_timeout_s": ending_s + plan.keeping_s()}),
    )
    engines = engine.bind(plan.engine_config(), plan.log_path, plan.peering(), plan.host())
    if plan.address is not None:
        return engines
    front_end = serve.deployment(
        proxied_ingress,
        name=FRONT_END,
        num_replicas=1,
        ray_actor_options=dict(plan.front_end_resources),
        **ending,
    )
    return front_end.bind(engines, plan)


def _value(value: Any) -> Any:
    """Returns what a text of a command line says."""
    return yaml.safe_load(value) if isinstance(value, str) else value
