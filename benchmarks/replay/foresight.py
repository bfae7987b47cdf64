"""Shows what admission by foresight saves: requests of a 13B model at once in a pool that cannot hold them, modelled.

    python -m benchmarks.replay foresight [--requests 160] [--prompt 161] [--output 338] [--kv-mib 12000]
        [--host-gib 11.7] [--device a100-40 --shape llama-13b]

Step times are a roofline. "equal" requests have all these lengths, those "drawn" have log-normal ones with these means.
Either the scheduler is told how long they become (ignore_eos), or each sets the output's length as its limit ("limit"),
or all may get 2,048 tokens and end before ("unknown"). With host memory, what is preempted may come back from there
over the device's own link; there is as much as the pool by default, as beside a GPU. "again" is the share of all
computed tokens that were computed before.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from dataclasses import dataclass, replace

import numpy as np
from benchmarks.replay.setup import MIB, above_zero, add_device_arguments, chosen_roofline, link_speed

from pagemill.planner.replica import Setup
from pagemill.scheduling.step_plan import StepPlan
from pagemill.simulate.lower_tier import LowerTier
from pagemill.simulate.roofline import Roofline
from pagemill.simulate.simulator import replay
from pagemill.simulate.trace import TracedRequest

KNOWN: dict[str, int | None] = {"known": None, "limit": 1, "unknown": 2048}
"""The least `max_tokens` that all requests set; None: they end at their own lengths, whatever they sample."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--prompt", type=int, default=161, help="tokens of a prompt, in the mean")
    parser.add_argument("--output", type=int, default=338, help="tokens of an answer, in the mean")
    parser.add_argument("--kv-mib", type=int, default=12_000)
    parser.add_argument("--host-gib", type=above_zero, help="host memory for K/V; by default as much as the pool")
    add_device_arguments(parser, device="a100-40", shape="llama-13b")


def main(arguments: argparse.Namespace) -> None:
    roofline = chosen_roofline(arguments)
    speed = link_speed(roofline)
    print(f"{roofline.description}; KV pool {arguments.kv_mib} MiB\n")
    print(
        "| lengths | host memory | target_tpot_ms | output tokens/s | preempted | again | pool used | first token, "
        "median | gap median, p99, longest |"
    )
    print("| --- | ---: | --- |" + " ---: |" * 6)
    number, prompt, output = arguments.requests, arguments.prompt, arguments.output
    equal = [TracedRequest(index, 0.0, prompt, output) for index in range(number)]
    pool_gib = arguments.kv_mib / 1024
    cases = itertools.product(
        (("equal", equal), ("drawn", drawn(number, prompt, output))),
        KNOWN.items(),
        (0.0, pool_gib if arguments.host_gib is None else arguments.host_gib),
        (("off", math.inf), ("auto", None)),
    )
    for (name, trace), (known, max_tokens), host_gib, (target, target_s) in cases:
        setup = replace(Setup(arguments.kv_mib * MIB), target_tpot_s=target_s)
        found = serve(trace, setup, roofline, max_tokens, host_gib * 2**30, speed)
        print(f"| {name}, {known} | {host_gib:.1f} GiB | {target} | {found.cells}", flush=True)


def drawn(number: int, prompt: int, output: int) -> list[TracedRequest]:
    """Returns requests of log-normal lengths, at most 1,500 and 1,000 tokens."""
    draw = random.Random(1)
    lengths = [
        (prompt * draw.lognormvariate(-0.5, 1.0), output * draw.lognormvariate(-0.32, 0.8)) for _ in range(number)
    ]
    return [
        TracedRequest(index, 0.0, max(8, min(1500, int(prompt))), max(8, min(1000, int(output))))
        for index, (prompt, output) in enumerate(lengths)
    ]


@dataclass(frozen=True)
class Found:
    """Holds what became of the requests. again: share of the computed tokens. used: of the pool, in the mean over time.
    gaps_s: median, 99th percentile and the longest."""

    tokens_per_s: float
    preempted: int
    again: float
    used: float
    first_token_s: float
    gaps_s: tuple[float, float, float]

    @property
    def cells(self) -> str:
        gaps = ", ".join(f"{1e3 * gap:.0f}" for gap in self.gaps_s)
        return (
            f"{self.tokens_per_s:.0f} | {self.preempted} | {self.again:.1%} | {self.used:.0%} | "
            f"{self.first_token_s:.1f} s | {gaps} ms |"
        )


def serve(
    trace: list[TracedRequest], setup: Setup, times: Roofline, max_tokens: int | None, host_bytes: float, speed: float
) -> Found:
    """Serves the trace. speed: of the link to host memory, in bytes per second."""
    memory = setup.memory(times, saves_evicted=host_bytes > 0)
    tier = None
    if host_bytes:
        block_bytes = times.shape.frame_bytes(setup.block_size)
        tier = LowerTier(memory, int(host_bytes / block_bytes), block_bytes / speed)
    scheduler = setup.scheduler(memory, tier=tier)
    computed = 0
    used = 0.0

    def count(plan: StepPlan, seconds: float) -> None:
        nonlocal computed, used
        computed += plan.num_tokens
        used += seconds * (1 - memory.num_available / memory.num_frames)

    outcome = replay(trace, scheduler, times, [count], max_tokens=max_tokens, tier=tier)
    middle, late, longest = np.percentile(outcome.gaps_s, [50, 99, 100])
    return Found(
        outcome.output_tokens_per_s,
        sum(one.starts > 1 for one in outcome.served),
        scheduler.state.recomputed_tokens / computed,
        used / outcome.busy_s,
        float(np.median([one.ttft_s for one in outcome.served])),
        (float(middle), float(late), float(longest)),
    )
