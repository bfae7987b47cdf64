"""Serves a slice of a trace with the real engine, by the clock, and holds the simulation against it.

python -m benchmarks.replay confirm TRACE [--seconds 60] [--rate 0.1] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse

from benchmarks.replay.real_engine import RealEngine
from benchmarks.replay.setup import (
    add_engine_arguments,
    add_trace_arguments,
    chosen_setup,
    chosen_trace,
    describe,
    latencies,
)

from pagemill.simulate.simulator import Replay, replay
from pagemill.simulate.step_time import StepTimes

WARM_UP_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser, seconds=600, rate=0.1)
    add_engine_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    step_times = StepTimes.load(arguments.calibration)
    arguments.kv_mib = arguments.kv_mib or arguments.calibrated_kv_mib
    trace, setup = chosen_trace(arguments), chosen_setup(arguments)
    engine = RealEngine(
        step_times.about["model"],
        step_times.about["dtype"],
        step_times.about["clock"],
        block_size=setup.block_size,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        kv_memory=setup.kv_bytes,
    )
    engine.sample_steps(WARM_UP_S)
    engine.steps.clear()
    real = engine.serve(trace)
    simulated = replay(trace, setup.scheduler(setup.memory(step_times)), step_times)
    print(describe(arguments, step_times, trace))
    print(f"the real steps took {real.busy_s:.2f} s; the model gives them "
          f"{sum(step_times.seconds(work) for work, _ in engine.steps):.2f} s\n")  # fmt: skip
    print("| | real | simulated | difference |\n| --- | ---: | ---: | ---: |")
    predicted = figures(simulated)
    for name, value in figures(real).items():
        difference = f"{predicted[name] / value - 1:+.1%}" if value else ""
        print(f"| {name} | {value:.4g} | {predicted[name]:.4g} | {difference} |")


def figures(outcome: Replay) -> dict[str, float]:
    found = latencies(outcome.served)
    return {
        "output tokens/s": outcome.output_tokens_per_s,
        "end, s": outcome.end_s,
        "steps": outcome.steps,
        "busy, s": outcome.busy_s,
        "mean rows": outcome.mean_running,
        "most rows": outcome.most_running,
        "preemptions": outcome.preemptions,
        "TTFT median, ms": 1e3 * found["ttft_median_s"],
        "TTFT p99, ms": 1e3 * found["ttft_p99_s"],
        "TPOT median, ms": 1e3 * found["tpot_median_s"],
        "TPOT p99, ms": 1e3 * found["tpot_p99_s"],
    }
