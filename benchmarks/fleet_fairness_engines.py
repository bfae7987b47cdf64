"""Measures what `fleet_fairness` models: a tenant beside one that floods a fleet, here with real engines.

    python -m benchmarks.fleet_fairness_engines [--replicas 3] [--rows 8] [--seconds 14] [--rounds 3]

Engines of SmolLM2-135M, a process and a thread each, behind the `Fleet` that serves, without Ray. The loads are those
of `fleet_fairness`: a light tenant with twice as many requests under way as a replica has rows, and one of equal weight
with a hundred for each replica. The light one's requests go where the router sends them, or all to one replica;
replicas are told what their tenants have had elsewhere, or each is fair by itself. In a fifth case the light one has
three times as many requests, so that some wait everywhere at any time. The cases take turns. Shares are of all tokens
that were computed, prompts included; front end and engines share this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

from benchmarks.fairness import FOURTH, PROMPT, Load, requests
from benchmarks.fleet_fairness import LIGHT, LIMITS
from benchmarks.fleet_here import Replica, fleet_of, replicas_here
from benchmarks.peers.engines import MODEL
from benchmarks.peers.machine import describe_machine, heading

from pagemill.config import EngineConfig
from pagemill.distributed import fleet as fleet_module
from pagemill.distributed.route import Asked, Route
from pagemill.distributed.routing import Router
from pagemill.distributed.tenant_shares import TenantShares
from pagemill.engine.messages import EngineRequest, SequenceOutput
from pagemill.hub import resolve_model

WARM_UP_S = 3.0
HOME = "r0"


class Case(NamedTuple):
    """Says where the light tenant's requests go, whether replicas are told of the others, and how many requests it has
    under way for each row of a replica."""

    where: str
    tells: bool
    light: int = 2

    def __str__(self) -> str:
        told = "told of the others" if self.tells else "fair by themselves"
        return f"{self.where} | {told} | {self.light}"


CASES = [*(Case(where, tells) for where in ("anywhere", "one replica") for tells in (False, True))]
CASES += [Case("anywhere", True, light=6)]


class RouterToHome(Router):
    """Sends the light tenant's requests to one replica, as if all were turns of sessions there."""

    def route(self, request_id: str, asked: Asked, at: str | None = None) -> Route | None:
        return super().route(request_id, asked, HOME if request_id.startswith(f"{LIGHT}-") else at)


@contextmanager
def arranged(case: Case) -> Iterator[None]:
    """Makes fleets that begin meanwhile what a case asks for."""
    router = RouterToHome if case.where == "one replica" else Router
    with mock.patch.object(fleet_module, "Router", router):
        if case.tells:
            yield
        else:
            with mock.patch.object(TenantShares, "served_elsewhere", return_value={}):
                yield


@dataclass
class Seen:
    """Counts tokens by tenant, and the light one's seconds to a first token, from `since_s` on."""

    since_s: float
    tokens: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    arrivals: dict[str, float] = field(default_factory=dict)

    def note(self, output: SequenceOutput) -> None:
        now, tenant = time.monotonic(), output.request_id.partition("-")[0]
        arrival_s = self.arrivals.pop(output.request_id, None)
        if now < self.since_s:
            return
        self.tokens[tenant] += len(output.new_token_ids) + (PROMPT if arrival_s is not None else 0)
        if tenant == LIGHT and arrival_s is not None:
            self.first_s.append(now - arrival_s)


class Clock:
    """Tells `requests` the time."""

    @staticmethod
    def now() -> float:
        return time.monotonic()


async def measure(
    replicas: dict[str, Replica], config: EngineConfig, loads: dict[str, Load], seconds: float, seed: int
) -> Seen:
    """Keeps so many requests of each tenant under way for a while, and counts what comes behind WARM_UP_S. seed: no two
    runs have the same prompts."""
    async with fleet_of(replicas, config) as fleet:
        seen = Seen(time.monotonic() + WARM_UP_S)
        fleet.watch = seen.note

        async def go_on(made: Iterator[EngineRequest]) -> None:
            while True:
                request = next(made)
                seen.arrivals[request.request_id] = request.arrival_s
                await fleet.answer(request)

        work = []
        for at, (tenant, load) in enumerate(loads.items()):
            made = requests(Clock(), tenant, load, seed * len(loads) + at)
            work += [asyncio.create_task(go_on(made)) for _ in range(load.requests)]
        await asyncio.sleep(seconds)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        fleet.watch = lambda output: None
    return seen


async def run(given: argparse.Namespace) -> None:
    config = EngineConfig(
        model=str(resolve_model(MODEL)), max_model_len=512, max_num_seqs=given.rows, kv_memory="128MiB", num_threads=1,
        tenants=LIMITS, speculative_config="off",
    )  # fmt: skip
    shares: defaultdict[Case, list[float]] = defaultdict(list)
    speeds, firsts = defaultdict(list, shares), defaultdict(list, shares)
    async with replicas_here({f"r{number}": config for number in range(given.replicas)}) as replicas:
        for seed, (number, case) in enumerate(itertools.product(range(given.rounds), CASES)):
            loads = {LIGHT: Load(case.light * given.rows), FOURTH: Load(100 * given.replicas)}
            with arranged(case):
                seen = await measure(replicas, config, loads, given.seconds, seed)
            total = seen.tokens.total()
            shares[case].append(seen.tokens[LIGHT] / total)
            speeds[case].append(total / (given.seconds - WARM_UP_S))
            firsts[case].append(statistics.median(seen.first_s))
            print(f"round {number + 1} | {case}: {shares[case][-1]:.1%}, {firsts[case][-1]:.2f} s", flush=True)
    print(f"\n{heading(describe_machine())}\n")
    print("| light tenant's requests | replicas | for each row | its share | first token, median | tokens/s of all |")
    print("| --- | --- |" + " ---: |" * 4)
    for case in CASES:
        spread = f"{min(shares[case]):.1%} to {max(shares[case]):.1%}"
        print(
            f"| {case} | "
            f"{statistics.median(shares[case]):.1%} ({spread}) | {statistics.median(firsts[case]):.2f} s | "
            f"{statistics.median(speeds[case]):.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=14.0, help="of a case, of which the first three do not count")
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
