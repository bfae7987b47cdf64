"""Holds a roofline of this machine against steps of its real engine, to see how far one without a calibration is off.

    python -m benchmarks.replay validate [--shape smollm2-135m] [--dtype bfloat16] [--seconds 60] [--out FOLDER]

The machine becomes a device of two measured rates: of reading a buffer far larger than the caches, and of a large
product. All else is as in `devices.json`'s server with 64 cores, efficiencies included; nothing is fitted to the steps.
"floor" has efficiencies of 1 and no time per step and row. "calibrated" is the model that `calibrate` fits to the very
same steps, and so as good as it gets. An error of -20 % is a step that took 1.25 times as long as modelled.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace

import numpy as np
from benchmarks.peers.machine import describe_machine
from benchmarks.replay.calibrate import BANDS, WARM_UP_S, band_name
from benchmarks.replay.output import write_table
from benchmarks.replay.real_engine import RUNNING, SampledEngine
from benchmarks.replay.setup import add_output_argument
from benchmarks.roofline import Ceilings, measure_ceilings

from pagemill.simulate.roofline import DeviceModel, Roofline, read_device, read_shape
from pagemill.simulate.step_time import StepModel, StepTimes, fit

LIKE = "server-64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="smollm2-135m", help="a model that is here, and in shapes.json")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure steps, at least")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    add_output_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    machine = describe_machine()
    shape = read_shape(arguments.shape)
    before = measure_ceilings(shape.parameters * 2)
    settings = {"max_num_batched_tokens": arguments.max_num_batched_tokens, "max_num_seqs": max(RUNNING)}
    engine = SampledEngine(arguments.shape, arguments.dtype, "wall", **settings)
    engine.sample_steps(WARM_UP_S)
    engine.steps.clear()
    engine.sample_steps(arguments.seconds)
    device = this_machine(machine["cpu"], before.best(measure_ceilings(shape.parameters * 2)))
    exact = replace(device, efficiency=dict.fromkeys(device.efficiency, 1.0), step_s=0.0, row_s=0.0)
    works, measured = [step.work for step in engine.steps], np.array([step.seconds for step in engine.steps])
    models: dict[str, StepModel] = {
        "modelled": Roofline(device, shape, arguments.dtype),
        "floor": Roofline(exact, shape, arguments.dtype),
        "calibrated": StepTimes(fit(works, measured.tolist()), engine.kv_shape, {}),
    }
    print(
        f"{machine['cpu']}, {machine['cores']} cores: {device.bytes_per_s / 1e9:.1f} GB/s, "
        f"{device.flop_per_s[arguments.dtype] / 1e9:.0f} GFLOP/s in {arguments.dtype}; {engine.core.ready.description}"
    )
    print("| tokens in the step | steps | measured, median |" + "".join(f" {name} | 90 % within |" for name in models))
    print("| --- |" + " ---: |" * (2 + 2 * len(models)))
    tokens = np.array([work.tokens for work in works])
    errors = {name: np.array([model.seconds(work) for work in works]) / measured - 1 for name, model in models.items()}
    rows = []
    for low, high in (*BANDS, (1, 10**9)):
        chosen = (tokens >= low) & (tokens <= high)
        if not chosen.any():
            continue
        row = {
            "tokens": band_name(low, high),
            "steps": int(chosen.sum()),
            "median_s": float(np.median(measured[chosen])),
            "errors": {
                name: [float(np.median(each[chosen])), float(np.percentile(np.abs(each[chosen]), 90))]
                for name, each in errors.items()
            },
        }
        rows.append(row)
        cells = "".join(f" {middle:+.0%} | {most:.0%} |" for middle, most in row["errors"].values())
        print(f"| {row['tokens']} | {row['steps']} | {1e3 * row['median_s']:.1f} ms |{cells}")
    totals = ", ".join(
        f"{name} {sum(map(model.seconds, works)) / measured.sum() - 1:+.1%}" for name, model in models.items()
    )
    print(f"\nall steps: measured {measured.sum():.1f} s; {totals}")
    arguments.device = None
    write_table(arguments, "validate", {**machine, "device": asdict(device)}, rows)


def this_machine(cpu: str, ceilings: Ceilings) -> DeviceModel:
    like = read_device(LIKE)
    measured = "measured by benchmarks.roofline"
    return replace(
        like,
        about=f"this machine ({cpu})",
        bytes_per_s=ceilings.read_bytes_per_s,
        flop_per_s=ceilings.gemm_flop_per_s,
        sources={**like.sources, "bytes_per_s": measured, "flop_per_s": measured},
    )
