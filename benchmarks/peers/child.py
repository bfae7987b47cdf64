"""Runs one engine over workloads in this process and reports to its parent; needs the standard library and the engine.

    python -m benchmarks.peers.child ADAPTER EVENTS_FD < job.json

The job: {"model", "settings", "workloads": [{"name", "prompts", "max_tokens"}]}. Events are JSON lines written to
EVENTS_FD, times in seconds of `time.monotonic()`, which processes on one machine share.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any


def measure(engine: Any, workload: dict[str, Any]) -> list[dict[str, float]]:
    """Runs a workload; for each request, its tokens and when the first and the last came, seconds from the start."""
    begin = time.perf_counter()
    requests: list[dict[str, float]] = [{"tokens": 0, "first_s": 0.0, "last_s": 0.0} for _ in workload["prompts"]]
    for index, new_tokens in engine.run(workload["prompts"], workload["max_tokens"]):
        if new_tokens:
            request = requests[index]
            request["last_s"] = time.perf_counter() - begin
            request["first_s"] = request["first_s"] or request["last_s"]
            request["tokens"] += new_tokens
    return requests


def main() -> None:
    events = os.fdopen(int(sys.argv[2]), "w", buffering=1)

    def tell(event: str, **more: Any) -> None:
        events.write(json.dumps({"event": event, "at_s": time.monotonic(), **more}) + "\n")

    job = json.load(sys.stdin)
    adapter = importlib.import_module(f"benchmarks.peers.adapters.{sys.argv[1]}_engine")
    engine = adapter.Engine(job["model"], job["settings"])
    measure(engine, {"prompts": [[504, 2365, 282, 4649, 314]], "max_tokens": [1]})
    tell("first token", description=engine.description)
    # Compilers, allocators and thread pools have then seen prefill, decode and a batch.
    measure(engine, {"prompts": [list(range(1000 + n, 1200 + n)) for n in range(4)], "max_tokens": [8] * 4})
    for workload in job["workloads"]:
        tell("begin")
        requests = measure(engine, workload)
        tell("end", workload=workload["name"], requests=requests)
    events.close()
    sys.stdout.flush()
    # Engines' own threads and processes may take long to leave, or fail at it; nothing is left to be measured.
    os._exit(0)


if __name__ == "__main__":
    # vLLM starts its engine process by importing this file again.
    main()
