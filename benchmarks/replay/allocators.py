"""Compares paged and contiguous KV memory of equal size under the same scheduler, and says where each one's bytes go.

    python -m benchmarks.replay allocators [TRACE] [--kv-mib 1024] [--seconds 120] [--rate 1]
        [--workload sharegpt --device a100-40 --shape opt-13b]

Without a TRACE, the workload's requests come, `--rate` a second.

The contiguous ones reserve when a request enters: the longest request of the whole trace or the workload's context
(maximum), prompt plus the output rounded up to a power of two, or exactly what it will become (exact, which needs to
know the future). Their runs of slots lie first fit, or by the buddy system, which rounds the whole run up to a power of
two. They are spared padding and prefix look-ups. More requests should arrive than can be served, so that memory decides
how many run.

Each byte of the pool is in one of five parts, weighted by the time of the steps: "tokens", "ahead" (reserved for tokens
that are still to come), "internal" (reserved and never filled), "external" (free while a request waits for memory; in
paged memory what admission leaves for running sequences to grow) and "idle" (free while none waits).

Published: 20.4, 26.8 and 38.2 % of the memory hold tokens with Orca that reserves the maximum, the power of two and the
exact length, and 96.3 % with vLLM (Kwon et al., SOSP 2023, figure 2).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.replay.contiguous import PLACEMENTS, RESERVATIONS, ContiguousMemory, root_of
from benchmarks.replay.output import bars, stacks, write_table
from benchmarks.replay.pool_meter import PoolMeter, contiguous_meter, paged_meter
from benchmarks.replay.setup import add_replay_arguments, begin, chosen_setup, longest_possible

from pagemill.planner.replica import Setup, latencies
from pagemill.simulate.simulator import Replay, replay
from pagemill.simulate.step_time import StepModel
from pagemill.simulate.trace import TracedRequest

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

    parts: where the pool's bytes were, over time: each part's share of them, by its name (`pool_meter.Parts`).
    """

    allocator: str
    most_running: int
    mean_running: float
    output_tokens_per_s: float
    parts: dict[str, float]
    refused: int
    preempted: int
    ttft_median_s: float
    tpot_median_s: float
    replayed_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_replay_arguments(parser, seconds=120, rate=1.0, kv_mib=1024)


def main(arguments: argparse.Namespace) -> None:
    (step_times, trace), setup = begin(arguments), chosen_setup(arguments)
    longest = longest_possible(arguments)
    rows = [paged(trace, setup, step_times)]
    rows += [contiguous(trace, longest, setup, step_times, *kind) for kind in CONTIGUOUS]
    print(
        "\n| memory | most running | mean | output tokens/s | of paged | tokens | ahead | internal | external | "
        "idle | refused | preempted | TTFT median | TPOT median | replayed in |"
    )
    print("| --- |" + " ---: |" * 14)
    for row in rows:
        print(
            f"| {row.allocator} | {row.most_running} | {row.mean_running:.1f} | {row.output_tokens_per_s:.1f} | "
            f"{row.output_tokens_per_s / rows[0].output_tokens_per_s:.2f} | "
            f"{' | '.join(f'{share:.1%}' for share in row.parts.values())} | "
            f"{row.refused} | {row.preempted} | {row.ttft_median_s:.0f} s | {1e3 * row.tpot_median_s:.0f} ms | "
            f"{row.replayed_s:.0f} s |"
        )
    write_table(arguments, "allocators", step_times.about, [asdict(row) for row in rows])
    labels = [row.allocator.replace(", ", ",\n") for row in rows]
    stacks(
        arguments,
        "memory",
        labels,
        {part: [100 * row.parts[part] for row in rows] for part in rows[0].parts},
        "memory",
        "share of the pool, %",
    )
    bars(
        arguments,
        "allocators",
        labels,
        {
            "mean running": [row.mean_running for row in rows],
            "output tokens/s": [row.output_tokens_per_s for row in rows],
        },
        "memory",
        "",
    )


def paged(trace: Sequence[TracedRequest], setup: Setup, step_times: StepModel) -> Row:
    memory = setup.memory(step_times)
    scheduler = setup.scheduler(memory)
    meter = paged_meter(scheduler, memory, step_times.shape, setup.kv_bytes)
    begin = time.perf_counter()
    outcome = replay(trace, scheduler, step_times, [meter])
    name = f"paged, blocks of {setup.block_size}"
    return _row(name, outcome, meter, time.perf_counter() - begin, len(trace))


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
    scheduler = setup.scheduler(memory, caching=False)
    meter = contiguous_meter(scheduler, memory, slot_bytes, setup.kv_bytes)
    fitting = [request for request in trace if lie.fits_when_empty(wanted[root_of(request)])]
    begin = time.perf_counter()
    outcome = replay(fitting, scheduler, step_times, [meter], root=root_of)
    return _row(f"{reservation}, {placement}", outcome, meter, time.perf_counter() - begin, len(trace))


def _row(name: str, outcome: Replay, meter: PoolMeter, replayed_s: float, num_requests: int) -> Row:
    found = latencies(outcome.served)
    return Row(
        allocator=name,
        most_running=outcome.most_running,
        mean_running=outcome.mean_running,
        output_tokens_per_s=outcome.output_tokens_per_s,
        parts=meter.parts.shares(),
        refused=num_requests - len(outcome.finished),
        preempted=sum(one.starts > 1 for one in outcome.served),
        ttft_median_s=found["ttft_median_s"],
        tpot_median_s=found["tpot_median_s"],
        replayed_s=replayed_s,
    )
