"""The process that starts a Ray cluster of this machine alone, and the engines in it, and calls them for the front end.
Started by `local`.

It is a process of its own because Ray ends it where its raylet dies, which must not end the server. It does not rely on
that: Ray sees an orderly end of its raylet, as where one of its agents has died, as none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pagemill.distributed.plan import FleetPlan
from pagemill.distributed.relay import Relay

OBJECT_STORE_BYTES = 80 << 20
"""Ray's least: batches are far below the size from which it would use it."""
APPLICATION = "pagemill"
RELAY = "relay"
"""Name of the socket by which the front end calls engines, in the folder of the fleet."""
NEEDED = {"gcs_server": "GCS", "raylet": "raylet"}
"""Processes of Ray without which a cluster goes on for no more than seconds, and what they are called."""
LOOK_S = 0.2
"""Seconds between two looks at them."""


class Said(NamedTuple):
    """Tells what runs, once all is ready (`description`), or why it does not, or no more (`error`)."""

    description: str | None
    error: str | None


def run(descriptor: int) -> NoReturn:
    """Starts what the other end of the socket asks for, and ends it when that asks again; ends at once with all that it
    has started where that is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as sock, sock.makefile("rwb") as stream:
        plan, folder = pickle.load(stream)
        threading.Thread(target=_end_with, args=(sock, folder), name="end", daemon=True).start()
        status = _serve(plan, folder, stream)
    sys.stderr.flush()
    os._exit(status)


def _serve(plan: FleetPlan, folder: str, stream: Any) -> int:
    try:
        _start(plan, folder, stream)
    except Exception as error:
        _say(stream, Said(None, str(error) or type(error).__name__))
        return 1
    _say(stream, Said("", None))
    stream.readline()
    _stop(plan.keeping_s())
    return 0


def _end_with(sock: socket.socket, folder: str) -> None:
    """Kills this process's group, in which Ray's processes are, once nobody is at the other end. Engines end with
    their replicas."""
    hung_up = select.poll()
    hung_up.register(sock, 0)
    hung_up.poll()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _start(plan: FleetPlan, folder: str, stream: Any) -> None:
    """Returns once all engines are there."""
    import ray
    from ray import serve

    from pagemill.distributed.app import ENGINE, application

    ray.init(
        address="local",
        num_cpus=1,  # nobody asks for any: replicas share the machine as their threads say
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(Path(folder, "ray")),  # one of its own: Ray lets everybody write there
        _node_ip_address="127.0.0.1",
    )
    threading.Thread(target=_watch, args=(stream,), name="watch", daemon=True).start()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    serve.start(proxy_location="Disabled", logging_config=quiet)
    relay = Relay(serve.get_deployment_handle(ENGINE, APPLICATION, _check_exists=False))
    path = Path(folder, RELAY)
    path.unlink(missing_ok=True)
    threading.Thread(target=lambda: asyncio.run(relay.run(str(path))), name="relay", daemon=True).start()
    try:
        serve.run(application(plan), name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        deployments = serve.status().applications[APPLICATION].deployments
        raise RuntimeError("".join(each.message for each in deployments.values()) or str(error)) from None


def _watch(stream: Any) -> None:
    """Ends this process where one that the cluster needs has died, and says which."""
    from ray._private import worker

    node = worker._global_node  # noqa: SLF001
    while not (dead := [NEEDED[name] for name, _ in node.dead_processes() if name in NEEDED]):
        time.sleep(LOOK_S)
    _say(stream, Said(None, f"Ray's {' and '.join(dead)} of this machine has died"))
    os._exit(1)


def _stop(keeping_s: float) -> None:
    """Ends all engines, and then the cluster. keeping_s: for so long they may write to disk."""
    import ray
    from ray import serve

    if keeping_s:  # `shutdown` waits for 30 s only
        serve.delete(APPLICATION, _blocking=False)
        deadline = time.monotonic() + keeping_s
        while APPLICATION in serve.status().applications and time.monotonic() < deadline:
            time.sleep(LOOK_S)
    serve.shutdown()
    ray.shutdown()


def _say(stream: Any, said: Said) -> None:
    pickle.dump(said, stream)
    stream.flush()
