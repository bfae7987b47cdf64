"""Measures what a tenant feels of one that floods a fleet, and the same on one engine of the fleet's size.

    python -m benchmarks.fleet_fairness [--replicas 3] [--rows 16] [--light 32] [--seconds 60]

A light tenant always has twice as many requests under way as one replica has rows, or `--light`; another, of equal
weight, has a hundred for each replica. The light one's requests go where the router sends them, or all need one
replica, as with sessions or a prefix that is there. Replicas are told what their tenants have had elsewhere, or each is
fair by itself.
Scheduler, memory, router and tenancy are those that serve; a step takes as long as `benchmarks.replay.calibrate` has
measured, on the one large engine a third of that for three times as many rows, blocks and tokens of a step: *modelled*.
Shares are of all tokens that were computed, prompts included.
"""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np
from benchmarks.fairness import ANSWER, CALM, FOURTH, PROMPT, ROWS, Load, Simulation, serve
from benchmarks.replay.setup import CALIBRATION

from pagemill.distributed.fleet_tenancy import FleetTenancy, Wanted
from pagemill.distributed.route import Asked
from pagemill.distributed.routing import Router
from pagemill.engine.messages import EngineRequest
from pagemill.simulate.step_time import StepModel, StepTimes
from pagemill.tenant_limits import TenantLimits

LIGHT = CALM[0]
LIMITS = {LIGHT: TenantLimits(), FOURTH: TenantLimits()}
BLOCK = 16


class Fleet:
    """A `Machine` of several engines, each with its own clock.

    at: the replica that the light tenant's requests need; None for none. tells: whether replicas are told what their
    tenants have elsewhere.
    """

    def __init__(self, engines: list[Simulation], at: str | None, tells: bool, rows: int) -> None:
        self.served: Counter[str] = Counter()
        self._engines = {f"r{number}": engine for number, engine in enumerate(engines)}
        self._at, self._tells = at, tells
        self._tenancy, self._router = FleetTenancy(LIMITS), Router(BLOCK, "least-work", 0)
        for name in self._engines:
            self._router.add(name, rows)
        self._under_way: dict[str, EngineRequest] = {}
        self._has: Counter[str] = Counter()
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def add(self, request: EngineRequest) -> None:
        name, tokens = request.request_id, len(request.prompt_token_ids)
        self._tenancy.place(
            name, Wanted(request.tenant, 1, -(-(tokens + ANSWER) // BLOCK), tokens, tokens + ANSWER), self._engines
        )
        route = self._router.route(name, Asked(tokens, [], ANSWER), self._at if request.tenant == LIGHT else None)
        assert route is not None
        self._tenancy.note_sent(name, route.replica)
        if self._tells:
            request.served_elsewhere = self._tenancy.shares.served_elsewhere(route.replica)
        engine = self._engines[route.replica]
        if not self._has[route.replica]:
            engine.rest_until(self._now)
        self._has[route.replica] += 1
        self._under_way[name] = request
        engine.add(request)

    def step(self) -> list[tuple[str, int, bool]]:
        at = min((name for name in self._engines if self._has[name]), key=lambda name: self._engines[name].now())
        outputs = self._engines[at].step()
        self._now = max(self._now, self._engines[at].now())
        for name, count, ended in outputs:
            request = self._under_way[name]
            self._router.note_tokens(name, count)
            self._tenancy.note_tokens(name, 0, count)
            self.served[request.tenant] += count + (PROMPT if ended else 0)
            if ended:
                self._router.end(name)
                self._tenancy.end(name)
                self._has[at] -= 1
                del self._under_way[name]
        return outputs

    def clear(self) -> None:
        for engine in self._engines.values():
            engine.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--light", type=int, help="requests that the light tenant has under way; default: twice --rows")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    times: StepModel = StepTimes.load(CALIBRATION)
    loads = {LIGHT: Load(given.light or 2 * given.rows), FOURTH: Load(100 * given.replicas)}
    print(times.description, end="\n\n")
    print("| light tenant's requests | engines | its share | tokens/s of all | first token, ms | p99 |")
    print("| --- | --- |" + " ---: |" * 4)
    cases = [
        (where, engines, size, tells)
        for where in ("anywhere", "one replica")
        for engines, size, tells in (
            ("one, as large", given.replicas, False),
            ("fair by itself", 1, False),
            ("told", 1, True),
        )
        if where == "anywhere" or size == 1
    ]
    for where, label, size, tells in cases:
        engines = [Simulation(LIMITS, times, size, given.rows) for _ in range(given.replicas // size)]
        fleet = Fleet(engines, "r0" if where == "one replica" else None, tells, given.rows)
        seen = serve(fleet, loads, given.seconds)
        share = fleet.served[LIGHT] / fleet.served.total()
        early, late = np.percentile(seen.first_s, [50, 99])
        print(
            f"| {where} | {label} | {share:.1%} | {fleet.served.total() / fleet.now():.0f} | {1e3 * early:.0f} | "
            f"{1e3 * late:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
