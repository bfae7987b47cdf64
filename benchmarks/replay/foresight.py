"""Shows what admission by foresight saves: requests of a 13B model at once in a pool that cannot hold them, modelled.

    python -m benchmarks.replay foresight [--requests 160] [--prompt 161] [--output 338] [--kv-mib 12000]
        [--device a100-40 --shape llama-13b]

Step times are a roofline. "equal"
requests have all these lengths, those "drawn" have log-normal ones with these means. Either the scheduler is told how
long they become (ignore_eos), or each sets the output's length as its limit ("limit"), or all may get 2,048 tokens and
end before ("unknown"). "again" is the share of all computed tokens that were computed before.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import replace

import numpy as np
from benchmarks.replay.setup import MIB, add_device_arguments, chosen_roofline

from pagemill.planner.replica import Setup
from pagemill.scheduling.step_plan import StepPlan
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
    add_device_arguments(parser, device="a100-40", shape="llama-13b")


def main(arguments: argparse.Namespace) -> None:
    roofline = chosen_roofline(arguments)
    print(f"{roofline.description}; KV pool {arguments.kv_mib} MiB\n")
    print("| lengths | target_tpot_ms | output tokens/s | preempted | again | pool used | gap median, p99 |")
    print("| --- | --- |" + " ---: |" * 5)
    number, prompt, output = arguments.requests, arguments.prompt, arguments.output
    equal = [TracedRequest(index, 0.0, prompt, output) for index in range(number)]
    for name, trace in (("equal", equal), ("drawn", drawn(number, prompt, output))):
        for known, max_tokens in KNOWN.items():
            for target_s in (math.inf, None):
                setup = replace(Setup(arguments.kv_mib * MIB), target_tpot_s=target_s)
                target = "auto" if target_s is None else "off"
                print(f"| {name}, {known} | {target} | {serve(trace, setup, roofline, max_tokens)}")


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


def serve(trace: list[TracedRequest], setup: Setup, times: Roofline, max_tokens: int | None) -> str:
    """Returns a table's further cells."""
    memory = setup.memory(times)
    scheduler = setup.scheduler(memory)
    computed = 0
    used = 0.0

    def count(plan: StepPlan, seconds: float) -> None:
        nonlocal computed, used
        computed += plan.num_tokens
        used += seconds * (1 - memory.num_available / memory.num_frames)

    outcome = replay(trace, scheduler, times, [count], max_tokens=max_tokens)
    middle, late = np.percentile(outcome.gaps_s, [50, 99])
    return (
        f"{outcome.output_tokens_per_s:.0f} | {sum(one.starts > 1 for one in outcome.served)} | "
        f"{scheduler.state.recomputed_tokens / computed:.1%} | {used / outcome.busy_s:.0%} | "
        f"{1e3 * middle:.0f}, {1e3 * late:.0f} ms |"
    )
