"""Says at once that a port is taken, before a model is loaded for nothing."""

from __future__ import annotations

import errno
import socket

from pagemill.errors import ConfigError


def require_free_port(host: str, port: int) -> None:
    """Raises ConfigError if a server cannot listen on `host`:`port`, naming a port near by that is free."""
    reason = _why_not(host, port)
    if reason is None:
        return
    if reason.errno == errno.EADDRINUSE:
        free = next((p for p in range(port + 1, min(port + 100, 65536)) if _why_not(host, p) is None), None)
        way_out = f"; stop what listens there, or take another: --port {free}" if free else "; stop what listens there"
        raise ConfigError(f"port {port} on {host} is in use{way_out}", param="port")
    if reason.errno == errno.EACCES:
        raise ConfigError(f"port {port} on {host} needs more rights than you have; take one above 1023", param="port")
    raise ConfigError(f"cannot listen on {host}:{port} ({reason}); choose another --host or --port", param="host")


def _why_not(host: str, port: int) -> OSError | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a port whose last connections are still closing is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error
    return None
