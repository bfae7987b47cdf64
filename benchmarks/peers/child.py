"""Runs one engine in this process and reports to its parent; needs the standard library and the engine.

    python -m benchmarks.peers.child ADAPTER EVENTS_FD

Standard input has one JSON object per line: first {"model", "settings"}, then any number of workloads {"name",
"prompts", "max_tokens", "arrivals_s"}, each run when it is read; at its end the process ends. Events are JSON lines
written to EVENTS_FD, times in seconds of `time.monotonic()`, which processes on one machine share.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections import deque
from itertools import count
from typing import Any

_keys = count(1)


def measure(engine: Any, workload: dict[str, Any]) -> list[dict[str, float]]:
    """Runs a workload; for each request its tokens, and when it arrived and the first and the last token came.

    Times are in seconds from the start. A request is added when it arrives, or after the step in which it does.
    """
    prompts, arrivals = workload["prompts"], workload["arrivals_s"]
    requests: list[dict[str, float]] = [
        {"tokens": 0, "arrival_s": at, "first_s": 0.0, "last_s": 0.0} for at in arrivals
    ]
    expected = deque(sorted(range(len(prompts)), key=arrivals.__getitem__))
    keys: dict[int, int] = {}
    begin = time.perf_counter()
    while expected or engine.has_work():
        now = time.perf_counter() - begin
        while expected and arrivals[expected[0]] <= now:
            index = expected.popleft()
            key = next(_keys)
            keys[key] = index
            engine.add(key, prompts[index], workload["max_tokens"][index])
        if not engine.has_work():
            time.sleep(max(0.0, arrivals[expected[0]] - now))
            continue
        for key, new_tokens in engine.step():
            if new_tokens:
                request = requests[keys[key]]
                request["last_s"] = time.perf_counter() - begin
                request["first_s"] = request["first_s"] or request["last_s"]
                request["tokens"] += new_tokens
    return requests


def main() -> None:
    events = os.fdopen(int(sys.argv[2]), "w", buffering=1)

    def tell(event: str, **more: Any) -> None:
        events.write(json.dumps({"event": event, "at_s": time.monotonic(), **more}) + "\n")

    job = json.loads(sys.stdin.readline())
    adapter = importlib.import_module(f"benchmarks.peers.adapters.{sys.argv[1]}_engine")
    engine = adapter.Engine(job["model"], job["settings"])
    measure(engine, {"prompts": [[504, 2365, 282, 4649, 314]], "max_tokens": [1], "arrivals_s": [0.0]})
    tell("first token", description=engine.description)
    # Compilers, allocators and thread pools have then seen prefill, decode and a batch.
    prompts = [list(range(1000 + n, 1200 + n)) for n in range(4)]
    measure(engine, {"prompts": prompts, "max_tokens": [8] * 4, "arrivals_s": [0.0] * 4})
    for line in sys.stdin:
        workload = json.loads(line)
        tell("begin")
        tell("end", requests=measure(engine, workload))
    events.close()
    sys.stdout.flush()
    # Engines' own threads and processes may take long to leave, or fail at it; nothing is left to be measured.
    os._exit(0)


if __name__ == "__main__":
    # vLLM starts its engine process by importing this file again.
    main()
