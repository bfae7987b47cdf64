"""Serves requests with the real engine, by the clock, and holds the simulation of the same requests against it.

    python -m benchmarks.replay confirm [TRACE] --calibration FILE.json [--model smollm2-135m] [--dtype bfloat16]
        [--workload alpaca] [--rate 4] [--seconds 60] [--seed 0] [--repeats 3]

FILE.json is a device that `pagemill calibrate` made, or step times that `calibrate` made. Without a TRACE, requests of
the workload are generated, `--rate` a second. Each repeat serves them anew, in the same engine, with other tokens: the
table has the median over repeats, and the range. Where something else ran on the machine meanwhile, a second table has
the requests that it left alone, of all repeats together, beside the simulation of the same requests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.replay.output import write_table
from benchmarks.replay.real_engine import SampledEngine
from benchmarks.replay.setup import (
    CALIBRATION,
    add_engine_arguments,
    add_output_argument,
    add_trace_arguments,
    chosen_setup,
    chosen_trace,
)

from pagemill.planner.model_shape import find_shape
from pagemill.planner.real_engine import CLOCKS, LOOK_S
from pagemill.planner.replica import latencies
from pagemill.planner.workload import workload_named
from pagemill.simulate.roofline import Roofline, read_device
from pagemill.simulate.simulator import Replay, Served, replay
from pagemill.simulate.step_time import StepModel, StepTimes

WARM_UP_S = 2.0
GOALS = {"output tokens/s": 0.05, "TTFT median": 0.05, "TPOT median": 0.05, "TTFT p99": 0.1, "TPOT p99": 0.1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser, seconds=60.0, rate=1.0, workload="alpaca")
    parser.add_argument("--seed", type=int, default=0, help="of the workload's requests")
    parser.add_argument("--repeats", type=int, default=3, help="how often the real engine serves them")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clock", choices=list(CLOCKS), help="as in `pagemill calibrate`; by default the times' own")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    add_engine_arguments(parser)
    add_output_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    arguments.kv_mib = arguments.kv_mib or arguments.calibrated_kv_mib
    step_times, setup = chosen_model(arguments), chosen_setup(arguments)
    if arguments.trace is None:
        trace = workload_named(arguments.workload).requests(arguments.rate, arguments.seconds, arguments.seed)
    else:
        trace = chosen_trace(arguments)
    engine = SampledEngine(
        arguments.model,
        arguments.dtype,
        arguments.clock or step_times.about.get("clock", "wall"),
        block_size=setup.block_size,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        kv_memory=setup.kv_bytes,
        target_tpot_ms="off",  # as in `setup`
    )
    engine.sample_steps(WARM_UP_S)
    reals: list[dict[str, float]] = []
    alone: list[tuple[int, Served]] = []
    for _ in range(arguments.repeats):
        engine.steps.clear()
        engine.core.reset_prefix_cache()
        outcome = engine.serve(trace)
        reals.append(figures(outcome))
        alone += [(number, one) for number, one in enumerate(outcome.served) if is_alone(one, engine.disturbed)]
        seconds = sum(step.seconds for step in engine.steps)
        modelled = sum(step_times.seconds(step.work) for step in engine.steps)
        others = sum(end - begin for begin, end in engine.disturbed) / outcome.end_s
        print(
            f"the real steps took {seconds:.2f} s; the model gives the same steps {modelled / seconds - 1:+.1%}; "
            f"something else ran during {others:.0%} of the time"
        )
    simulated = replay(trace, setup.scheduler(setup.memory(step_times)), step_times)
    predicted = figures(simulated)
    prompts, outputs = sum(one.prompt_len for one in trace), sum(one.output_len for one in trace)
    print(
        f"{len(trace)} requests in {trace[-1].arrival_s:.0f} s, {prompts} prompt and {outputs} output tokens; step "
        f"times: {step_times.description}; KV pool {arguments.kv_mib} MiB\n"
    )
    rows = [compare(name, [real[name] for real in reals], value) for name, value in predicted.items()]
    print_rows(rows)
    if len(alone) < arguments.repeats * len(trace):
        print(f"\nwith nothing else running: {len(alone)} of {arguments.repeats * len(trace)} requests\n")
        if alone:
            left_alone = latency_figures([one for _, one in alone])
            same = latency_figures([simulated.served[number] for number, _ in alone])
            alone_rows = [compare(name, [left_alone[name]], value) for name, value in same.items()]
            print_rows(alone_rows)
            rows += [{**row, "figure": f"{row['figure']}, alone"} for row in alone_rows]
    arguments.device = None
    write_table(arguments, "confirm", step_times.about, rows)


def is_alone(one: Served, disturbed: Sequence[tuple[float, float]]) -> bool:
    """Says whether nothing else ran from shortly before a request came until it had ended."""
    assert one.finished_s is not None
    return all(end <= one.request.arrival_s - LOOK_S or begin >= one.finished_s for begin, end in disturbed)


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    print("| | real, median | range | simulated | difference | goal |\n| --- |" + " ---: |" * 5)
    for row in rows:
        difference = "" if row["difference"] is None else f"{row['difference']:+.1%}"
        goal = "" if row["goal"] is None else f"{row['goal']:.0%}{'' if row['held'] else ', **missed**'}"
        print(
            f"| {row['figure']} | {row['real']:.4g} | {row['least']:.4g} to {row['most']:.4g} | {row['simulated']:.4g} "
            f"| {difference} | {goal} |"
        )


def chosen_model(arguments: argparse.Namespace) -> StepModel:
    """Returns the step times of a calibration of either kind."""
    path: Path = arguments.calibration
    if path != CALIBRATION and path.is_file() and "seconds_of" not in json.loads(path.read_text()):
        return Roofline(read_device(str(path)), find_shape(arguments.model), arguments.dtype)
    return StepTimes.load(path)


def compare(name: str, real: Sequence[float], simulated: float) -> dict[str, Any]:
    middle = median(real)
    difference = simulated / middle - 1 if middle else None
    goal = next((goal for figure, goal in GOALS.items() if name.startswith(figure)), None)
    return {
        "figure": name,
        "real": middle,
        "least": min(real),
        "most": max(real),
        "simulated": simulated,
        "difference": difference,
        "goal": goal,
        "held": goal is None or (difference is not None and abs(difference) <= goal),
    }


def figures(outcome: Replay) -> dict[str, float]:
    return {
        "output tokens/s": outcome.output_tokens_per_s,
        "end, s": outcome.end_s,
        "steps": outcome.steps,
        "busy, s": outcome.busy_s,
        "mean rows": outcome.mean_running,
        "most rows": outcome.most_running,
        "preemptions": outcome.preemptions,
        **latency_figures(outcome.served),
    }


def latency_figures(served: Sequence[Served]) -> dict[str, float]:
    found = latencies(served)
    return {
        "TTFT median, ms": 1e3 * found["ttft_median_s"],
        "TTFT p99, ms": 1e3 * found["ttft_p99_s"],
        "TPOT median, ms": 1e3 * found["tpot_median_s"],
        "TPOT p99, ms": 1e3 * found["tpot_p99_s"],
    }
