"""Measures KV memory that is reserved and holds nothing, over a replayed trace, by block size.

    python -m benchmarks.replay waste [TRACE] [--block-sizes 8,16,32,64,128,256] [--seconds 3600] [--rate 0.1]
        [--workload sharegpt --device a100-40 --shape opt-13b]

Without a TRACE, the workload's requests come, `--rate` a second.

Counted in every step by the running allocator, weighted by the step's time: bytes of the frames that sequences hold,
padding and the slots reserved for the running step included, each shared block once. Cached blocks that no sequence
holds are not counted: they make room when asked. "waste" is the share in which no token is or is being written;
"uncommitted" also counts the slots that the running step writes. "apart": of the steps from one of a sequence's blocks
to the next, those that do not lead to the neighbouring frame, looked at in every 16th step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.replay.output import bars, write_table
from benchmarks.replay.setup import add_replay_arguments, begin, chosen_setup

from pagemill.memory.manager import Scatter
from pagemill.planner.replica import Setup
from pagemill.scheduling.step_plan import StepPlan
from pagemill.simulate.simulator import WasteMeter, replay
from pagemill.simulate.step_time import StepModel
from pagemill.simulate.trace import TracedRequest


@dataclass(frozen=True)
class Row:
    block_size: int
    waste: float
    uncommitted: float
    apart: float
    mean_running: float
    most_running: int
    preemptions: int
    busy: float
    """Share of the simulated time."""
    replayed_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_replay_arguments(parser, seconds=3600, rate=0.1)
    parser.add_argument("--block-sizes", default="8,16,32,64,128,256")


def main(arguments: argparse.Namespace) -> None:
    step_times, trace = begin(arguments)
    rows = [
        measure(trace, chosen_setup(arguments, size), step_times) for size in map(int, arguments.block_sizes.split(","))
    ]
    print("\n| block size | waste | uncommitted | apart | mean running | most | preemptions | busy | replayed in |")
    print("| ---: |" + " ---: |" * 8)
    for row in rows:
        print(
            f"| {row.block_size} | {row.waste:.2%} | {row.uncommitted:.2%} | {row.apart:.1%} | "
            f"{row.mean_running:.1f} | {row.most_running} | {row.preemptions} | {row.busy:.0%} | "
            f"{row.replayed_s:.0f} s |"
        )
    write_table(arguments, "waste", step_times.about, [asdict(row) for row in rows])
    bars(
        arguments,
        "waste",
        [str(row.block_size) for row in rows],
        {"waste": [100 * row.waste for row in rows], "uncommitted": [100 * row.uncommitted for row in rows]},
        "block size, tokens",
        "share of reserved bytes, %",
    )


def measure(trace: Sequence[TracedRequest], setup: Setup, step_times: StepModel) -> Row:
    memory = setup.memory(step_times)
    meter = WasteMeter(memory, step_times.shape)
    looked: list[Scatter] = []

    def look(plan: StepPlan, seconds: float) -> None:
        if plan.step % 16 == 0:
            looked.append(memory.scatter())

    begin = time.perf_counter()
    outcome = replay(trace, setup.scheduler(memory), step_times, [meter, look])
    return Row(
        block_size=setup.block_size,
        waste=meter.waste,
        uncommitted=meter.uncommitted,
        apart=sum(one.table_steps_apart for one in looked) / max(1, sum(one.table_steps for one in looked)),
        mean_running=outcome.mean_running,
        most_running=outcome.most_running,
        preemptions=outcome.preemptions,
        busy=outcome.busy_s / outcome.end_s,
        replayed_s=time.perf_counter() - begin,
    )
