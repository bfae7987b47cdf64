"""Measures pagemill and its peers side by side: every engine in turn, in its own process, on the same workloads.

    python -m benchmarks.peers.run [--engines pagemill,vllm,openvino,transformers] [--workloads one,two,mixed]
                                   [--rounds 3] [--out benchmarks/results/peers] [--model FILE.gguf]

Writes OUT.json (every request of every round), OUT.md (medians over the rounds, and pagemill's ratio to each peer) and
OUT.png. In each round every engine starts anew, so that a slow quarter of an hour of a shared machine hits all of them.
The peers are installed by `python -m benchmarks.peers.install`. pagemill and llama.cpp run other models than
SmolLM2-135M too, such as those that `benchmarks.random_gguf` writes, whose prompts are the same tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import ENGINES, MODEL, EngineSetup, model_paths
from benchmarks.peers.machine import describe_machine
from benchmarks.peers.process import EngineFailed, EngineProcess, EngineTooSlow
from benchmarks.peers.report import speed, write_report
from benchmarks.peers.workloads import SHAPES, STANDARD, Workload, make, tokenize

from pagemill.hub import resolve_model


def run_engine(
    setup: EngineSetup, model: dict[str, str], workloads: list[Workload], log: Path, limit_s: float
) -> dict[str, Any]:
    """Starts an engine, runs the workloads one after the other, ends it.

    Returns {"description", "first_token_s", "workloads": {name: {"wall_s", "peak_bytes", "requests"}}}. A workload
    that takes longer than `limit_s` seconds is stopped, {"stopped_s", "output_tokens"}, and those behind it are left
    out. Raises EngineFailed; what the engine printed is in `log`.
    """
    measured: dict[str, Any] = {}
    with EngineProcess(setup, log, model) as engine:
        try:
            for workload in workloads:
                measured[workload.name] = engine.run(workload, limit_s)
        except EngineTooSlow:
            slow = workloads[len(measured)]
            measured[slow.name] = {"stopped_s": limit_s, "output_tokens": slow.output_tokens}
        return {"description": engine.description, "first_token_s": engine.first_token_s, "workloads": measured}


def names(text: str, known: Any, what: str) -> list[str]:
    chosen = [name for name in text.split(",") if name]
    for name in chosen:
        if name not in known:
            raise SystemExit(f"there is no {what} {name!r}; choose from {', '.join(known)}")
    return chosen


def require_installed(engines: list[str]) -> None:
    for name in engines:
        if not ENGINES[name].python.exists():
            raise SystemExit(
                f"{name} is not installed; run: python -m benchmarks.peers.install {ENGINES[name].environment}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="pagemill,vllm,openvino", help=f"of {','.join(ENGINES)}")
    parser.add_argument("--workloads", default=",".join(STANDARD), help=f"of {','.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="another GGUF, for pagemill and llama.cpp")
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which a workload is stopped")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/peers"))
    arguments = parser.parse_args()
    engines = names(arguments.engines, ENGINES, "engine")
    chosen = names(arguments.workloads, SHAPES, "workload")
    require_installed(engines)
    if arguments.model is not None and (bound := [name for name in engines if not ENGINES[name].runs_any_gguf]):
        raise SystemExit(f"{', '.join(bound)}: only pagemill and llama.cpp run another model; leave the others out")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    resolve_model(MODEL)
    text, model = tokenize(model_paths()["gguf"]), model_paths(arguments.model)
    result: dict[str, Any] = {"machine": describe_machine(), "model": model["name"], "runs": []}
    for round in range(arguments.rounds):
        workloads = [make(name, text, round) for name in chosen]
        for name in engines:
            log = arguments.out.parent / f"{arguments.out.name}-{name}.log"
            load = os.getloadavg()[0]
            try:
                found = run_engine(ENGINES[name], model, workloads, log, arguments.limit)
            except EngineFailed as error:
                print(f"round {round}: {name} failed: {error}", file=sys.stderr, flush=True)
                continue
            run = {"engine": name, "precision": ENGINES[name].precision, "round": round, "load_average": load, **found}
            result["runs"].append(run)
            speeds = ", ".join(f"{workload} {speed(measured)}" for workload, measured in found["workloads"].items())
            print(f"round {round}: {name}: {speeds} output tokens/s", flush=True)
            write_report(result, arguments.out)
    if not result["runs"]:
        raise SystemExit("no engine finished")
    print(arguments.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
