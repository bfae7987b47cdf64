"""Shows what paging gains where lengths are uniform, and where they vary: throughput over their spread; modelled.

    python -m benchmarks.replay lengths [--workload sharegpt] [--device a100-40 --shape opt-13b] [--requests 300]
        [--spreads 0,0.25,0.5,1,1.5]

All requests come at once, so that memory decides how many run. Lengths are log-normal with the workload's means; the
spread is the standard deviation of their logarithm, of prompts and answers alike, cut at the longest that the context
holds. Contiguous memory is as in `load`. Output tokens per second are counted until the last request ends.

Published: vLLM sustains 1.7 to 2.7 times the rate of Orca that knows every length (ShareGPT, whose lengths spread
widely; Kwon et al., SOSP 2023, section 6.2). For lengths that do not vary there is no published figure; what remains
then is what the buddy system rounds up.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.replay.contiguous import PLACEMENTS, RESERVATIONS
from benchmarks.replay.load import PAGED, serve
from benchmarks.replay.output import panels, write_table
from benchmarks.replay.setup import add_modelled_arguments, chosen_roofline, chosen_setup

from pagemill.planner.workload import workload_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_modelled_arguments(parser)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--spreads", default="0,0.25,0.5,1,1.5", help="by commas")
    parser.add_argument("--placement", default="buddy", choices=list(PLACEMENTS), help="where contiguous runs lie")


def main(arguments: argparse.Namespace) -> None:
    roofline, base = chosen_roofline(arguments), workload_named(arguments.workload)
    setup, kinds = chosen_setup(arguments), [*RESERVATIONS, PAGED]
    print(f"{arguments.requests} requests; {roofline.description}; KV pool {arguments.kv_mib} MiB\n")
    print("| spread | memory | output tokens/s | paged has | running, mean | preemptions |")
    print("| ---: | --- |" + " ---: |" * 4)
    rows: list[dict[str, Any]] = []
    for spread in map(float, arguments.spreads.split(",")):
        prompt, output = (replace(each, sigma=max(spread, 1e-3)) for each in (base.prompt, base.output))
        drawn = replace(base, prompt=prompt, output=output).requests(1.0, 2.0 * arguments.requests)
        trace = [replace(request, arrival_s=0.0) for request in drawn[: arguments.requests]]
        outcomes = {kind: serve(kind, trace, base.context, setup, roofline, arguments.placement) for kind in kinds}
        most = outcomes[PAGED].output_tokens_per_s
        for kind, outcome in outcomes.items():
            row = {
                "spread": spread,
                "memory": kind,
                "output_tokens_per_s": outcome.output_tokens_per_s,
                "paged_has": most / outcome.output_tokens_per_s,
                "running": outcome.mean_running,
                "preemptions": outcome.preemptions,
            }
            rows.append(row)
            print(
                f"| {spread:g} | {kind} | {row['output_tokens_per_s']:.0f} | {row['paged_has']:.2f}x | "
                f"{row['running']:.1f} | {row['preemptions']} |",
                flush=True,
            )
    write_table(arguments, f"lengths-{arguments.workload}", roofline.about, rows)
    lines = {
        label: {kind: [(row["spread"], row[name]) for row in rows if row["memory"] == kind] for kind in kinds}
        for label, name in (
            ("output tokens/s", "output_tokens_per_s"),
            ("times as many, paged", "paged_has"),
        )
    }
    panels(arguments, f"lengths-{arguments.workload}", "spread of lengths", lines, {}, x_log=False)
