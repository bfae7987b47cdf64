"""`pagemill serve`."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagemill.arguments import arguments_of
from pagemill.cli.options import (
    ModelArgument,
    access_options,
    engine_options,
    log_options,
    restart_options,
    run,
    server_options,
)
from pagemill.cli.serve_checks import check_device, check_settings, require_free_port
from pagemill.cli.serve_replicas import plan_for, serve_plan
from pagemill.cli.setting_sources import take_settings
from pagemill.cli.show_config import lines_of
from pagemill.config import EngineConfig, config_for
from pagemill.errors import ConfigError
from pagemill.frontend.supervisor import RestartLimits
from pagemill.server.access.limits import ServerLimits
from pagemill.server.access.server_access import ServerAccess
from pagemill.server.logs.output import AUDIT, ServerLogs, fields, logging_to
from pagemill.server.pauses import spare_streams
from pagemill.tenant_limits import TenantsFile, read_tenants_file

if TYPE_CHECKING:
    from pagemill.engine.messages import EngineReady
    from pagemill.server.logs.traces import Traces
    from pagemill.server.routes.pins import FilePin


LOGGER = logging.getLogger(__name__)

DEFAULTS = {
    name.replace("_", "-"): argument.default
    for declared in (EngineConfig, ServerLimits, ServerAccess, ServerLogs)
    for name, argument in arguments_of(declared).items()
}
"""What holds where a flag is not given, by flag."""


@log_options
@access_options
@restart_options
@server_options
@engine_options
def serve(
    model: ModelArgument,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all. Others than loopback want API keys.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes any free one.")
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", help="The model's name in the API; several may be given. Default: MODEL."),
    ] = None,
    pin_file: Annotated[
        Path | None,
        typer.Option("--pin-file", help='Prefixes to pin at the start: [{"name": …, "prompt" or "messages": …}, …].'),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            min=1,
            help="Engines on this machine, behind one address; needs pagemill[ray]. Default: one, without Ray.",
        ),
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            "--routing",
            help="Which replica a request goes to: least-work (what it finds there counts), or round-robin. "
            "Default: least-work.",
        ),
    ] = None,
    prefill_replicas: Annotated[
        int | None,
        typer.Option(
            "--prefill-replicas",
            min=0,
            help="How many of the replicas compute prompts alone; the others go on with them. Default: 0, all do both.",
        ),
    ] = None,
    kv_transfer: Annotated[
        bool | None,
        typer.Option(
            "--kv-transfer/--no-kv-transfer",
            help="Replicas fetch KV blocks from each other where that is faster than computing them. Default: on.",
        ),
    ] = None,
    kv_transfer_host: Annotated[
        str | None,
        typer.Option(
            "--kv-transfer-host",
            help="Address on which replicas listen, for each other's KV blocks and the front end. Default: loopback.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            callback=take_settings,
            is_eager=True,
            help="YAML file of these settings, MODEL included, by their flags' names. Flags come before it, and so do "
            "variables of the environment, such as PAGEMILL_SERVE_PORT for --port.",
        ),
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print all settings, and where each comes from, and leave.")
    ] = False,
    *,
    context: typer.Context,
    settings: dict[str, Any],
    limits: ServerLimits,
    restarts: dict[str, Any],
    access: ServerAccess,
    logs: ServerLogs,
) -> None:
    """Serve a model through OpenAI's API."""
    from pagemill.server.routes.models import check_served_names
    from pagemill.server.routes.pins import read_pins

    if pin_file is not None and not pin_file.is_file():
        raise ConfigError(f"pin_file is {str(pin_file)!r}, which is no file; name one", param="pin_file")
    given = {
        "routing": routing,
        "prefill_replicas": prefill_replicas,
        "kv_transfer": kv_transfer,
        "kv_transfer_host": kv_transfer_host,
    }
    fleet: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if fleet and replicas is None:
        name, value = next(iter(fleet.items()))
        raise ConfigError(
            f"{name} is {value!r}, which concerns several replicas, and there is one engine; give --replicas, or leave "
            f"--{name.replace('_', '-')} out",
            param=name,
        )
    engine = config_for("pagemill serve", model, settings)
    names = served_model_name or [model]
    check_served_names(names)
    check_settings(engine, access, logs)
    tenants = read_tenants_file(settings["tenants"]) if "tenants" in settings else None
    require_free_port(host, 0 if show_config else port)  # a server with these settings may be running
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    access.check_address(str(address[0]), tenants)
    pins = [] if pin_file is None else read_pins(pin_file)
    plan = None
    if replicas is not None:
        port = port or free_port(host)
        who: dict[str, Any] = {"tenants": tenants, "limits": limits, "access": access, "logs": logs}
        who["restarts"] = RestartLimits(**restarts)
        engines = {name: value for name, value in settings.items() if name != "tenants"}
        plan = plan_for(replicas, model, names, (host, port), engines, pins, **fleet, **who)
    if show_config:
        check_device(engine.device)
        typer.echo("\n".join(lines_of(context, DEFAULTS)))
    elif plan is not None:
        scheme = "http" if access.ssl_certfile is None else "https"
        serve_plan(plan, url_of(scheme, str(address[0]), port, here=True))
    else:
        with socket.create_server((host, port), family=family) as sock, logging_to(sys.stderr, logs):
            run(_serve(model, names, sock, host, {**settings, **restarts}, pins, tenants, limits, access, logs))


async def _serve(
    model: str,
    names: list[str],
    sock: socket.socket,
    host: str,
    settings: dict[str, Any],
    pins: list[FilePin],
    tenants: TenantsFile | None,
    limits: ServerLimits,
    access: ServerAccess,
    logs: ServerLogs,
) -> None:
    from pagemill.cli.loading import LoadingBar, invite
    from pagemill.frontend.async_llm import AsyncLLM
    from pagemill.server.run import run_server

    traces = None if logs.otlp_traces_endpoint is None else _traces_to(logs.otlp_traces_endpoint)

    scheme = "http" if access.ssl_certfile is None else "https"
    listening, address = (url_of(scheme, *sock.getsockname()[:2], here=here) for here in (False, True))
    with LoadingBar(names[0]) as bar:

        def tell() -> None:
            LOGGER.info("listening; the model is loading", extra=fields(model=names[0], address=listening))

        def announce(ready: EngineReady) -> None:
            bar.stop()
            spare_streams()
            if logs.log_format == "json":
                LOGGER.info("ready", extra=fields(model=names[0], address=listening, engine=ready.description))
                return
            invite(ready.description, names[0], address, has_keys=access.has_keys(tenants))

        settings = {**settings, "tenants": limits.tenants(tenants)}
        llm = AsyncLLM(model, on_progress=bar, **settings)
        try:
            await run_server(
                llm, names, sock, announce, AUDIT.info, pins, tenants, limits, access, host, traces, on_listening=tell
            )
        finally:
            if traces is not None:
                await asyncio.to_thread(traces.close)


def _traces_to(endpoint: str) -> Traces:
    """Returns what sends spans to a collector."""
    from pagemill.server.logs.traces import Traces, provider_for

    return Traces(provider_for(endpoint))


def url_of(scheme: str, host: str, port: int, *, here: bool) -> str:
    """Returns a listening address as a URL. here: as this machine reaches it, if it stands for all addresses."""
    if here and ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def free_port(host: str) -> int:
    """Returns a port of this address that nobody listens at."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as sock:
        return int(sock.getsockname()[1])
