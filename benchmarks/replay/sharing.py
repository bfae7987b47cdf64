"""Counts the KV blocks that samples and beams share, by the real scheduler and memory; modelled.

    python -m benchmarks.replay sharing [--workloads alpaca,sharegpt] [--device a100-40 --shape opt-13b]
        [--rate 0.1] [--requests 200] [--widths 2,4,6]

Blocks saved are 1 - blocks held / blocks that the same sequences would hold each for itself, summed over all steps.
The prefix cache is off: nothing else is shared. Beams choose among tokens that are drawn by a seed, not by a model.
Requests that could never run are told, and not counted.

Published: Kwon et al., SOSP 2023, figure 15, OPT-13B on an A100 of 40 GB.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.replay.output import bars, write_table
from benchmarks.replay.setup import (
    above_zero,
    add_device_arguments,
    add_engine_arguments,
    add_output_argument,
    chosen_roofline,
    chosen_setup,
)

from pagemill.planner.replica import Setup
from pagemill.planner.workload import workload_named
from pagemill.scheduling.step_plan import StepPlan
from pagemill.simulate.simulator import replay
from pagemill.simulate.step_time import StepModel
from pagemill.simulate.trace import TracedRequest

PUBLISHED = {
    ("alpaca", "n"): "6.1 to 9.8 %",
    ("alpaca", "beam_width"): "37.6 to 55.2 %",
    ("sharegpt", "n"): "16.2 to 30.5 %",
    ("sharegpt", "beam_width"): "44.3 to 66.3 %",
}
"""For widths of 2 to 6."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workloads", default="alpaca,sharegpt", help="by commas")
    add_engine_arguments(parser, calibrated=False)
    add_device_arguments(parser, device="a100-40", shape="opt-13b")
    parser.add_argument(
        "--rate",
        type=above_zero,
        default=0.1,
        help="requests per second; more, and samples that are preempted share less",
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--widths", default="2,4,6", help="samples, and beams, by commas")
    add_output_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    roofline = chosen_roofline(arguments)
    setup, widths = chosen_setup(arguments), [int(width) for width in arguments.widths.split(",")]
    print(f"{arguments.requests} requests; {roofline.description}; KV pool {arguments.kv_mib} MiB\n")
    print("| workload | asks for | " + " | ".join(map(str, widths)) + " | published, 2 to 6 |")
    print("| --- | --- |" + " ---: |" * (len(widths) + 1))
    rows: list[dict[str, Any]] = []
    for name in arguments.workloads.split(","):
        drawn = workload_named(name).requests(arguments.rate, 2 * arguments.requests / arguments.rate)
        trace = drawn[: arguments.requests]
        for kind in ("n", "beam_width"):
            found = [measure(asking(trace, kind, width), setup, roofline) for width in widths]
            published = PUBLISHED.get((name, kind), "-")
            print(f"| {name} | {kind} | {' | '.join(map(str, found))} | {published} |", flush=True)
            rows += [
                {"workload": name, "kind": kind, "width": width, "published": published, **asdict(shared)}
                for width, shared in zip(widths, found, strict=True)
            ]
    write_table(arguments, "sharing", roofline.about, rows)
    series = {
        f"{row['workload']}, {row['kind']}": [
            100 * (other["saved"] or 0.0)
            for other in rows
            if (other["workload"], other["kind"]) == (row["workload"], row["kind"])
        ]
        for row in rows
    }
    bars(arguments, "sharing", [str(width) for width in widths], series, "samples or beams", "blocks saved, %")


def asking(trace: Sequence[TracedRequest], kind: str, width: int) -> list[TracedRequest]:
    """Returns the same requests, each asking for so many samples (kind "n") or beams ("beam_width")."""
    return [replace(one, n=width) if kind == "n" else replace(one, beam_width=width) for one in trace]


@dataclass(frozen=True)
class Shared:
    """Says what sharing saves. saved: the share of blocks; None if no request could run. preempted: requests that were,
    once or more. refused: requests that could never run, of which nothing is counted.
    """

    saved: float | None
    preempted: int
    refused: int

    def __str__(self) -> str:
        saved = "-" if self.saved is None else f"{self.saved:.1%}"
        notes = [
            f"{count} {what}" for count, what in ((self.preempted, "preempted"), (self.refused, "refused")) if count
        ]
        return f"{saved} ({', '.join(notes)})" if notes else saved


def measure(trace: Sequence[TracedRequest], setup: Setup, step_times: StepModel) -> Shared:
    """Returns what sharing saves."""
    memory = setup.memory(step_times)
    scheduler = setup.scheduler(memory, caching=False)
    entries = held = 0

    def look(plan: StepPlan, seconds: float) -> None:
        nonlocal entries, held
        entries += sum(one.table.num_held for one in scheduler.state.running if one.table is not None)
        held += memory.stats().frames_active

    served = replay(trace, scheduler, step_times, [look]).served
    return Shared(
        saved=1 - held / entries if entries else None,
        preempted=sum(one.starts > 1 for one in served),
        refused=sum(one.refused for one in served),
    )
