"""Refuses settings of `pagemill serve` before a model is loaded for nothing."""

from __future__ import annotations

import errno
import socket

from pagemill.config import EngineConfig
from pagemill.errors import ConfigError
from pagemill.kvcache.sizing import check_sizes
from pagemill.server.access.server_access import ServerAccess
from pagemill.server.logs.output import ServerLogs


def check_settings(config: EngineConfig, access: ServerAccess, logs: ServerLogs) -> None:
    """Raises `ConfigError` for a size that nothing could be, a file that cannot be read, and a package that is missing.

    A chat template that is a single word may be the name of one of the model's own.
    """
    check_sizes(config)
    if config.chat_template is not None and not config.chat_template.isidentifier():
        from pagemill.text.tokenizer import read_template

        read_template(config.chat_template)
    access.certificate()
    if logs.otlp_traces_endpoint is not None:
        try:
            import pagemill.server.logs.traces  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"otlp_traces_endpoint needs OpenTelemetry, which is not installed ({error}); "
                f"pip install 'pagemill[otel]', or leave it out",
                param="otlp_traces_endpoint",
            ) from error


def check_device(name: str) -> None:
    """Raises `ConfigError` for a device that is not there. Where an engine is started, its own process looks for it:
    that takes torch."""
    if name not in ("auto", "cpu"):
        from pagemill.executor.backend import find_device

        find_device(name)


def require_free_port(host: str, port: int) -> None:
    """Raises `ConfigError`, before a model is loaded for nothing, if a server cannot listen on `host`:`port`. It names
    a free port nearby."""
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
