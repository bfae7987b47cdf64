"""Measures capacity under a limit on latency: the requests per second that an engine serves in time.

    python -m benchmarks.peers.capacity [--engines pagemill,vllm] [--slo-tpot-p99 250] [--slo-ttft-p99 2000]
                                        [--seconds 40] [--first-rate 0.6] [--out benchmarks/results/capacity]

Requests of the mixed workload's lengths arrive at random (Poisson, seeded) at one rate for `--seconds`, and all run to
their end; the p99 over requests of the time per output token is held against the limit, and that of the time to first
token against its own, if one is given. Rates rise by half each until one breaks, then three more runs bisect between
the last that held and the first that did not. Every engine gets the same requests at a rate. Writes OUT.json, OUT.md
and OUT.png.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.capacity import add_limit_arguments, chosen_limits
from benchmarks.peers.engines import ENGINES, model_paths
from benchmarks.peers.goals import CAPACITY_RATIO
from benchmarks.peers.machine import describe_machine
from benchmarks.peers.plots import plot_capacity
from benchmarks.peers.process import EngineFailed, EngineProcess
from benchmarks.peers.report import describe_cpu, describe_machine_line, figures, table
from benchmarks.peers.run import names, require_installed
from benchmarks.peers.workloads import make_poisson, tokenize

from pagemill.errors import ConfigError
from pagemill.hub import resolve_model
from pagemill.planner.limits import LOWEST_RATE, Limits, find_capacity

RUN_LIMIT_S = 600.0


def measure_engine(name: str, text: list[int], limits: Limits, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns {"description", "rates": [...], "capacity": the row of the highest rate that held, or None}."""
    rows: list[dict[str, Any]] = []
    pieces = 0
    log = arguments.out.parent / f"{arguments.out.name}-{name}.log"
    with EngineProcess(ENGINES[name], log, model_paths()) as engine:

        def holds(rate: float) -> bool:
            nonlocal pieces
            workload = make_poisson(text, rate, arguments.seconds, pieces)
            pieces += len(workload.prompts)
            measured = engine.run(workload, RUN_LIMIT_S)
            row = {
                "rate": rate,
                "requests": len(workload.prompts),
                # What arrives is what is served while the rate can be sustained.
                "offered_tokens_per_s": rate * workload.output_tokens / len(workload.prompts),
                "wall_s": measured["wall_s"],
                "load_average": os.getloadavg()[0],
                **figures(measured),
            }
            rows.append(row)
            held = limits.hold(row)
            print(
                f"{name}: {rate:.2f} requests/s: p99 TPOT {1000 * row['tpot_p99_s']:.0f} ms, p99 TTFT "
                f"{1000 * row['ttft_p99_s']:.0f} ms: {'holds' if held else 'breaks'}",
                flush=True,
            )
            return held

        capacity = find_capacity(holds, arguments.first_rate)
        found = next((row for row in rows if row["rate"] == capacity), None)
        return {"description": engine.description, "rates": rows, "capacity": found}


def markdown(result: dict[str, Any]) -> str:
    limits = Limits(result["slo_tpot_p99_s"], result["slo_ttft_p99_s"])
    lines = [
        f"# {result['model']}, capacity under a limit",
        "",
        f"{describe_machine_line(result['machine'])}.",
        "",
        f"Requests of the mixed workload's lengths arrive at random for {result['seconds']:g} s at each rate. "
        f"Capacity: the highest rate at which {limits}.",
        "",
    ]
    own = next((found for name, found in result["engines"].items() if name.startswith("pagemill")), None)
    rows = []
    for name, found in result["engines"].items():
        row = found["capacity"]
        if row is None:
            rows.append([name, f"under {LOWEST_RATE}", "", "", "", "", ""])
            continue
        ratio = ""
        if own and own is not found and own["capacity"]:
            ratio = f"{own['capacity']['rate'] / row['rate']:.2f}x"
        rows.append(
            [name, f"{row['rate']:.2f}", f"{row['offered_tokens_per_s']:.0f}", f"{1000 * row['tpot_p99_s']:.0f}",
             f"{1000 * row['ttft_p99_s']:.0f}", ratio, f"{CAPACITY_RATIO:g}x" if ratio else ""]
        )  # fmt: skip
    head = ["engine", "requests/s", "output tokens/s", "p99 TPOT ms", "p99 TTFT ms", "pagemill is", "goal"]
    lines += table(head, rows)
    head = ["engine", "requests/s", "requests", "p99 TPOT ms", "median", "p99 TTFT ms", "median"]
    rows = [
        [name, f"{row['rate']:.2f}", str(row["requests"])]
        + [f"{1000 * row[key]:.0f}" for key in ("tpot_p99_s", "tpot_median_s", "ttft_p99_s", "ttft_median_s")]
        for name, found in result["engines"].items()
        for row in sorted(found["rates"], key=lambda row: float(row["rate"]))
    ]
    lines += ["", "All rates:", "", *table(head, rows), ""]
    lines += [f"- **{name}**: {found['description']}" for name, found in result["engines"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="pagemill,vllm", help=f"of {','.join(ENGINES)}")
    add_limit_arguments(parser)
    parser.add_argument("--seconds", type=float, default=40, help="how long requests arrive at each rate")
    parser.add_argument("--first-rate", type=float, default=0.6, help="requests per second to begin with")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/capacity"))
    arguments = parser.parse_args()
    try:
        limits = chosen_limits(arguments)
    except ConfigError as error:
        parser.error(error.message)
    engines = names(arguments.engines, ENGINES, "engine")
    require_installed(engines)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    resolve_model(model_paths()["name"])
    text = tokenize(model_paths()["gguf"])
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "model": model_paths()["name"],
        "slo_tpot_p99_s": limits.tpot_p99_s,
        "slo_ttft_p99_s": limits.ttft_p99_s,
        "seconds": arguments.seconds,
        "engines": {},
    }
    for name in engines:
        try:
            result["engines"][name] = measure_engine(name, text, limits, arguments)
        except EngineFailed as error:
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            continue
        arguments.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(markdown(result))
        title = f"{result['model']} on {describe_cpu(result['machine'])}: requests arriving at random"
        plot_capacity(result, title, arguments.out.with_suffix(".png"))
    if not result["engines"]:
        raise SystemExit("no engine finished")
    print(arguments.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
