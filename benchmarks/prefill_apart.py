"""Measures prefill and decode apart: long prompts beside answers under way, on replicas of their own and on one engine.

    python -m benchmarks.prefill_apart [--rounds 2] [--streams 4] [--prompts 6] [--prompt-tokens 1500]

Streams of answers run all the time. Beside them long prompts come one after another, each a new one, and ask for a few
tokens. Three ways are taken in turns, all on this machine: one engine on all cores, which computes prompts in chunks;
two replicas; and two of which one computes prompts alone. Needs `pagemill[ray]`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass, field

import httpx
from benchmarks.front_end_stalls import MODEL, server
from benchmarks.peers import workloads
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.streamed_answer import ask

WAYS = {
    "one engine, chunked": [],
    "two replicas": ["--replicas", "2"],
    "prefill apart": ["--replicas", "2", "--prefill-replicas", "1"],
}
COMMON = ["--max-model-len", "2048", "--kv-memory", "384MiB", "--log-level", "warning"]
SHORT_TOKENS, PAUSE_S, ANSWER_TOKENS = 40, 0.3, 16


@dataclass
class Seen:
    """Seconds: until the first tokens of long prompts, and between the tokens of streams meanwhile."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


async def stream(client: httpx.AsyncClient, prompt: list[int], seen: Seen, under_way: asyncio.Event) -> None:
    """Streams one answer, and notes its gaps until it is cancelled."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1900, "temperature": 0, "ignore_eos": True, "stream": True}
    last = 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_raw():
            now = time.perf_counter()
            if last and under_way.is_set():
                seen.gaps_s.append(now - last)
            last = now


async def measure(url: str, words: list[int], streams: int, prompts: int, length: int) -> Seen:
    seen, under_way = Seen(), asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        shorts = [words[at * SHORT_TOKENS :][:SHORT_TOKENS] for at in range(streams)]
        running = [asyncio.create_task(stream(client, short, seen, under_way)) for short in shorts]
        await asyncio.sleep(1)
        for number in range(prompts + 1):
            at = streams * SHORT_TOKENS + number * length
            first_s, _ = await ask(client, MODEL, words[at : at + length], ANSWER_TOKENS)
            if number:  # the first makes times known
                seen.first_s.append(first_s)
            under_way.set()
            await asyncio.sleep(PAUSE_S)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return seen


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))] * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--ways", default=",".join(WAYS), help="those to take, with commas between")
    options = parser.parse_args()
    print(heading(describe_machine()), end="\n\n")
    words = workloads.tokenize(MODEL)
    figures: dict[str, list[tuple[float, ...]]] = {}
    for number in range(options.rounds):
        for way in options.ways.split(","):
            with server([*COMMON, *WAYS[way]]) as url:
                mine = words[number * 20_000 :]
                seen = asyncio.run(measure(url, mine, options.streams, options.prompts, options.prompt_tokens))
            found = (
                quantile(seen.first_s, 0.5), quantile(seen.first_s, 0.95),
                *(quantile(seen.gaps_s, part) for part in (0.5, 0.95, 0.99)), quantile(seen.gaps_s, 1.0),
            )  # fmt: skip
            figures.setdefault(way, []).append(found)
            print(f"round {number + 1}, {way}: " + ", ".join(f"{each:.0f}" for each in found), flush=True)
    print("\n| way | TTFT p50, ms | p95 | gap p50, ms | p95 | p99 | longest |")
    print("| :--- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for way, rounds in figures.items():
        row = (f"{statistics.median(each):.0f}" for each in zip(*rounds, strict=True))
        print(f"| {way} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
