"""Holds the controller against fixed settings.

    python -m benchmarks.replay control [TRACE] [--target-tpot-ms 150] [--seconds 200] [--rate 0.1]
        [--tokens 32,64,128,256,512] [--seqs 16,64,256] [--workload documents]

Without a TRACE, the workload's requests come, `--rate` a second.

Goodput: output tokens per second of requests that ended within the time replayed, and whose time per output token was
at most the target. "bursts" is the share of gaps between tokens, preemptions aside, that were longer than the target.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.replay.output import bars, write_table
from benchmarks.replay.setup import add_replay_arguments, begin, chosen_setup, source_name

from pagemill.errors import ConfigError, TraceError
from pagemill.planner.replica import Setup, latencies
from pagemill.scheduling.step_plan import StepPlan
from pagemill.simulate.simulator import replay
from pagemill.simulate.step_time import StepModel
from pagemill.simulate.trace import TracedRequest


@dataclass(frozen=True)
class Row:
    setting: str
    goodput: float
    output_tokens_per_s: float
    in_time: float
    """Share of the requests that had ended."""
    bursts: float
    tpot_median_s: float
    tpot_p99_s: float
    ttft_median_s: float
    finished: int
    preemptions: int
    replayed_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_replay_arguments(parser, seconds=200, rate=0.1, workload="documents")
    parser.add_argument("--target-tpot-ms", type=float, default=150.0)
    parser.add_argument("--tokens", default="32,64,128,256,512", help="max_num_batched_tokens of the fixed settings")
    parser.add_argument("--seqs", default="16,64,256", help="max_num_seqs of the fixed settings")


def main(arguments: argparse.Namespace) -> None:
    if not 0 < arguments.target_tpot_ms < math.inf:
        raise ConfigError(f"target_tpot_ms is {arguments.target_tpot_ms:g}; it must be above 0 milliseconds")
    (step_times, trace), setup = begin(arguments), chosen_setup(arguments)
    target_s, until_s = arguments.target_tpot_ms / 1e3, trace[-1].arrival_s
    if not until_s:
        raise TraceError(f"all {len(trace)} requests come at once, so there is no time to measure; raise --seconds")
    print(
        "\n| setting | goodput, tokens/s | all tokens/s | in time | bursts | TPOT median | TPOT p99 | TTFT median | "
        "finished | preemptions | replayed in |"
    )
    print("| --- |" + " ---: |" * 10)
    rows = [measure("controller", trace, replace(setup, target_tpot_s=target_s), step_times, target_s, until_s)]
    for seqs in map(int, arguments.seqs.split(",")):
        for tokens in map(int, arguments.tokens.split(",")):
            fixed = replace(setup, max_num_batched_tokens=tokens, max_num_seqs=seqs)
            rows.append(measure(f"{tokens} tokens, {seqs} sequences", trace, fixed, step_times, target_s, until_s))
    best = max(rows[1:], key=lambda row: row.goodput)
    ratio = f"{rows[0].goodput / best.goodput:.2f}" if best.goodput else "–"
    print(f"\ncontroller / best fixed setting ({best.setting}): {ratio}")
    name = f"control-{Path(source_name(arguments)).stem}"
    write_table(arguments, name, step_times.about, [asdict(row) for row in rows])
    bars(
        arguments,
        name,
        [row.setting.replace(" tokens, ", "\n").replace(" sequences", "") for row in rows],
        {"goodput": [row.goodput for row in rows], "all": [row.output_tokens_per_s for row in rows]},
        "tokens of a step, sequences",
        f"output tokens/s; goodput: TPOT <= {arguments.target_tpot_ms:g} ms",
    )


def measure(
    name: str, trace: Sequence[TracedRequest], setup: Setup, step_times: StepModel, target_s: float, until_s: float
) -> Row:
    gaps = late = 0

    def count(plan: StepPlan, seconds: float) -> None:
        nonlocal gaps, late
        generating = plan.num_generating
        gaps += generating
        late += generating * (seconds > target_s)

    begin = time.perf_counter()
    scheduler = setup.scheduler(setup.memory(step_times))
    outcome = replay(trace, scheduler, step_times, [count], until_s=until_s)
    finished = outcome.finished
    good = [one for one in finished if one.tpot_s is None or one.tpot_s <= target_s]
    found = latencies(outcome.served)
    row = Row(
        setting=name,
        goodput=sum(one.num_tokens for one in good) / until_s,
        output_tokens_per_s=outcome.output_tokens_per_s,
        in_time=len(good) / max(1, len(finished)),
        bursts=late / max(1, gaps),
        tpot_median_s=found["tpot_median_s"],
        tpot_p99_s=found["tpot_p99_s"],
        ttft_median_s=found["ttft_median_s"],
        finished=len(finished),
        preemptions=outcome.preemptions,
        replayed_s=time.perf_counter() - begin,
    )
    print(
        f"| {row.setting} | {row.goodput:.1f} | {row.output_tokens_per_s:.1f} | {row.in_time:.0%} | {row.bursts:.1%} | "
        f"{1e3 * row.tpot_median_s:.0f} ms | {1e3 * row.tpot_p99_s:.0f} ms | {row.ttft_median_s:.1f} s | "
        f"{row.finished} | {row.preemptions} | {row.replayed_s:.0f} s |",
        flush=True,
    )
    return row
