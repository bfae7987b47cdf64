"""Measures steps of the real engine and fits the step-time model to them.

python -m benchmarks.replay calibrate [--dtype bfloat16] [--seconds 60] [--max-num-batched-tokens N] [--out FILE.json]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.machine import describe_machine
from benchmarks.replay.real_engine import RUNNING, SampledEngine
from benchmarks.replay.setup import CALIBRATION
from numpy.typing import NDArray

from pagemill.config import EngineConfig
from pagemill.planner.real_engine import CLOCKS
from pagemill.simulate.step_time import StepTimes, StepWork, fit

WARM_UP_S = 3.0
BANDS = ((1, 1), (2, 8), (9, 32), (33, 128), (129, 10**9))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--clock", default="wall", choices=list(CLOCKS), help="cpu: one thread, by its CPU time, for a busy machine"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure, at least")
    parser.add_argument("--max-num-batched-tokens", type=int, default=EngineConfig.max_num_batched_tokens)
    parser.add_argument("--out", type=Path, default=CALIBRATION)
    parser.add_argument("--steps", type=Path, help="also write the measured steps here (.npz)")


def main(arguments: argparse.Namespace) -> None:
    settings = {"max_num_batched_tokens": arguments.max_num_batched_tokens, "max_num_seqs": max(RUNNING)}
    engine = SampledEngine(arguments.model, arguments.dtype, arguments.clock, **settings)
    engine.sample_steps(WARM_UP_S)
    engine.steps.clear()
    engine.sample_steps(arguments.seconds)
    works, seconds = [step.work for step in engine.steps], [step.seconds for step in engine.steps]
    if arguments.steps:
        np.savez(arguments.steps, works=np.array(works), seconds=np.array(seconds))
    step_times = fitted(works, seconds, engine, arguments)
    step_times.save(arguments.out)
    print(f"{step_times.about['cpu']}, {step_times.about['cores']} cores; {engine.core.ready.description}")
    print("| cost of one | microseconds |\n| --- | ---: |")
    for name, cost in step_times.seconds_of.items():
        print(f"| {name} | {cost * 1e6:.4g} |")
    print("\n| tokens in the step | steps | median seconds | median error | 90 % are within |\n| --- |" + " ---: |" * 4)
    for band in step_times.about["errors"]:
        print(
            f"| {band['tokens']} | {band['steps']} | {band['median_s']:.4f} | {band['median_error']:+.1%} | "
            f"{band['error_p90']:.1%} |"
        )
    print(f"\nall steps: measured {sum(seconds):.1f} s, modelled {sum(map(step_times.seconds, works)):.1f} s")
    print(f"wrote {arguments.out}")


def fitted(
    works: Sequence[StepWork], seconds: Sequence[float], engine: SampledEngine, arguments: argparse.Namespace
) -> StepTimes:
    machine = describe_machine()
    about: dict[str, Any] = {name: machine[name] for name in ("cpu", "features", "cores", "load_average", "date")}
    about |= {"model": arguments.model, "dtype": arguments.dtype, "clock": arguments.clock, "steps": len(works)}
    step_times = StepTimes(fit(works, seconds), engine.kv_shape, about)
    tokens = np.array([work.tokens for work in works])
    measured = np.array(seconds)
    errors = np.array([step_times.seconds(work) for work in works]) / measured - 1
    about["errors"] = [
        _band(low, high, measured[chosen], errors[chosen])
        for low, high in BANDS
        if (chosen := (tokens >= low) & (tokens <= high)).any()
    ]
    return step_times


def _band(low: int, high: int, measured: NDArray[np.float64], errors: NDArray[np.float64]) -> dict[str, Any]:
    return {
        "tokens": band_name(low, high),
        "steps": len(errors),
        "median_s": float(np.median(measured)),
        "median_error": float(np.median(errors)),
        "error_p90": float(np.percentile(np.abs(errors), 90)),
    }


def band_name(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}" if high < BANDS[-1][1] else f"{low} and more"
