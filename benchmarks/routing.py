"""Compares ways to choose a replica among hundreds of modelled ones: what is found in caches, and first tokens' times.

    python -m benchmarks.routing [--workload agents] [--rate 400] [--seconds 30] [--replicas 200]
    python -m benchmarks.routing --trace conversation_trace.jsonl --replicas 200 --speed-up 60

The `Router` that serves runs here too, on generated requests or a public trace, whose hashes say which prefixes are
equal. A replica is a
model: it computes one prompt after another, at the seconds per token that the roofline of a device gives, generates
beside that in steps of a full batch, and keeps blocks of 512 tokens in a pool, the least recently used going first.
What it holds reaches the router when a prompt has been computed. Everything here is modelled, nothing is measured.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import Counter, OrderedDict
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from benchmarks.replay.setup import above_zero
from benchmarks.replay.workload import add_workload_argument

from pagemill.distributed.routing import Asked, Router
from pagemill.planner.workload import workload_named
from pagemill.simulate.roofline import Roofline, read_device, read_shape
from pagemill.simulate.step_time import StepWork
from pagemill.simulate.trace import MOONCAKE_BLOCK, TracedRequest, read_trace

CHUNK = 2048
"""Tokens of a prompt in one step of the model that gives the seconds of a token."""
BATCH = 64
"""Sequences of a step that only generates."""
ROWS = 256
SPREADS = (("2 to 3", 2, 3), ("10 to 99", 10, 99), ("1000 and more", 1000, 1 << 30))
"""How often a block was asked for: names, from, to."""
AFFINITY = {"Ray's affinity": float("inf"), "same, at most 8": 8.0}
"""Ray Serve LLM's prefix affinity, with its defaults, and with its limit on how many more requests one replica may have
than another. Needs `pagemill[ray]`."""


class Replica:
    """A modelled engine: a queue of prompts, and a cache of blocks."""

    def __init__(self, token_s: float, blocks: int) -> None:
        self.free_s = 0.0
        self.under_way = 0
        self._token_s = token_s
        self._most = blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def compute(self, now_s: float, digests: list[bytes], prompt_len: int) -> tuple[float, int]:
        """Returns when a prompt's first token comes, and how many of its tokens were found."""
        found = 0
        for digest in digests:
            if digest not in self._blocks:
                break
            found += MOONCAKE_BLOCK
        found = min(found, prompt_len - 1)
        self.free_s = max(now_s, self.free_s) + (prompt_len - found) * self._token_s
        return self.free_s, found

    def keep(self, digests: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Takes blocks into the cache. Returns those that are new, and those that went."""
        new, gone = [digest for digest in digests if digest not in self._blocks], []
        for digest in reversed(digests):  # a chain's end goes first
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._most:
            gone.append(self._blocks.popitem(last=False)[0])
        return new, gone


def run(trace: list[TracedRequest], policy: str, replicas: int, token_s: float, step_s: float, blocks: int) -> dict:
    """Returns the share of prompt tokens found, and each request's seconds to its first token."""
    pool = [Replica(token_s, blocks) for _ in range(replicas)]
    router = Router(MOONCAKE_BLOCK, "round-robin" if policy == "round-robin" else "least-work")
    for number in range(replicas):
        router.add(str(number), ROWS)
        router.note_times(str(number), token_s, step_s)
    affinity = None
    if policy in AFFINITY:
        from benchmarks.ray_prefix_affinity import RayPrefixAffinity

        affinity = RayPrefixAffinity(replicas, AFFINITY[policy])
    choose, events, order = random.Random(0), [], 0
    waits, found_tokens = np.zeros(len(trace)), 0

    def pass_time(until_s: float) -> None:
        while events and events[0][0] <= until_s:
            _, _, what, number, request_id, digests, tokens = heapq.heappop(events)
            if what == "first":
                stored, removed = pool[number].keep(digests)
                router.note_events(str(number), stored, removed)
                router.note_tokens(request_id, 1)
            else:
                router.note_tokens(request_id, tokens)
                router.end(request_id)
                pool[number].under_way -= 1

    for at, request in enumerate(trace):
        pass_time(request.arrival_s)
        digests = [each.to_bytes(8, "little") for each in request.hash_ids[: request.prompt_len // MOONCAKE_BLOCK]]
        forced = None
        if policy == "power of two":
            forced = str(min(choose.sample(range(replicas), 2), key=lambda number: pool[number].under_way))
        if affinity is not None:
            forced = str(affinity.choose(request.hash_ids, [each.under_way for each in pool]))
        asked = Asked(request.prompt_len, digests, request.output_len)
        number = int(router.route(str(at), asked, forced).replica)
        pool[number].under_way += 1
        first_s, found = pool[number].compute(request.arrival_s, digests, request.prompt_len)
        waits[at], found_tokens = first_s - request.arrival_s, found_tokens + found
        end_s = first_s + request.output_len * step_s
        for when_s, what in ((first_s, "first"), (end_s, "end")):
            heapq.heappush(events, (when_s, order, what, number, str(at), digests, request.output_len - 1))
            order += 1
    counts = Counter(block for request in trace for block in request.hash_ids[: request.prompt_len // MOONCAKE_BLOCK])
    copies = {block: router.directory.count_holders(block.to_bytes(8, "little")) for block in counts}
    spread = {
        name: [copies[block] for block, count in counts.items() if least <= count <= most and copies[block]]
        for name, least, most in SPREADS
    }
    return {"spread": spread, "found": found_tokens / sum(request.prompt_len for request in trace), "waits": waits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="Mooncake's JSON lines; else the --workload")
    add_workload_argument(parser, "agents")
    parser.add_argument("--rate", type=above_zero, default=400.0, help="the workload's requests per second")
    parser.add_argument("--seconds", type=above_zero, default=30.0, help="how long the workload's requests come")
    parser.add_argument("--speed-up", type=above_zero, default=60.0, help="times as fast as in the trace")
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--shape", default="llama-3-8b")
    given = parser.parse_args()
    model = Roofline(read_device(given.device), read_shape(given.shape), "bfloat16")
    layers = read_shape(given.shape).layers
    token_s = model.seconds(StepWork(1, CHUNK, 1, layers * CHUNK**2 // 2, layers * CHUNK)) / CHUNK
    seen = layers * BATCH * CHUNK
    step_s = model.seconds(StepWork(BATCH, BATCH, BATCH, seen, seen))
    blocks = model.kv_bytes // model.shape.frame_bytes(MOONCAKE_BLOCK)
    if given.trace is None:
        trace = workload_named(given.workload).requests(given.rate, given.seconds)
    else:
        trace = [replace(each, arrival_s=each.arrival_s / given.speed_up) for each in read_trace(given.trace)]
    print(
        f"modelled: {given.replicas} x {model.description}; {1e6 * token_s:.0f} us a prompt's token, "
        f"{1e3 * step_s:.1f} ms a step, {blocks} blocks of {MOONCAKE_BLOCK}; {len(trace)} requests in "
        f"{trace[-1].arrival_s:.0f} s"
    )
    print(f"{'policy':16} {'found':>7} {'mean TTFT':>10} {'p50':>8} {'p99':>8}")
    for policy in ("least-work", "round-robin", "power of two", *(AFFINITY if find_spec("ray") else ())):
        result = run(trace, policy, given.replicas, token_s, step_s, blocks)
        mean, half, most = (1e3 * each for each in (result["waits"].mean(), *np.percentile(result["waits"], (50, 99))))
        print(f"{policy:16} {result['found']:7.1%} {mean:7.0f} ms {half:5.0f} ms {most:5.0f} ms")
        if policy == "least-work":
            spread = result["spread"]
    print("replicas that hold a block by least work, in the mean, of blocks that were asked for")
    for name, copies in spread.items():
        print(f"  {name:>14} times: {np.mean(copies):6.1f} ({len(copies)} blocks)" if copies else f"  {name}: none")


if __name__ == "__main__":
    main()
