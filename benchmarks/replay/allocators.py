"""Compares paged and contiguous KV memory of equal size under the same scheduler, over a replayed trace.

    python -m benchmarks.replay allocators TRACE [--kv-mib 1024] [--seconds 120] [--rate 1]

The contiguous ones reserve when a request enters: the longest request of the whole trace (maximum), prompt plus the
output rounded up to a power of two, or exactly what it will become (exact, which needs to know the future). Their runs
of slots lie first fit, or by the buddy system, which rounds the whole run up to a power of two. They are spared padding
and prefix look-ups. More requests should arrive than can be served, so that memory decides how many run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.replay.contiguous import PLACEMENTS, RESERVATIONS, ContiguousMemory, root_of
from benchmarks.replay.output import bars, write_table
from benchmarks.replay.setup import add_replay_arguments, begin, chosen_setup

from pagemill.planner.replica import Setup, latencies
from pagemill.scheduling.step_plan import StepPlan
from pagemill.simulate.simulator import Replay, replay
from pagemill.simulate.step_time import StepModel
from pagemill.simulate.trace import TracedRequest, read_trace

CONTIGUOUS = (
    ("maximum", "first fit"),
    ("power of two", "first fit"),
    ("power of two", "buddy"),
    ("exact", "first fit"),
    ("exact", "buddy"),
)


@dataclass(frozen=True)
class Row:
    """Holds the result of a replay.

    reserved, written: share of the pool's bytes, over time, held by sequences, and with a committed token.
    """

    allocator: str
    most_running: int
    mean_running: float
    output_tokens_per_s: float
    reserved: float
    written: float
    refused: int
    preempted: int
    ttft_median_s: float
    tpot_median_s: float
    replayed_s: float


class PoolMeter:
    """Integrates bytes over time; an observer. usage: bytes (held by sequences, with a token) now."""

    def __init__(self, usage: Callable[[], tuple[float, float]]) -> None:
        self._usage = usage
        self.seconds = self.reserved = self.written = 0.0

    def __call__(self, plan: StepPlan, seconds: float) -> None:
        reserved, written = self._usage()
        self.seconds += seconds
        self.reserved += seconds * reserved
        self.written += seconds * written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_replay_arguments(parser, seconds=120, rate=1.0, kv_mib=1024)


def main(arguments: argparse.Namespace) -> None:
    (step_times, trace), setup = begin(arguments), chosen_setup(arguments)
    longest = max(request.length for request in read_trace(arguments.trace))
    rows = [paged(trace, setup, step_times)]
    rows += [contiguous(trace, longest, setup, step_times, *kind) for kind in CONTIGUOUS]
    print(
        "\n| memory | most running | mean | output tokens/s | of paged | reserved | with tokens | refused | "
        "preempted | TTFT median | TPOT median | replayed in |"
    )
    print("| --- |" + " ---: |" * 11)
    for row in rows:
        print(
            f"| {row.allocator} | {row.most_running} | {row.mean_running:.1f} | {row.output_tokens_per_s:.1f} | "
            f"{row.output_tokens_per_s / rows[0].output_tokens_per_s:.2f} | {row.reserved:.1%} | {row.written:.1%} | "
            f"{row.refused} | {row.preempted} | {row.ttft_median_s:.0f} s | {1e3 * row.tpot_median_s:.0f} ms | "
            f"{row.replayed_s:.0f} s |"
        )
    write_table(arguments, "allocators", step_times.about, [asdict(row) for row in rows])
    bars(
        arguments,
        "allocators",
        [row.allocator.replace(", ", ",\n") for row in rows],
        {
            "mean running": [row.mean_running for row in rows],
            "output tokens/s": [row.output_tokens_per_s for row in rows],
        },
        "memory",
        "",
    )


def paged(trace: Sequence[TracedRequest], setup: Setup, step_times: StepModel) -> Row:
    memory, shape = setup.memory(step_times), step_times.shape
    slot_bytes = shape.frame_bytes(setup.block_size) / setup.block_size

    def usage() -> tuple[float, float]:
        found = memory.occupancy()
        return found.slots_reserved * slot_bytes, found.slots_written * shape.slot_bytes

    meter = PoolMeter(usage)
    begin = time.perf_counter()
    outcome = replay(trace, setup.scheduler(memory), step_times, [meter])
    name = f"paged, blocks of {setup.block_size}"
    return _row(name, outcome, meter, setup, time.perf_counter() - begin, len(trace))


def contiguous(
    trace: Sequence[TracedRequest],
    longest: int,
    setup: Setup,
    step_times: StepModel,
    reservation: str,
    placement: str,
) -> Row:
    wanted = {root_of(request): RESERVATIONS[reservation](request, longest) for request in trace}
    slot_bytes = step_times.shape.slot_bytes * len(step_times.shape.groups.groups)
    slots = int(setup.kv_bytes / slot_bytes)
    lie = PLACEMENTS[placement](slots)
    memory = ContiguousMemory(slots, lie, wanted.__getitem__)
    meter = PoolMeter(lambda: (memory.reserved * slot_bytes, memory.written * slot_bytes))
    fitting = [request for request in trace if lie.fits_when_empty(wanted[root_of(request)])]
    begin = time.perf_counter()
    outcome = replay(fitting, setup.scheduler(memory, caching=False), step_times, [meter], root=root_of)
    return _row(f"{reservation}, {placement}", outcome, meter, setup, time.perf_counter() - begin, len(trace))


def _row(name: str, outcome: Replay, meter: PoolMeter, setup: Setup, replayed_s: float, num_requests: int) -> Row:
    found = latencies(outcome.served)
    seconds = meter.seconds or 1.0
    return Row(
        allocator=name,
        most_running=outcome.most_running,
        mean_running=outcome.mean_running,
        output_tokens_per_s=outcome.output_tokens_per_s,
        reserved=meter.reserved / seconds / setup.kv_bytes,
        written=meter.written / seconds / setup.kv_bytes,
        refused=num_requests - len(outcome.finished),
        preempted=sum(one.starts > 1 for one in outcome.served),
        ttft_median_s=found["ttft_median_s"],
        tpot_median_s=found["tpot_median_s"],
        replayed_s=replayed_s,
    )
