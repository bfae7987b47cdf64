"""The process that starts a Ray cluster of this machine alone, and the fleet in it. Started by `local`.

It is a process of its own because Ray ends it where its raylet dies, which must not end the server.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
from typing import Any, NamedTuple, NoReturn

from pagemill.distributed.plan import FleetPlan

OBJECT_STORE_BYTES = 80 << 20
"""Ray's least: batches are far below the size from which it would use it."""
APPLICATION = "pagemill"


class Said(NamedTuple):
    """Tells once what runs, when all is ready (`description`), or why nothing will (`error`)."""

    description: str | None
    error: str | None


def run(descriptor: int) -> NoReturn:
    """Starts what the other end of the socket asks for, and ends it when that asks again, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as sock, sock.makefile("rwb") as stream:
        plan, folder = pickle.load(stream)
        status = _serve(plan, folder, stream)
    sys.stderr.flush()
    os._exit(status)


def _serve(plan: FleetPlan, folder: str, stream: Any) -> int:
    try:
        description = _start(plan, folder)
    except Exception as error:
        _say(stream, Said(None, str(error)))
        return 1
    _say(stream, Said(description, None))
    stream.readline()
    _stop()
    return 0


def _start(plan: FleetPlan, folder: str) -> str:
    """Returns what the engines are, once requests are answered."""
    import ray
    from ray import serve

    from pagemill.distributed.app import application

    ray.init(
        address="local",
        num_cpus=1,  # nobody asks for any: replicas share the machine as their threads say
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    serve.start(proxy_location="Disabled", logging_config=quiet)
    try:
        front_end = serve.run(application(plan), name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        deployments = serve.status().applications[APPLICATION].deployments
        raise RuntimeError("".join(each.message for each in deployments.values()) or str(error)) from None
    return str(front_end.describe.remote().result())


def _stop() -> None:
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


def _say(stream: Any, said: Said) -> None:
    pickle.dump(said, stream)
    stream.flush()
