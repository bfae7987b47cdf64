"""Measures what a front end over replicas costs beside a server of one engine: processor time, and time to first token.

    python -m benchmarks.fleet_cost [--ways one,1,3] [--rounds 2] [--requests 40] [--streams 4] [--tokens 128]

For each way, in turns: short requests one after another, each of one token, then streams side by side. Processor time
is that of all the server's processes, and of each kind of them, as Linux counts it; what they take while nothing is
asked is measured first, and taken off. `one` is a server without Ray; a number is so many replicas behind Ray Serve's
front end. Needs `pagemill[ray]`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import httpx
from benchmarks.front_end_stalls import MODEL, server
from benchmarks.replicas import SETTINGS
from benchmarks.streamed_answer import ask

A = TypeVar("A")

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
IDLE_S = 6.0
KINDS = {
    "pagemill.engine.process": "engine",
    "listening_front_end": "front end",
    ":Engine": "replica",
    "pagemill serve": "server",
}
"""Names of processes, by a part of their command lines; others are Ray's own."""


def taken() -> Counter[str]:
    """Returns the processor seconds of this process's descendants so far, by kind."""
    stats = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            line = (place / "cmdline").read_text().replace("\0", " ")
            stats[int(place.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S, line
    found: Counter[str] = Counter()
    left = [os.getpid()]
    while left:
        below = [pid for pid, (parent, _, _) in stats.items() if parent == left[-1]]
        left.pop()
        for pid in below:
            line = stats[pid][2]
            found[next((kind for part, kind in KINDS.items() if part in line), "Ray")] += stats[pid][1]
        left += below
    return found


async def spent(work: Awaitable[A], idle: Counter[str]) -> tuple[float, Counter[str], A]:
    """Returns the seconds of some work, the processor time that it took beyond `idle` (by second), and its result."""
    before, began_s = taken(), time.perf_counter()
    result = await work
    seconds = time.perf_counter() - began_s
    after = taken()
    return seconds, Counter({kind: after[kind] - before[kind] - idle[kind] * seconds for kind in after}), result


def shown(cost: Counter[str], count: int) -> str:
    """Returns milliseconds for each of so many, in all and by kind."""
    parts = ", ".join(f"{kind} {seconds / count * 1000:.2f}" for kind, seconds in sorted(cost.items()))
    return f"{sum(cost.values()) / count * 1000:.2f} ms ({parts})"


async def measure(url: str, options: argparse.Namespace) -> None:
    """Prints what requests and tokens cost."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def one(number: int, tokens: int) -> float:
            return (await ask(client, MODEL, [100 + number, *range(2, 17)], tokens))[0]

        async def in_turn() -> list[float]:
            return [await one(number, 1) for number in range(options.requests)]

        await asyncio.gather(*(one(number, 8) for number in range(options.streams)))
        await in_turn()
        idle_s, idle, _ = await spent(asyncio.sleep(IDLE_S), Counter())
        idle = Counter({kind: seconds / idle_s for kind, seconds in idle.items()})
        _, cost, firsts = await spent(in_turn(), idle)
        first_s = statistics.median(firsts)
        print(f"  a request of one token: {first_s * 1000:.1f} ms, of processor time {shown(cost, options.requests)}")
        streams = asyncio.gather(*(one(number, options.tokens) for number in range(options.streams)))
        seconds, cost, _ = await spent(streams, idle)
        count = options.streams * options.tokens
        print(f"  a streamed token: {count / seconds:.0f} tokens/s, of processor time {shown(cost, count)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", default="one,1,3", help="by commas")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    for number in range(options.rounds):
        for way in options.ways.split(","):
            print(f"round {number + 1}, {'one engine without Ray' if way == 'one' else f'{way} behind a front end'}")
            with server([*SETTINGS, *([] if way == "one" else ["--replicas", way])]) as url:
                asyncio.run(measure(url, options))


if __name__ == "__main__":
    main()
