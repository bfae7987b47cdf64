"""Measures pagemill and its peers side by side: every engine in turn, in its own process, on the same workloads.

    python -m benchmarks.peers.run [--engines pagemill,vllm,openvino,transformers] [--workloads one,two,mixed]
                                   [--rounds 3] [--out benchmarks/results/peers]

Writes OUT.json (every request of every round), OUT.md (medians over the rounds, and pagemill's ratio to each peer) and
OUT.png. In each round every engine starts anew, so that a slow quarter of an hour of a shared machine hits all of them.
The peers are installed by `python -m benchmarks.peers.install`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from benchmarks.peers.engines import ENGINES, EngineSetup, model_paths, process_environment
from benchmarks.peers.machine import describe_machine, resident_bytes
from benchmarks.peers.report import write_report
from benchmarks.peers.workloads import SHAPES, STANDARD, Workload, make, tokenize

from pagemill.hub import resolve_model

ROOT = Path(__file__).parents[2]
MEMORY_INTERVAL_S = 0.2


class EngineFailed(RuntimeError):
    """The engine's process ended too early, took too long, or returned other numbers of tokens than were asked for."""


def run_engine(setup: EngineSetup, workloads: list[Workload], log: Path, timeout_s: float) -> dict[str, Any]:
    """Starts an engine, runs the workloads one after the other, ends it.

    Returns {"description", "first_token_s", "workloads": {name: {"wall_s", "peak_bytes", "requests"}}}.
    Raises EngineFailed; what the engine printed is in `log`.
    """
    job = {
        "model": model_paths(),
        "settings": setup.settings,
        "workloads": [{"name": w.name, "prompts": w.prompts, "max_tokens": w.max_tokens} for w in workloads],
    }
    read, write = os.pipe()
    with log.open("w") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            [setup.python, "-m", "benchmarks.peers.child", setup.adapter, str(write)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[write],
            cwd=ROOT,
            env=process_environment(setup),
            start_new_session=True,
            text=True,
        )
        os.close(write)
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(job))
            process.stdin.close()
            found = _follow(process, read, started, timeout_s)
        except (BrokenPipeError, EngineFailed) as error:
            raise EngineFailed(f"{error}; see {log}") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(read)
    for workload in workloads:
        check_tokens(workload, found["workloads"][workload.name]["requests"])
    return found


def check_tokens(workload: Workload, requests: list[dict[str, float]]) -> None:
    """Raises EngineFailed unless every request got exactly the tokens that it asked for."""
    pairs = enumerate(zip([int(request["tokens"]) for request in requests], workload.max_tokens, strict=True))
    wrong = [(index, got, asked) for index, (got, asked) in pairs if got != asked]
    if wrong:
        raise EngineFailed(f"{workload.name}: (request, tokens returned, tokens asked): {wrong[:5]}")


def _follow(process: subprocess.Popen[str], events: int, started: float, timeout_s: float) -> dict[str, Any]:
    """Reads the child's events until its last, and watches its memory meanwhile."""
    found: dict[str, Any] = {"workloads": {}}
    tree = psutil.Process(process.pid)
    begin_s, peak, partial = started, 0, b""
    selector = selectors.DefaultSelector()
    selector.register(events, selectors.EVENT_READ)
    while True:
        if time.monotonic() - started > timeout_s:
            raise EngineFailed(f"not done after {timeout_s:.0f} s")
        ready = selector.select(MEMORY_INTERVAL_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            peak = max(peak, resident_bytes(tree))
        if not ready:
            continue
        chunk = os.read(events, 1 << 16)
        if not chunk:
            break
        *lines, partial = (partial + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["event"] == "first token":
                found |= {"description": event["description"], "first_token_s": event["at_s"] - started}
            elif event["event"] == "begin":
                begin_s, peak = event["at_s"], 0
            else:
                found["workloads"][event["workload"]] = {
                    "wall_s": event["at_s"] - begin_s,
                    "peak_bytes": peak,
                    "requests": event["requests"],
                }
    if process.wait() != 0:
        raise EngineFailed(f"exit status {process.returncode}")
    return found


def names(text: str, known: Any, what: str) -> list[str]:
    chosen = [name for name in text.split(",") if name]
    for name in chosen:
        if name not in known:
            raise SystemExit(f"there is no {what} {name!r}; choose from {', '.join(known)}")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="pagemill,vllm,openvino", help=f"of {','.join(ENGINES)}")
    parser.add_argument("--workloads", default=",".join(STANDARD), help=f"of {','.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one engine may take for one round")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/peers"))
    arguments = parser.parse_args()
    engines = names(arguments.engines, ENGINES, "engine")
    chosen = names(arguments.workloads, SHAPES, "workload")
    for name in engines:
        if not ENGINES[name].python.exists():
            raise SystemExit(
                f"{name} is not installed; run: python -m benchmarks.peers.install {ENGINES[name].environment}"
            )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    resolve_model(model_paths()["name"])
    text = tokenize(model_paths()["gguf"])
    result: dict[str, Any] = {"machine": describe_machine(), "model": model_paths()["name"], "runs": []}
    for round in range(arguments.rounds):
        workloads = [make(name, text, round) for name in chosen]
        for name in engines:
            log = arguments.out.parent / f"{arguments.out.name}-{name}.log"
            load = os.getloadavg()[0]
            try:
                found = run_engine(ENGINES[name], workloads, log, arguments.timeout)
            except EngineFailed as error:
                print(f"round {round}: {name} failed: {error}", file=sys.stderr, flush=True)
                continue
            run = {"engine": name, "precision": ENGINES[name].precision, "round": round, "load_average": load, **found}
            result["runs"].append(run)
            speeds = ", ".join(
                f"{w.name} {w.output_tokens / found['workloads'][w.name]['wall_s']:.1f}" for w in workloads
            )
            print(f"round {round}: {name}: {speeds} output tokens/s", flush=True)
            write_report(result, arguments.out)
    if not result["runs"]:
        raise SystemExit("no engine finished")
    print(arguments.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
