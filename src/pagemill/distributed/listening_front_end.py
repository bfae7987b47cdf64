"""The front end of a fleet on this machine: a process that answers requests as `pagemill serve` does with one engine.

Started by `local`. It is in no Ray cluster, so it outlives that of its replicas: requests wait for the next one.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
import threading
from dataclasses import asdict
from typing import Any, NoReturn

from pagemill.distributed.driver import Said
from pagemill.distributed.fleet_llm import FleetLLM
from pagemill.distributed.plan import FleetPlan
from pagemill.distributed.relay import RelayedHandle
from pagemill.engine.messages import EngineReady
from pagemill.errors import PagemillError
from pagemill.server.logs.output import AUDIT, logging_to
from pagemill.server.pauses import spare_streams
from pagemill.server.run import run_server


def run(descriptor: int) -> NoReturn:
    """Serves on the socket that the other end sends, until that asks for the end; ends at once where that is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as parent:
        _, (listening,), *_ = socket.recv_fds(parent, 1, 1)
        with socket.socket(fileno=listening) as sock, parent.makefile("rwb") as stream:
            plan, relay_path = pickle.load(stream)
            with logging_to(sys.stderr, plan.logs):
                status = asyncio.run(_serve(plan, relay_path, sock, stream))
    sys.stderr.flush()
    os._exit(status)


async def _serve(plan: FleetPlan, relay_path: str, sock: socket.socket, stream: Any) -> int:
    assert plan.address is not None
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def say(said: Said) -> None:
        pickle.dump(said, stream)
        stream.flush()

    def ready(facts: EngineReady) -> None:
        spare_streams()
        say(Said(facts.description, None))

    def obey() -> None:
        if not stream.readline():
            os._exit(1)
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=obey, name="orders", daemon=True).start()
    try:
        settings = {**plan.all_settings(), **asdict(plan.restarts)}
        llm = FleetLLM(plan.model, RelayedHandle(relay_path), plan.routing, plan.prefill_replicas, **settings)
        await run_server(
            *(llm, plan.names, sock, ready, AUDIT.info),
            *(plan.pins, plan.tenants, plan.limits, plan.access, plan.address[0]),
            stop=stop,
        )
    except PagemillError as error:
        say(Said(None, str(error)))
        return 1
    return 0
