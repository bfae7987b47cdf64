"""FleetPlan: everything that decides what a fleet of replicas is, as it travels to the processes that make it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagemill.config import EngineConfig, config_for
from pagemill.distributed.routing import ROUTING_POLICIES, RoutingPolicy
from pagemill.engine.messages import Peering
from pagemill.errors import ConfigError, shown
from pagemill.frontend.process_client import KEEPING_TIMEOUT_S
from pagemill.frontend.supervisor import RestartLimits
from pagemill.hub import resolve_model
from pagemill.server.access.limits import ServerLimits
from pagemill.server.access.server_access import ServerAccess
from pagemill.server.logs.output import ServerLogs
from pagemill.server.routes.pins import FilePin
from pagemill.tenant_limits import TenantsFile

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """Says what is served, by how many replicas, and to whom.

    settings: of the engines, but for the model. replicas: how many there are, or the least and the most of them,
    between which Ray Serve chooses. address: host and port where the front end itself listens; None: it is asked
    through Ray Serve's proxies. engine_resources, front_end_resources: `ray_actor_options`. log_path: a file or pipe
    to which all processes write what they have to say; None: where Ray puts it. kv_transfer: whether replicas fetch
    blocks from each other; kv_transfer_host: the address of a replica's machine on which it gives them, and takes
    connections of front ends; None: loopback where the front end listens on this machine, else that of the node in the
    Ray cluster. secret: what replicas know each other by, another at each start. prefill_replicas: how many replicas
    compute prompts alone. Raises `ConfigError` for a routing that there is not, and for prompts that nobody goes on
    with.
    """

    model: str
    names: list[str]
    settings: Mapping[str, Any]
    replicas: int | tuple[int, int]
    routing: RoutingPolicy = "least-work"
    address: tuple[str, int] | None = None
    tenants: TenantsFile | None = None
    pins: list[FilePin] = field(default_factory=list)
    limits: ServerLimits = field(default_factory=ServerLimits)
    access: ServerAccess = field(default_factory=ServerAccess)
    logs: ServerLogs = field(default_factory=ServerLogs)
    restarts: RestartLimits = field(default_factory=RestartLimits)
    engine_resources: Mapping[str, Any] = field(default_factory=dict)
    front_end_resources: Mapping[str, Any] = field(default_factory=lambda: {"num_cpus": 0})
    log_path: str | None = None
    prefill_replicas: int = 0
    kv_transfer: bool = True
    kv_transfer_host: str | None = None
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def __post_init__(self) -> None:
        if self.routing not in ROUTING_POLICIES:
            known = " or ".join(ROUTING_POLICIES)
            raise ConfigError(f"routing is {shown(self.routing)}; it must be {known}", param="routing")
        least = self.replicas if isinstance(self.replicas, int) else self.replicas[0]
        if isinstance(self.prefill_replicas, bool) or self.prefill_replicas < 0:
            raise ConfigError(
                f"prefill_replicas is {self.prefill_replicas}; it must be an integer from 0 on",
                param="prefill_replicas",
            )
        if self.prefill_replicas >= max(1, least):
            raise ConfigError(
                f"prefill_replicas is {self.prefill_replicas} of {least} replicas; one at least must go on with the "
                f"prompts that these compute: lower it, or raise replicas",
                param="prefill_replicas",
            )
        if self.kv_transfer_host in ("0.0.0.0", "::", "[::]"):
            raise ConfigError(
                f"kv_transfer_host is {self.kv_transfer_host}, by which no replica finds another; give an address, or "
                f"a name that each machine knows as its own",
                param="kv_transfer_host",
            )
        if self.prefill_replicas and not self.kv_transfer:
            raise ConfigError(
                "prefill_replicas compute prompts for others, which fetch the blocks; leave kv_transfer on",
                param="prefill_replicas",
            )

    def all_settings(self) -> dict[str, Any]:
        """Returns the settings of a front end: the engines', and the tenants' limits."""
        return {**self.settings, "tenants": self.limits.tenants(self.tenants)}

    def peering(self) -> Peering | None:
        """Returns how replicas give each other blocks; None if they do not, or if there is only one."""
        if not self.kv_transfer or self.replicas == 1:
            return None
        return Peering(self.secret, self.host())

    def host(self) -> str:
        """Returns the address at which replicas listen; "" for that of their node in the Ray cluster."""
        return self.kv_transfer_host or (LOOPBACK if self.address is not None else "")

    def keeping_s(self) -> float:
        """Returns how long engines may take at their end to write what they hold to disk. Raises `ConfigError`."""
        return 0.0 if self.check().kv_disk_memory is None else KEEPING_TIMEOUT_S

    def engine_config(self) -> EngineConfig:
        """Returns the settings of a replica's engine. Raises `ConfigError` and `ModelNotFoundError`."""
        config = self.check()
        config.model = str(resolve_model(self.model))
        return config

    def check(self) -> EngineConfig:
        """Returns the settings of a replica's engine, with the model as it is named. Raises `ConfigError`."""
        config = config_for("a replica", self.model, self.all_settings())
        if self.prefill_replicas and (wrong := _why_no_block_can_be_had(config)) is not None:
            raise ConfigError(
                f"prefill_replicas is {self.prefill_replicas}, but {wrong}, so the others would compute each prompt "
                f"again; leave prefill_replicas out",
                param="prefill_replicas",
            )
        return config


def _why_no_block_can_be_had(config: EngineConfig) -> str | None:
    """Returns why replicas with these settings can fetch nothing that another has just computed; None if they can."""
    if not config.enable_prefix_caching:
        return "enable_prefix_caching is off"
    speculation = config.asked_drafts
    return "a draft model's blocks do not travel" if speculation and speculation.method == "draft_model" else None
