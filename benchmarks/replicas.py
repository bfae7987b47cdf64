"""Measures real replicas on conversations: routing by least work beside other ways to choose, in turns on this machine.

    python -m benchmarks.replicas [--replicas 3] [--rounds 2] [--conversations 9] [--turns 5]
        [--ways least-work,round-robin,two-choices,ray-affinity] [--no-kv-transfer]

Conversations go on at the same time, each with pauses in which somebody reads. A turn sends all that was said before
and a new piece of real text. Found are the prompts' tokens whose K/V a replica had. Needs `pagemill[ray]`.

By least work and round robin, the front end of `--replicas` chooses. The other ways choose among as many servers of one
engine each, here and without Ray between: two-choices takes the one of two drawn servers that has fewer requests,
ray-affinity what the prefix-affinity router of Ray Serve LLM says, its own class with its own settings.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import httpx
from benchmarks.front_end_stalls import MODEL, server
from benchmarks.peers import workloads
from benchmarks.streamed_answer import ask

POLICIES = ("least-work", "round-robin")
WAYS = (*POLICIES, "two-choices", "ray-affinity")
SETTINGS = ("--max-model-len", "2048", "--kv-memory", "256MiB", "--num-threads", "1", "--log-level", "warning")
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 500, 120, 16
MOST_PAUSE_S = 1.5


@dataclass
class Seen:
    """Sums up the turns behind the first of each conversation."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_s: list[float] = field(default_factory=list)


Choose = Callable[[Sequence[int], Sequence[int]], int]
"""Returns the number of the server that a prompt goes to, with the number of requests that each has."""


class Servers:
    """Sends each prompt to the server that `choose` names."""

    def __init__(self, urls: Sequence[str], choose: Choose) -> None:
        self._clients = [httpx.AsyncClient(base_url=url, timeout=300) for url in urls]
        self._under_way = [0] * len(urls)
        self._choose = choose
        self._thread = ThreadPoolExecutor(1)

    async def ask(self, prompt: list[int]) -> tuple[float, dict]:
        """Returns what `ask` does; the choice is not counted in its seconds."""
        asked = self._thread, self._choose, prompt, [*self._under_way]
        number = await asyncio.get_running_loop().run_in_executor(*asked)
        self._under_way[number] += 1
        try:
            return await ask(self._clients[number], MODEL, prompt, ANSWER_TOKENS)
        finally:
            self._under_way[number] -= 1

    async def close(self) -> None:
        self._thread.shutdown()
        for client in self._clients:
            await client.aclose()


@contextmanager
def serving(way: str, replicas: int, seed: int, more: Sequence[str]) -> Iterator[tuple[list[str], Choose]]:
    """Runs what serves: gives its URLs, and how to choose among these. more: settings of replicas behind one."""
    with ExitStack() as stack:
        if way in POLICIES:
            url = stack.enter_context(server(["--replicas", str(replicas), "--routing", way, *SETTINGS, *more]))
            yield [url], lambda prompt, under_way: 0
            return
        urls = [stack.enter_context(server(SETTINGS)) for _ in range(replicas)]
        if way == "ray-affinity":
            from benchmarks.ray_prefix_affinity import RayPrefixAffinity

            logging.getLogger("httpx").setLevel(logging.WARNING)  # Ray logs all that there is
            yield urls, RayPrefixAffinity(replicas).choose
            return
        drawn = random.Random(seed)
        yield urls, lambda prompt, under_way: min(drawn.sample(range(replicas), 2), key=under_way.__getitem__)


async def converse(servers: Servers, text: list[int], turns: int, pauses: random.Random, seen: Seen) -> None:
    """Holds one conversation, whose user says pieces of `text`."""
    said, at = text[:FIRST_TOKENS], FIRST_TOKENS
    for turn in range(turns):
        await asyncio.sleep(pauses.uniform(0, MOST_PAUSE_S))
        first_s, usage = await servers.ask(said)
        if turn:
            seen.first_s.append(first_s)
            seen.prompt_tokens += usage["prompt_tokens"]
            seen.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        said, at = said + text[at : at + TURN_TOKENS], at + TURN_TOKENS


async def measure(urls: Sequence[str], choose: Choose, texts: list[list[int]], turns: int, seed: int) -> Seen:
    """Holds a conversation over each text, all at the same time."""
    seen, servers = Seen(), Servers(urls, choose)
    try:
        await asyncio.gather(
            *(converse(servers, text, turns, random.Random(f"{seed}:{at}"), seen) for at, text in enumerate(texts))
        )
    finally:
        await servers.close()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=9)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--ways", default=",".join(WAYS), help="by commas")
    parser.add_argument("--no-kv-transfer", action="store_true", help="replicas behind one front end fetch no blocks")
    options = parser.parse_args()
    more = ["--no-kv-transfer"] if options.no_kv_transfer else []
    ways = options.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"--ways: {unknown[0]!r} is none of {', '.join(WAYS)}")
    words, each = workloads.tokenize(MODEL), FIRST_TOKENS + options.turns * TURN_TOKENS
    found: dict[str, list[float]] = {way: [] for way in ways}
    firsts: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds):
        for way in ways:
            with serving(way, options.replicas, number, more) as (urls, choose):
                texts = [words[at * each : (at + 1) * each] for at in range(options.conversations)]
                seen = asyncio.run(measure(urls, choose, texts, options.turns, number))
            found[way].append(seen.cached_tokens / seen.prompt_tokens)
            firsts[way].append(statistics.median(seen.first_s))
            print(
                f"round {number + 1}, {way}: {found[way][-1]:.1%} of the prompts' tokens found; first token "
                f"after {firsts[way][-1] * 1000:.0f} ms in the median, "
                f"{sorted(seen.first_s)[int(len(seen.first_s) * 0.95)] * 1000:.0f} ms at p95",
                flush=True,
            )
    for way in ways[1:]:
        ratio = statistics.median(firsts[way]) / statistics.median(firsts[ways[0]])
        print(f"{ways[0]} against {way}: the first token comes {ratio:.2f}x sooner in the median")


if __name__ == "__main__":
    main()
