"""ServerLimits: how much of the server's memory, descriptors and patience its clients may take."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from pagemill.arguments import Count, Positive, about, check_fields, suggest_arguments
from pagemill.errors import ConfigError
from pagemill.tenant_limits import DEFAULT_TENANT, TenantLimits, TenantsFile

NotNegative = Annotated[float, Meta(ge=0)]

OTHER_DESCRIPTORS = 64
"""Descriptors that are left for everything beside connections: files, the engine, logs."""
MACOS_DESCRIPTORS = 10240
"""Descriptors that macOS grants a process, although it says that there is no limit."""
LONGEST_QUEUE = 2048
"""Connections that the system may keep for the server to accept."""


@suggest_arguments
@dataclass(kw_only=True, frozen=True)
class ServerLimits:
    """Limits of one HTTP server. Raises `ConfigError` for a wrong value."""

    max_body_bytes: Annotated[Count, about("The longest body of a request, in bytes.")] = 8 << 20
    max_bodies_bytes: Annotated[
        Count, about("Bytes of the bodies of all open requests together; bodies of at most 64 KiB are not counted.")
    ] = 256 << 20
    max_connections: Annotated[
        Count, about("Connections that may be open; fewer where the system allows fewer descriptors (ulimit -n).")
    ] = 8192
    max_connections_per_client: Annotated[
        Count | None,
        about("Connections that one address (of IPv6: 64 bits) may have open. Default: half of max_connections."),
    ] = None
    max_waiting: Annotated[
        Count,
        about(
            "Sequences that may wait to run where no tenants file says how many; a request beyond is refused "
            "(HTTP 429)."
        ),
    ] = 8192
    request_timeout_s: Annotated[
        Positive, about("Seconds that a client may take to send a request's head, and as many to send its body.")
    ] = 30.0
    reading_timeout_s: Annotated[
        Positive,
        about("Seconds in which a client must take some of what waits for it, before its connection is closed."),
    ] = 60.0
    drain_timeout: Annotated[
        NotNegative,
        about(
            "Seconds that running answers may go on after the first signal to stop, while new requests get 503. A "
            "second signal ends them at once."
        ),
    ] = 30.0
    max_failed_keys: Annotated[
        Count,
        about(
            "Wrong API keys that one address (of IPv6: 64 bits) may send in a minute; beyond, all its requests are "
            "refused for the rest of that."
        ),
    ] = 30
    stuck_after_s: Annotated[
        Positive, about("Seconds without an answer from engine or tokenizer after which /health calls them stuck.")
    ] = 300.0

    def tenants(self, file: TenantsFile | None) -> dict[str, TenantLimits]:
        """Returns the limits of the tenants that there are at the start: those of a file, or one for everybody."""
        return {DEFAULT_TENANT: TenantLimits(max_waiting=self.max_waiting)} if file is None else file.limits

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_bodies_bytes is {self.max_bodies_bytes}, less than the {self.max_body_bytes} of one body "
                f"(max_body_bytes); raise max_bodies_bytes, or lower max_body_bytes",
                param="max_bodies_bytes",
            )


@dataclass(frozen=True)
class Room:
    """Counts what the system's descriptors suffice for. queue: connections that wait to be accepted."""

    connections: int
    queue: int


def room_for(connections: int) -> Room:
    """Raises the process's limit on descriptors as far as so many connections need and the system lets it, and returns
    what that suffices for."""
    wanted = connections + LONGEST_QUEUE + OTHER_DESCRIPTORS
    soft = _raise_descriptors(wanted)
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return Room(connections, LONGEST_QUEUE)
    left = max(soft - OTHER_DESCRIPTORS, 2)
    queue = min(LONGEST_QUEUE, max(left // 4, 1))
    return Room(min(connections, left - queue), queue)


def _raise_descriptors(wanted: int) -> int:
    """Raises the limit on descriptors towards `wanted`, by less where the system refuses more. Returns what it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return soft
    more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    while more > soft and not _set_descriptors(more, hard):
        more = MACOS_DESCRIPTORS if more > MACOS_DESCRIPTORS else more // 2
    return max(more, soft)


def _set_descriptors(soft: int, hard: int) -> bool:
    """Returns False if the system refuses that."""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (ValueError, OSError):
        return False
    return True
