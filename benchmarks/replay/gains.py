"""Shows when paged memory has 2, 4 and 24 times the throughput: by how long requests are beside the context; modelled.

    python -m benchmarks.replay gains [--workload sharegpt] [--device a100-40 --shape opt-13b]
        [--scales 0.125,0.25,0.5,1,2] [--requests 300] [--placement buddy]

All lengths of the workload are multiplied by each scale, as far as the context allows; its context stays. So many
requests, divided by the scale, come at once, and all run to their end. "whole batches" and contiguous memory are as in
`load`, lengths spread as the workload says.

Published: vLLM has 2 to 4 times the throughput of FasterTransformer and Orca at the same latency (Kwon et al., SOSP
2023, abstract), and up to 24 times that of HuggingFace Transformers (vLLM's announcement, June 2023: LLaMA-7B on an
A10G and LLaMA-13B on an A100 of 40 GB, ShareGPT's lengths).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import mean
from typing import Any

from benchmarks.replay.contiguous import PLACEMENTS, RESERVATIONS
from benchmarks.replay.load import BATCHES, PAGED, serve
from benchmarks.replay.output import panels, write_table
from benchmarks.replay.setup import add_modelled_arguments, all_above_zero, chosen_roofline, chosen_setup

from pagemill.planner.workload import Lengths, Workload, workload_named

OTHERS = (BATCHES, *RESERVATIONS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_modelled_arguments(parser)
    parser.add_argument(
        "--scales", type=all_above_zero, default=[0.125, 0.25, 0.5, 1.0, 2.0], help="of lengths, by commas"
    )
    parser.add_argument("--requests", type=int, default=300, help="at the scale 1")
    parser.add_argument("--placement", default="buddy", choices=list(PLACEMENTS), help="where contiguous runs lie")


def main(arguments: argparse.Namespace) -> None:
    roofline, base = chosen_roofline(arguments), workload_named(arguments.workload)
    setup = chosen_setup(arguments)
    print(f"{arguments.workload}: {roofline.description}; KV pool {arguments.kv_mib} MiB\n")
    print("| tokens of a request | of the context | paged: output tokens/s | " + " | ".join(OTHERS) + " |")
    print("| ---: | ---: | ---: |" + " ---: |" * len(OTHERS))
    rows: list[dict[str, Any]] = []
    for scale in arguments.scales:
        count = round(arguments.requests / scale)
        drawn = scaled(base, scale).requests(1.0, 2.0 * count)[:count]
        trace = [replace(request, arrival_s=0.0) for request in drawn]
        found = {
            kind: serve(kind, trace, base.context, setup, roofline, arguments.placement).output_tokens_per_s
            for kind in (*OTHERS, PAGED)
        }
        tokens = mean(request.length for request in trace)
        gains = {kind: found[PAGED] / found[kind] for kind in OTHERS}
        rows.append({"scale": scale, "tokens": tokens, "output_tokens_per_s": found, "gain": gains})
        print(
            f"| {tokens:.0f} | {tokens / base.context:.0%} | {found[PAGED]:.0f} | "
            + " | ".join(f"{found[kind]:.0f}: {gains[kind]:.2f}x" for kind in OTHERS)
            + " |",
            flush=True,
        )
    name = f"gains-{arguments.workload}"
    write_table(arguments, name, roofline.about, rows)
    charts = {
        "output tokens/s": {
            kind: [(row["tokens"], row["output_tokens_per_s"][kind]) for row in rows] for kind in (*OTHERS, PAGED)
        },
        "times as many, paged": {kind: [(row["tokens"], row["gain"][kind]) for row in rows] for kind in OTHERS},
    }
    panels(arguments, name, "tokens of a request, mean", charts, {}, logarithmic=True)


def scaled(base: Workload, scale: float) -> Workload:
    """Returns the workload with all its lengths multiplied."""

    def longer(lengths: Lengths) -> Lengths:
        return replace(lengths, mean=max(1.0, scale * lengths.mean), longest=max(1, round(scale * lengths.longest)))

    return replace(base, prompt=longer(base.prompt), output=longer(base.output))
