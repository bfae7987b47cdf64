"""Makes a plan of the arguments of an application for Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pagemill.arguments import arguments_of
from pagemill.config import EngineConfig
from pagemill.distributed.plan import FleetPlan
from pagemill.errors import ConfigError, shown
from pagemill.frontend.supervisor import RestartLimits
from pagemill.server.access.limits import ServerLimits
from pagemill.server.access.server_access import ServerAccess
from pagemill.server.logs.output import ServerLogs
from pagemill.server.routes.models import check_served_names
from pagemill.tenant_limits import read_tenants_file

SECRET = "PAGEMILL_KV_TRANSFER_SECRET"
"""Names the variable with the secret of replicas; without it each start makes one."""
LEAST_SECRET = 32
"""Bytes of a secret that nobody guesses from what goes over the network."""

OWN = frozenset({
    "replicas", "min_replicas", "max_replicas", "served_model_name", "routing", "tenants", "prefill_replicas",
    "kv_transfer", "kv_transfer_host", "engine_resources", "front_end_resources",
})  # fmt: skip
"""Arguments of a fleet, beside those of engines and of the server."""
OF_PROXIES = (
    "host", "port", "ssl_certfile", "ssl_keyfile", "forwarded_allow_ips", "max_connections",
    "max_connections_per_client", "request_timeout_s", "reading_timeout_s",
)  # fmt: skip
"""Settings of `pagemill serve` that say how connections are treated: here they are Ray Serve's."""
RESOURCES = "an object of Ray's ray_actor_options, such as {num_cpus: 8}"
"""Says what the resources of a deployment are given as."""
OF_ONE_ENGINE = ("otlp_traces_endpoint", "pin_file")
"""Settings of `pagemill serve` that a fleet does not know."""


def plan_of(args: Mapping[str, Any], environment: Mapping[str, str]) -> FleetPlan:
    """Returns the plan that arguments ask for, with API keys from the environment where none are given.

    Raises `ConfigError`, also where nothing keeps others out: Ray Serve's proxies may be reached from elsewhere.
    """
    left = dict(args)
    _refuse_settings_of_proxies(left)
    model = left.pop("model", None)
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model is {shown(model)}; name one: model=smollm2-135m", param="model")
    names = left.pop("served_model_name", None) or [model]
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"served_model_name is {shown(names)}; it must be a text or a list of texts (put quotes around a number)",
            param="served_model_name",
        )
    check_served_names(names)
    tenants_file = _take(left, "tenants", str, "the path of a file")
    tenants = None if tenants_file is None else read_tenants_file(tenants_file)
    routing = left.pop("routing", "least-work")
    replicas = _replicas(left)
    transfer = _transfer(left, environment)
    groups: dict[str, dict[str, Any]] = {}
    for kind in (ServerLimits, ServerAccess, ServerLogs, RestartLimits, EngineConfig):
        declared = arguments_of(kind)
        groups[kind.__name__] = {name: left.pop(name) for name in [*left] if name in declared}
    access = ServerAccess.read(groups["ServerAccess"], environment)
    if not (access.allow_unauthenticated or access.has_keys(tenants)):
        raise ConfigError(
            "Ray Serve's proxies may be reached from elsewhere, and there is no API key; give one (PAGEMILL_API_KEY, "
            "api_key or tenants), or serve everybody with allow_unauthenticated=true",
            param="api_key",
        )
    plan = FleetPlan(
        model=model,
        names=names,
        settings=groups["EngineConfig"],
        replicas=replicas,
        routing=routing,
        tenants=tenants,
        limits=ServerLimits(**groups["ServerLimits"]),
        access=access,
        logs=ServerLogs(**groups["ServerLogs"]),
        restarts=RestartLimits(**groups["RestartLimits"]),
        engine_resources=_take(left, "engine_resources", dict, RESOURCES, {"num_cpus": 1}),
        front_end_resources=_take(left, "front_end_resources", dict, RESOURCES, {"num_cpus": 0}),
        **transfer,
    )
    if left:
        name = next(iter(left))
        known = sorted({each.name for each in fields(EngineConfig)} | OWN)
        raise ConfigError(f"there is no argument {shown(name)}; known are {', '.join(known)} and those of the server")
    plan.engine_config()
    return plan


def _take(args: dict[str, Any], name: str, kind: type, what: str, default: Any = None) -> Any:
    """Takes an argument of this kind out of the arguments. what: says in words what it must be."""
    given = args.pop(name, default)
    if given is not default and not isinstance(given, kind):
        raise ConfigError(f"{name} is {shown(given)}; it must be {what}", param=name)
    return given


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


def _transfer(args: dict[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Takes how replicas give each other blocks out of the arguments and the environment."""
    taken: dict[str, Any] = {}
    kinds: dict[str, tuple[type, str]] = {
        "kv_transfer": (bool, "true or false"),
        "kv_transfer_host": (str, "an address of a replica's machine"),
        "prefill_replicas": (int, "a number of replicas"),
    }
    for name in kinds.keys() & args.keys():
        taken[name] = _take(args, name, *kinds[name])
    if secret := environment.get(SECRET):
        taken["secret"] = secret.encode()
        if len(taken["secret"]) < LEAST_SECRET:
            raise ConfigError(
                f"{SECRET} has {len(taken['secret'])} bytes; it needs at least {LEAST_SECRET}, as "
                f"`openssl rand -hex 32` gives",
                param="kv_transfer",
            )
    return taken


def _refuse_settings_of_proxies(args: Mapping[str, Any]) -> None:
    for name in OF_PROXIES:
        if name in args:
            raise ConfigError(
                f"{name} concerns connections, which are Ray Serve's proxies'; leave it out, and set theirs "
                f"(http_options)",
                param=name,
            )
    for name in OF_ONE_ENGINE:
        if name in args:
            raise ConfigError(
                f"{name} is not known to a fleet; leave it out, or serve one engine by pagemill serve", param=name
            )
