"""Measures real replicas on conversations: routing by least work beside round robin, in turns on this machine.

    python -m benchmarks.replicas [--replicas 3] [--rounds 2] [--conversations 9] [--turns 5]

Conversations go on at the same time, each with pauses in which somebody reads. A turn sends all that was said before
and a new piece of real text. Found are the prompts' tokens whose K/V a replica had. Needs `pagemill[ray]`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from dataclasses import dataclass, field

import httpx
from benchmarks.front_end_stalls import MODEL, server
from benchmarks.peers import workloads
from benchmarks.streamed_answer import ask

POLICIES = ("least-work", "round-robin")
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 500, 120, 16
MOST_PAUSE_S = 1.5


@dataclass
class Seen:
    """Sums up the turns behind the first of each conversation."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_s: list[float] = field(default_factory=list)


async def converse(client: httpx.AsyncClient, text: list[int], turns: int, pauses: random.Random, seen: Seen) -> None:
    """Holds one conversation, whose user says pieces of `text`."""
    said, at = text[:FIRST_TOKENS], FIRST_TOKENS
    for turn in range(turns):
        await asyncio.sleep(pauses.uniform(0, MOST_PAUSE_S))
        first_s, usage = await ask(client, MODEL, said, ANSWER_TOKENS)
        if turn:
            seen.first_s.append(first_s)
            seen.prompt_tokens += usage["prompt_tokens"]
            seen.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        said, at = said + text[at : at + TURN_TOKENS], at + TURN_TOKENS


async def measure(url: str, texts: list[list[int]], turns: int, seed: int) -> Seen:
    """Holds a conversation over each text, all at the same time."""
    seen = Seen()
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await asyncio.gather(
            *(converse(client, text, turns, random.Random(f"{seed}:{at}"), seen) for at, text in enumerate(texts))
        )
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=9)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    words, each = workloads.tokenize(MODEL), FIRST_TOKENS + options.turns * TURN_TOKENS
    found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    firsts: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for number in range(options.rounds):
        for policy in POLICIES:
            settings = ["--replicas", str(options.replicas), "--routing", policy, "--max-model-len", "2048"]
            settings += ["--kv-memory", "256MiB", "--num-threads", "1", "--log-level", "warning"]
            with server(settings) as url:
                texts = [words[at * each : (at + 1) * each] for at in range(options.conversations)]
                seen = asyncio.run(measure(url, texts, options.turns, number))
            found[policy].append(seen.cached_tokens / seen.prompt_tokens)
            firsts[policy].append(statistics.median(seen.first_s))
            print(
                f"round {number + 1}, {policy}: {found[policy][-1]:.1%} of the prompts' tokens found; first token "
                f"after {firsts[policy][-1] * 1000:.0f} ms in the median, "
                f"{sorted(seen.first_s)[int(len(seen.first_s) * 0.95)] * 1000:.0f} ms at p95",
                flush=True,
            )
    ratio = statistics.median(firsts[POLICIES[1]]) / statistics.median(firsts[POLICIES[0]])
    print(f"{POLICIES[0]} against {POLICIES[1]}: the first token comes {ratio:.2f}x sooner in the median")


if __name__ == "__main__":
    main()
