"""Compares ways to choose a replica among hundreds of modelled ones: what is found in caches, and first tokens' times.

    python -m benchmarks.routing [conversation_trace.jsonl] [--replicas 200] [--seconds 600] [--rate 60]
        [--ways least-work,round-robin] [--workload agents]

Router, scheduler and memory are those that serve: prompts come in chunks that leave the gaps of answers even, admission
foresees, blocks are evicted. Step times are a roofline's, and messages take no time. Which prefixes are equal says the
public trace, by hashes of 512 tokens; so large are the blocks here too. Without a trace, the workload's requests come.
No blocks travel between replicas. Ray Serve LLM's prefix affinity ("affinity") is its own class; it needs
`pagemill[ray]`, and is left out without.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from benchmarks.replay.modelled_fleet import Choose, ModelledFleet
from benchmarks.replay.output import write_table
from benchmarks.replay.setup import (
    add_device_arguments,
    add_engine_arguments,
    add_output_argument,
    add_trace_arguments,
    chosen_roofline,
    chosen_setup,
    chosen_trace,
    describe,
)

from pagemill.distributed.routing import RoutingPolicy
from pagemill.engine.messages import DIGEST_BYTES
from pagemill.memory.digest import extend_chain
from pagemill.simulate.engine import ROOT
from pagemill.simulate.trace import MOONCAKE_BLOCK, TracedRequest

SPREADS = (("2 to 3", 2, 3), ("10 to 99", 10, 99), ("1000 and more", 1000, 1 << 30))
"""How often a block was asked for: names, from, to."""
AFFINITY = {"affinity": float("inf"), "affinity-8": 8.0}
"""Ray Serve LLM's prefix affinity: how many more requests one replica may have than another; by default any number."""
WAYS = ("least-work", "round-robin", "power-of-two", *AFFINITY)


def chooser(way: str, replicas: int) -> Choose | None:
    """Returns what chooses in the router's place; None where the router does."""
    if way in AFFINITY:
        from benchmarks.ray_prefix_affinity import RayPrefixAffinity

        affinity = RayPrefixAffinity(replicas, AFFINITY[way])
        return lambda request, under_way: affinity.choose(request.hash_ids, under_way)
    if way == "power-of-two":
        draw = random.Random(0)
        return lambda request, under_way: min(draw.sample(range(replicas), 2), key=under_way.__getitem__)
    return None


def findable(trace: Sequence[TracedRequest]) -> float:
    """Returns the share of the prompts' tokens that one cache for all would find, if it forgot nothing."""
    known, found = set[int](), 0
    for request in trace:
        whole = request.hash_ids[: request.prompt_len // MOONCAKE_BLOCK]
        blocks = next((at for at, name in enumerate(whole) if name not in known), len(whole))
        found += min(blocks * MOONCAKE_BLOCK, request.prompt_len - 1)
        known.update(whole)
    return found / sum(request.prompt_len for request in trace)


def spread(fleet: ModelledFleet, trace: Sequence[TracedRequest]) -> dict[str, list[int]]:
    """Returns how many replicas hold each block that is held, by how often it was asked for."""
    asked: Counter[bytes] = Counter()
    for request in trace:
        chain: list[bytes] = []
        extend_chain(chain, ROOT, request.prompt(), MOONCAKE_BLOCK)
        asked.update(digest[:DIGEST_BYTES] for digest in chain)
    copies = {digest: len(fleet.router.directory.find([digest], ~0, coming=False)) for digest in asked}
    return {
        name: [copies[digest] for digest, count in asked.items() if least <= count <= most and copies[digest]]
        for name, least, most in SPREADS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_trace_arguments(parser, seconds=30.0, rate=60.0, workload="agents", whole=True)
    add_engine_arguments(parser, calibrated=False)
    add_device_arguments(parser, device="h100", shape="llama-3-8b")
    parser.set_defaults(max_num_batched_tokens=2048, kv_compaction="off")
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--ways", default=",".join(WAYS if find_spec("ray") else WAYS[:3]), help="by commas")
    add_output_argument(parser)
    given = parser.parse_args()
    ways = given.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"there is no way {unknown[0]!r}; choose among {', '.join(WAYS)}")
    roofline, trace = chosen_roofline(given), chosen_trace(given)
    setup = replace(chosen_setup(given, MOONCAKE_BLOCK), target_tpot_s=None)
    prompts = sum(request.prompt_len for request in trace)
    print(
        f"modelled: {given.replicas} replicas; {describe(given, roofline, trace)} each\n"
        f"one cache of all would find {findable(trace):.1%}\n"
    )
    print("| way | prompt tokens found | mean TTFT | p50 | p99 | per token, p50 | p99 | preemptions | simulated in |")
    print("| --- |" + " ---: |" * 8)
    rows: list[dict[str, Any]] = []
    for way in ways:
        began_s = time.process_time()
        policy: RoutingPolicy = "round-robin" if way == "round-robin" else "least-work"
        fleet = ModelledFleet(setup, roofline, given.replicas, policy=policy, choose=chooser(way, given.replicas))
        outcome = fleet.run(trace)
        waits = 1e3 * np.array([one.ttft_s for one in outcome.finished])
        each = 1e3 * np.array([one.tpot_s for one in outcome.finished if one.tpot_s is not None])
        row = {
            "way": way,
            "found": sum(one.num_cached_tokens for one in outcome.served) / prompts,
            "ttft_mean_ms": float(waits.mean()),
            **dict(zip(("ttft_median_ms", "ttft_p99_ms"), map(float, np.percentile(waits, (50, 99))), strict=True)),
            **dict(zip(("tpot_median_ms", "tpot_p99_ms"), map(float, np.percentile(each, (50, 99))), strict=True)),
            "preemptions": outcome.preemptions,
            "refused": sum(one.refused for one in outcome.served),
        }
        rows.append(row)
        print(
            f"| {way} | {row['found']:.1%} | {row['ttft_mean_ms']:.0f} ms | "
            f"{row['ttft_median_ms']:.0f} ms | {row['ttft_p99_ms']:.0f} ms | {row['tpot_median_ms']:.1f} ms | "
            f"{row['tpot_p99_ms']:.1f} ms | {row['preemptions']} | {time.process_time() - began_s:.0f} s |",
            flush=True,
        )
        if way == "least-work":
            row["spread"] = spread(fleet, trace)
    write_table(given, "routing", roofline.about, rows)
    for row in rows:
        for name, copies in row.get("spread", {}).items():
            if copies:
                print(f"{len(copies)} blocks asked for {name} times: held by {np.mean(copies):.1f} replicas")


if __name__ == "__main__":
    main()
