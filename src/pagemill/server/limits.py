"""ServerLimits: how much of the server's memory, descriptors and patience its clients may take."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from typing import Annotated

from pagemill.arguments import Count, Positive, about, check_fields, suggest_arguments
from pagemill.errors import ConfigError

OTHER_DESCRIPTORS = 64
"""Descriptors that are left for everything beside connections: files, the engine, logs."""
LONGEST_QUEUE = 2048
"""Connections that the system may keep for the server to accept; all of them may be accepted at once."""


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
        Count | None, about("Connections that one address may have open. Default: half of max_connections.")
    ] = None
    request_timeout_s: Annotated[
        Positive, about("Seconds that a client may take to send a request's head, and as many to send its body.")
    ] = 30.0
    reading_timeout_s: Annotated[
        Positive,
        about("Seconds that a client may leave what is sent to it unread, before its connection is closed."),
    ] = 60.0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


@dataclass(frozen=True)
class Room:
    """What the system's descriptors suffice for. queue: connections that wait to be accepted."""

    connections: int
    queue: int


def room_for(connections: int) -> Room:
    """Raises the process's limit on descriptors as far as so many connections need and the system lets it, and returns
    what that suffices for."""
    wanted = connections + LONGEST_QUEUE + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS says "infinity" and takes less
            more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return Room(connections, LONGEST_QUEUE)
    left = max(soft - OTHER_DESCRIPTORS, 2)
    queue = min(LONGEST_QUEUE, max(left // 4, 1))
    return Room(min(connections, left - queue), queue)
