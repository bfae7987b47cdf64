"""Finds capacity under limits on latency: the requests per second that a modelled engine serves in time.

    python -m benchmarks.replay capacity [--workload sharegpt] [--device a100-40 --shape llama-3-8b]
        [--slo-tpot-p99 250] [--slo-ttft-p99 2000] [--timeout 30] [--seconds 120] [--first-rate 1]

Generated requests arrive at random (Poisson, seeded) for `--seconds` at each rate, and all run to their end, as
`benchmarks.peers.capacity` does with real engines. Where the p99 time to first token is more than a quarter of that, a
rate is more than can be served, and breaks even without a limit on it: the queue only grows. A request that its timeout
ends took for ever, so a rate breaks where more than one in a hundred is ended, and where one could never run.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.capacity import add_limit_arguments, chosen_limits
from benchmarks.replay.output import write_table
from benchmarks.replay.setup import (
    above_zero,
    add_device_arguments,
    add_engine_arguments,
    add_output_argument,
    chosen_setup,
    chosen_step_times,
)
from benchmarks.replay.workload import add_workload_argument

from pagemill.planner.limits import LOWEST_RATE, find_capacity
from pagemill.planner.replica import latencies
from pagemill.planner.workload import with_timeout, workload_named
from pagemill.simulate.simulator import replay

QUEUE_SHARE = 0.25
"""The share of `--seconds` that the p99 time to first token may take at a rate that is served."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_argument(parser, "sharegpt")
    add_engine_arguments(parser)
    add_device_arguments(parser)
    add_limit_arguments(parser)
    parser.add_argument(
        "--timeout", type=above_zero, help="seconds from its arrival after which a request fails; else the workload's"
    )
    parser.add_argument("--seconds", type=above_zero, default=120.0, help="how long requests arrive at each rate")
    parser.add_argument("--first-rate", type=above_zero, default=1.0, help="requests per second to begin with")
    add_output_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    limits = chosen_limits(arguments)
    workload = with_timeout(workload_named(arguments.workload), arguments.timeout)
    step_times = chosen_step_times(arguments)
    setup = chosen_setup(arguments)
    rows: list[dict[str, Any]] = []

    def holds(rate: float) -> bool:
        trace = workload.requests(rate, arguments.seconds)
        outcome = replay(trace, setup.scheduler(setup.memory(step_times)), step_times)
        row = {
            "rate": rate,
            "requests": len(trace),
            "output_tokens_per_s": outcome.output_tokens_per_s,
            "goodput_tokens_per_s": outcome.goodput_tokens_per_s,
            "timed_out": sum(one.timed_out for one in outcome.served),
            "refused": sum(one.refused for one in outcome.served),
            "preemptions": outcome.preemptions,
            **latencies(outcome.served),
        }
        queue_s = QUEUE_SHARE * arguments.seconds
        held = limits.hold(row) and row["ttft_p99_s"] <= queue_s and not row["refused"]
        rows.append({**row, "held": held})
        print(
            f"| {rate:.2f} | {len(trace)} | {row['output_tokens_per_s']:.0f} | {row['goodput_tokens_per_s']:.0f} | "
            f"{row['timed_out']} | {row['refused']} | "
            f"{1e3 * row['tpot_median_s']:.0f}, {1e3 * row['tpot_p99_s']:.0f} ms | "
            f"{1e3 * row['ttft_median_s']:.0f}, {1e3 * row['ttft_p99_s']:.0f} ms | "
            f"{row['preemptions']} | {'holds' if held else 'breaks'} |",
            flush=True,
        )
        return held

    print(f"{arguments.workload}; step times: {step_times.description}; KV pool {arguments.kv_mib} MiB\n")
    print(
        "| requests/s | requests | output tokens/s | goodput | timed out | refused | TPOT median, p99 | "
        "TTFT median, p99 | preemptions | |"
    )
    print("| ---: |" + " ---: |" * 8 + " --- |")
    capacity = find_capacity(holds, arguments.first_rate)
    found = f"under {LOWEST_RATE:g}" if capacity is None else f"{capacity:.2f}"
    print(f"\ncapacity: {found} requests/s, the highest rate at which {limits}")
    write_table(arguments, f"capacity-{arguments.workload}", {**step_times.about, "capacity": capacity}, rows)
