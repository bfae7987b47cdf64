"""Draws throughput and latency against load, for contiguous and paged KV memory of equal size, until each saturates.

    python -m benchmarks.replay load [--workload sharegpt] [--device a100-40 --shape opt-13b] [--seconds 200]
        [--limit-ms 100] [--first-rate 0.3]

Requests of the workload's lengths arrive at random for `--seconds` at each rate, and all run to their end. Output
tokens per second are counted while they arrive. Normalized latency is the mean over requests of the seconds from
arrival to the last token, per output token (Yu et al., "Orca", 2022). A memory saturates where that breaks
`--limit-ms`: rates rise by half until it does, then three more bisect. Two further rates, 1.5 and 3 times as high, show
the throughput when everything is taken. Contiguous memory is as in `allocators`; "maximum" reserves the model's context
for each request. By default runs lie by the buddy system, as in the paper's own versions of Orca. "whole batches"
reserves the maximum too, and serves as many requests as fit until the longest answer has ended, as FasterTransformer
does: prompts are computed in one step, answers come back together. Sequences that have ended cost its steps nothing.

Beside each stands what the paper measured (Kwon et al., "Efficient Memory Management for Large Language Model Serving
with PagedAttention", SOSP 2023, figures 12 and 13, OPT-13B on an A100 of 40 GB): how many requests ran at once, and the
range of ratios over all its models. All of it is *modelled* here: the real scheduler and memory manager, a roofline's
step times.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from benchmarks.replay.contiguous import PLACEMENTS, RESERVATIONS, ContiguousMemory, WholeBatches, root_of
from benchmarks.replay.output import panels, write_table
from benchmarks.replay.setup import above_zero, add_modelled_arguments, chosen_roofline, chosen_setup

from pagemill.planner.limits import find_capacity
from pagemill.planner.replica import Setup
from pagemill.planner.workload import Workload, workload_named
from pagemill.simulate.roofline import Roofline
from pagemill.simulate.simulator import Replay, Served, replay
from pagemill.simulate.trace import TracedRequest

PAGED = "paged"
BATCHES = "whole batches"
LOWEST_RATE = 0.02
BEYOND = (1.5, 3.0)
PUBLISHED_RUNNING = {
    ("opt-13b", "sharegpt"): (2.0, {"maximum": 7.00, "power of two": 9.81, "exact": 13.62, PAGED: 30.42}),
    ("opt-13b", "alpaca"): (30.0, {"maximum": 7.00, "power of two": 43.24, "exact": 72.75, PAGED: 132.44}),
}
"""By shape and workload: requests per second, and the mean number of requests that ran at once (figure 13)."""
PUBLISHED_RATIO = {"sharegpt": {BATCHES: "up to 22x", "maximum": "2.7x to 8x", "exact": "1.7x to 2.7x"}}
"""By workload: how many times the rate vLLM sustains, over all models (section 6.2)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_modelled_arguments(parser)
    parser.add_argument("--placement", default="buddy", choices=list(PLACEMENTS), help="where contiguous runs lie")
    parser.add_argument("--seconds", type=above_zero, default=200.0, help="how long requests arrive at each rate")
    parser.add_argument("--limit-ms", type=above_zero, default=100.0, help="of normalized latency, per output token")
    parser.add_argument("--first-rate", type=above_zero, default=0.3, help="requests per second to begin with")


def main(arguments: argparse.Namespace) -> None:
    workload, roofline = workload_named(arguments.workload), chosen_roofline(arguments)
    setup = chosen_setup(arguments)
    print(f"{arguments.workload}: {roofline.description}; KV pool {arguments.kv_mib} MiB\n")
    print("| memory | requests/s | running, mean | output tokens/s | normalized latency | preemptions |")
    print("| --- |" + " ---: |" * 5)
    kinds = [BATCHES, *RESERVATIONS, PAGED]
    rows = {kind: sweep(kind, workload, setup, roofline, arguments) for kind in kinds}
    saturated = {kind: max((row["rate"] for row in rows[kind] if row["held"]), default=0.0) for kind in kinds}
    most = {kind: max(row["output_tokens_per_s"] for row in rows[kind]) for kind in kinds}
    summary, ratios = [], PUBLISHED_RATIO.get(arguments.workload, {})
    at, published = PUBLISHED_RUNNING.get((arguments.shape, arguments.workload), (None, {}))
    print(f"\nSustained within {arguments.limit_ms:g} ms per token, and with everything taken; all *modelled*:\n")
    running = "" if at is None else f", at {at:g} requests/s"
    print(
        "| memory | requests/s | paged has | published | output tokens/s, most | paged has | "
        f"running{running} | published |\n| --- |" + " ---: |" * 7
    )
    for kind in kinds:
        here = None
        if at is not None:
            trace = workload.requests(at, arguments.seconds)
            here = serve(kind, trace, workload.context, setup, roofline, arguments.placement, arguments.seconds)
        row = {
            "memory": kind,
            "sustained_rate": saturated[kind],
            "rate_ratio": saturated[PAGED] / saturated[kind] if saturated[kind] else None,
            "most_output_tokens_per_s": most[kind],
            "throughput_ratio": most[PAGED] / most[kind],
            "running": None if here is None else here.mean_running,
            "published_running": published.get(kind),
        }
        summary.append(row)
        ratio = "" if row["rate_ratio"] is None else f"{row['rate_ratio']:.2f}x"
        now = "" if here is None else f"{here.mean_running:.1f}"
        was = "" if kind not in published else f"{published[kind]:.1f}"
        print(
            f"| {kind} | {saturated[kind]:.2f} | {ratio} | {ratios.get(kind, '')} | {most[kind]:.0f} | "
            f"{row['throughput_ratio']:.2f}x | {now} | {was} |"
        )
    name = f"load-{arguments.workload}"
    write_table(arguments, name, roofline.about, [*summary, *(row for kind in kinds for row in rows[kind])])
    panels(
        arguments,
        name,
        "requests per second that arrive",
        {
            "output tokens/s": {kind: points(rows[kind], "output_tokens_per_s") for kind in kinds},
            "normalized latency, s per token": {kind: points(rows[kind], "normalized_s") for kind in kinds},
        },
        {"normalized latency, s per token": (0.0, 5 * arguments.limit_ms / 1e3)},
    )


def points(rows: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return sorted((row["rate"], row[name]) for row in rows)


def sweep(
    kind: str, workload: Workload, setup: Setup, roofline: Roofline, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns a row for each rate tried."""
    rows: list[dict[str, Any]] = []

    def holds(rate: float) -> bool:
        rows.append(one(kind, workload, setup, roofline, arguments, rate))
        row = rows[-1]
        print(
            f"| {kind} | {rate:.2f} | {row['running']:.1f} | {row['output_tokens_per_s']:.0f} | "
            f"{1e3 * row['normalized_s']:.0f} ms | {row['preemptions']} |",
            flush=True,
        )
        return bool(row["held"])

    sustained = find_capacity(holds, arguments.first_rate, LOWEST_RATE)
    for factor in BEYOND:
        holds(factor * (sustained or arguments.first_rate))
    return rows


def one(
    kind: str, workload: Workload, setup: Setup, roofline: Roofline, arguments: argparse.Namespace, rate: float
) -> dict[str, Any]:
    """Serves one rate."""
    trace = workload.requests(rate, arguments.seconds)
    outcome = serve(kind, trace, workload.context, setup, roofline, arguments.placement)
    normalized_s = mean((one.finished_s - one.request.arrival_s) / one.num_tokens for one in outcome.finished)
    return {
        "memory": kind,
        "rate": rate,
        "requests": len(trace),
        "running": outcome.mean_running,
        "output_tokens_per_s": sum(tokens_by(one, arguments.seconds) for one in outcome.served) / arguments.seconds,
        "normalized_s": normalized_s,
        "preemptions": outcome.preemptions,
        "held": normalized_s <= arguments.limit_ms / 1e3,
    }


def tokens_by(one: Served, at_s: float) -> float:
    """Returns how many tokens a request that has ended had by then, as if those after the first had come evenly."""
    assert one.first_token_s is not None
    assert one.finished_s is not None
    if at_s < one.first_token_s:
        return 0.0
    if at_s >= one.finished_s:
        return one.num_tokens
    return 1 + (one.num_tokens - 1) * (at_s - one.first_token_s) / (one.finished_s - one.first_token_s)


def serve(
    kind: str,
    trace: Sequence[TracedRequest],
    context: int,
    setup: Setup,
    roofline: Roofline,
    placement: str,
    until_s: float = math.inf,
) -> Replay:
    """Serves a trace with a kind of memory."""
    if kind == PAGED:
        return replay(trace, setup.scheduler(setup.memory(roofline)), roofline, until_s=until_s)
    if kind == BATCHES:
        return serve_batches(trace, context, setup, roofline, placement, until_s)
    slots = int(setup.kv_bytes / (roofline.shape.slot_bytes * len(roofline.shape.groups.groups)))
    wanted = {root_of(request): RESERVATIONS[kind](request, context) for request in trace}
    memory = ContiguousMemory(slots, PLACEMENTS[placement](slots), wanted.__getitem__)
    return replay(trace, setup.scheduler(memory, caching=False), roofline, root=root_of, until_s=until_s)


def serve_batches(
    trace: Sequence[TracedRequest], context: int, setup: Setup, roofline: Roofline, placement: str, until_s: float
) -> Replay:
    """Serves a trace by whole batches. An answer ends, and has its tokens, when its batch does."""
    slots = int(setup.kv_bytes / (roofline.shape.slot_bytes * len(roofline.shape.groups.groups)))
    memory = WholeBatches(slots, PLACEMENTS[placement](slots), lambda root: context)
    scheduler = replace(setup, max_num_batched_tokens=slots).scheduler(memory, caching=False)
    outcome = replay(trace, scheduler, roofline, root=root_of, until_s=until_s)
    for one in outcome.served:
        if one.finished_s is not None:
            one.finished_s = memory.ends.get(root_of(one.request))
    return outcome
