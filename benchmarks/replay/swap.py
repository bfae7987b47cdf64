"""Shows when swapping to host memory beats computing again, over the speed of the link between; modelled.

    python -m benchmarks.replay swap [--workload sharegpt] [--device a100-40 --shape opt-13b] [--requests 200]
        [--links 4,8,16,32,64] [--host-gib 64] [--block-sizes 8,16,32,64,128,256] [--copy-us 5]

All requests come at once, more than the pool holds, so that some are preempted. Under each `preemption_mode` the real
scheduler saves what is evicted to host memory, and a step waits until it is out; loads run beside steps. Links are in
GB/s, one direction; the device's own, with its efficiency, comes first. "none" has no host memory at all, and computes
again what it preempts. "computed again" is a share of all computed tokens. A block is one copy, which takes `--copy-us`
beside its bytes (assumed). Links are compared with blocks of 16 tokens, block sizes on the device's own link.

Published: with small blocks swapping is much slower than computing again, since many small copies do not use the link;
from 16 to 64 tokens both are alike (Kwon et al., SOSP 2023, section 7.3 and figure 19: OPT-13B, ShareGPT, A100).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
from benchmarks.replay.output import panels, write_table
from benchmarks.replay.setup import (
    above_zero,
    add_modelled_arguments,
    all_above_zero,
    chosen_roofline,
    chosen_setup,
    link_speed,
)

from pagemill.planner.replica import Setup
from pagemill.planner.workload import workload_named
from pagemill.scheduling.step_plan import StepPlan
from pagemill.simulate.lower_tier import LowerTier
from pagemill.simulate.roofline import Roofline
from pagemill.simulate.simulator import replay
from pagemill.simulate.trace import TracedRequest

MODES = ("recompute", "swap", "auto")
NONE = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_modelled_arguments(parser)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--links", type=all_above_zero, default=[4.0, 8.0, 16.0, 32.0, 64.0], help="GB/s, by commas")
    parser.add_argument("--host-gib", type=above_zero, default=64.0, help="host memory for K/V")
    parser.add_argument("--block-sizes", default="8,16,32,64,128,256", help="tokens, by commas")
    parser.add_argument("--copy-us", type=float, default=5.0, help="microseconds that a copy takes beside its bytes")


def main(arguments: argparse.Namespace) -> None:
    roofline = chosen_roofline(arguments)
    drawn = workload_named(arguments.workload).requests(1.0, 2.0 * arguments.requests)[: arguments.requests]
    trace = [replace(request, arrival_s=0.0) for request in drawn]
    setup = chosen_setup(arguments)
    own = link_speed(roofline) / 1e9
    links = [own, *arguments.links]
    print(f"{len(trace)} requests of {arguments.workload}; {roofline.description}; KV pool {arguments.kv_mib} MiB\n")
    print(
        "| link, GB/s | block | mode | output tokens/s | gap median, p99 | preemptions | computed again | tokens "
        "loaded | waited for saves |\n| ---: | ---: | --- |" + " ---: |" * 6
    )
    rows = [measure(trace, setup, roofline, own, NONE, arguments)]
    rows += [measure(trace, setup, roofline, link, mode, arguments) for link in links for mode in MODES]
    sizes = [replace(setup, block_size=int(size)) for size in arguments.block_sizes.split(",")]
    by_size = [measure(trace, size, roofline, own, mode, arguments) for size in sizes for mode in MODES]
    rows += by_size
    write_table(arguments, f"swap-{arguments.workload}", roofline.about, rows)
    panels(
        arguments,
        f"swap-{arguments.workload}",
        "link, GB/s",
        {
            label: {
                mode: sorted((row["link"], row[name]) for row in rows if row["mode"] == mode and row not in by_size)
                for mode in MODES
            }
            for label, name in (("output tokens/s", "output_tokens_per_s"), ("p99 gap, s", "gap_p99_s"))
        },
        {},
    )
    panels(
        arguments,
        f"swap-blocks-{arguments.workload}",
        "block size, tokens",
        {
            label: {mode: [(row["block_size"], row[name]) for row in by_size if row["mode"] == mode] for mode in MODES}
            for label, name in (("output tokens/s", "output_tokens_per_s"), ("share of time waiting", "saving"))
        },
        {},
    )


def measure(
    trace: list[TracedRequest],
    setup: Setup,
    roofline: Roofline,
    link: float,
    mode: str,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    block_bytes = roofline.shape.frame_bytes(setup.block_size)
    memory = setup.memory(roofline, saves_evicted=mode != NONE)
    tier = None
    if mode != NONE:
        block_s = block_bytes / (link * 1e9) + 1e-6 * arguments.copy_us
        tier = LowerTier(memory, int(arguments.host_gib * 2**30 / block_bytes), block_s, mode)
    scheduler = setup.scheduler(memory, tier=tier)
    computed = 0

    def count(plan: StepPlan, seconds: float) -> None:
        nonlocal computed
        computed += plan.num_tokens

    outcome = replay(trace, scheduler, roofline, [count], tier=tier)
    middle, late = np.percentile(outcome.gaps_s, [50, 99])
    row = {
        "link": link,
        "block_size": setup.block_size,
        "mode": mode,
        "output_tokens_per_s": outcome.output_tokens_per_s,
        "gap_median_s": float(middle),
        "gap_p99_s": float(late),
        "preemptions": outcome.preemptions,
        "recomputed": scheduler.state.recomputed_tokens / computed,
        "loaded_tokens": 0 if tier is None else tier.loaded * setup.block_size,
        "saving": 0.0 if tier is None else tier.saving_s / outcome.end_s,
    }
    print(
        f"| {link:.1f} | {setup.block_size} | {mode} | {row['output_tokens_per_s']:.0f} | {1e3 * middle:.0f}, "
        f"{1e3 * late:.0f} ms | {row['preemptions']} | {row['recomputed']:.1%} | {row['loaded_tokens']} | "
        f"{row['saving']:.1%} |",
        flush=True,
    )
    return row
