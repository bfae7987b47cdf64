"""Measures what tenants that keep to their share feel of one that floods the engine.

    python -m benchmarks.fairness [--on simulation|engine] [--seconds 30] [--floods short,long,wide]
        [--device a100-40 --shape opt-13b]

Four tenants have equal weights. Three of them always have as many requests under way as are a quarter of the rows. The
fourth does the same ("share"), is not there ("nobody"), or floods: with a hundred requests that wait, of the same shape
("short"), of long prompts ("long"), or of as many parallel sequences as it may ask for ("wide"). The others' throughput
and time per token beside a flood are held against those beside the fourth's fair share.

Limits are none, or those that tenants of a tenants file have by default. The simulation runs the real scheduler and
memory manager over simulated time, with step times that were measured (`benchmarks.replay.calibrate`), so that nothing
else on the machine matters, or with those of a roofline of a --device: *modelled*, in a pool of as many tokens. The
engine is the real one. Published: a server that takes requests as they come lets a flood take what it asks for, a fair
one keeps the difference in service between two clients bounded (Sheng et al., "Fairness in serving large language
models", OSDI 2024, theorem 4.4); figures for these floods are not published.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from benchmarks.peers.engines import MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.replay.output import bars
from benchmarks.replay.setup import CALIBRATION, MIB, add_device_arguments, add_output_argument, chosen_roofline

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.memory.digest import root_digest
from pagemill.planner.replica import Setup
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.sequence import Request
from pagemill.scheduling.step_plan import StepResult
from pagemill.simulate.step_time import StepModel, StepTimes, work_of
from pagemill.tenant_limits import TenantLimits, safe_defaults

CALM = ("a", "b", "c")
FOURTH = "fourth"
TENANTS = (*CALM, FOURTH)
ROWS, KV_MIB = 16, 256
PROMPT, ANSWER = 48, 32
WARM_UP_S = 2.0


@dataclass(frozen=True)
class Load:
    """Requests that a tenant always has under way, and their shape."""

    requests: int
    prompt: int = PROMPT
    answer: int = ANSWER
    n: int = 1


SHARE = Load(ROWS // 4)
FLOODS = {"short": Load(100), "long": Load(100, prompt=900), "wide": Load(20, n=ROWS * 3 // 4, answer=4 * ANSWER)}


class Machine(Protocol):
    """Runs steps. Times are seconds of its own clock."""

    def now(self) -> float: ...

    def add(self, request: EngineRequest) -> None: ...

    def step(self) -> list[tuple[str, int, bool]]:
        """Returns, of each sequence that the step brought something for: its request, new tokens, whether it ended."""

    def clear(self) -> None:
        """Ends what still runs."""


class RealEngine:
    """The engine in this process."""

    def __init__(self, limits: dict[str, TenantLimits]) -> None:
        path, memory = str(resolve_model(MODEL)), f"{KV_MIB}MiB"
        config = EngineConfig(
            model=path,
            max_model_len=2048,
            max_num_seqs=ROWS,
            kv_memory=memory,
            tenants=limits,
            speculative_config="off",
        )
        self._core = EngineCore(config)

    def now(self) -> float:
        return time.monotonic()

    def add(self, request: EngineRequest) -> None:
        self._core.add_request(request)

    def step(self) -> list[tuple[str, int, bool]]:
        outputs = self._core.step()
        return [(one.request_id, len(one.new_token_ids), one.finish_reason is not None) for one in outputs]

    def clear(self) -> None:
        self._core.abort(self._core.scheduler.request_ids())
        while self._core.has_work():
            self._core.step()


class Simulation:
    """The real scheduler and memory manager; a step takes as long as the model of step times says.

    size: how many times as much of everything it has, and as fast it is. rows: before that.
    """

    def __init__(self, limits: dict[str, TenantLimits], times: StepModel, size: int = 1, rows: int = ROWS) -> None:
        self._times, self._size = times, size
        of_tokens = times.shape.frame_bytes(16) / StepTimes.load(CALIBRATION).shape.frame_bytes(16)
        kv_bytes = int(KV_MIB * MIB * of_tokens) * size
        setup = Setup(kv_bytes, max_num_seqs=rows * size, max_num_batched_tokens=512 * size)
        self._scheduler = setup.scheduler(setup.memory(self._times))
        for name, each in limits.items():
            self._scheduler.set_tenant(name, each)
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def rest_until(self, now: float) -> None:
        """Lets time pass in which nothing is done."""
        self._now = max(self._now, now)

    def add(self, request: EngineRequest) -> None:
        self._scheduler.note_served_elsewhere(request.served_elsewhere)
        prompt, most = request.prompt_token_ids, request.params.max_tokens or 0
        self._scheduler.add(
            Request(
                request_id=request.request_id,
                prompt_token_ids=prompt,
                params=request.params,
                seed=0,
                priority=0,
                arrival_s=request.arrival_s,
                root=root_digest(b"simulated", "simulated", "simulated", request.tenant),
                max_len=len(prompt) + most,
                tenant=request.tenant,
            )
        )

    def step(self) -> list[tuple[str, int, bool]]:
        plan = self._scheduler.schedule(self._now)
        assert plan is not None, "nothing can run"
        self._now += self._times.seconds(work_of(plan, self._times.shape.groups)) / self._size
        tokens = [[7]] * len(plan.sample_to)
        updates = self._scheduler.commit(StepResult(tokens, [None] * len(tokens)), self._now)
        return [(one.sequence.request.request_id, len(one.tokens), one.finish_reason is not None) for one in updates]

    def clear(self) -> None:
        for name in self._scheduler.request_ids():
            self._scheduler.abort(name, self._now)


@dataclass
class Seen:
    """Counts what came for the calm tenants. begun: when each running request came, and its first token."""

    tokens: int = 0
    begun: dict[str, list[float]] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)


def requests(machine: Machine, tenant: str, load: Load, seed: int) -> Iterator[EngineRequest]:
    """Yields a tenant's requests, of random tokens, so that none finds another's blocks."""
    numbers, count = random.Random(seed), 0
    while True:
        yield EngineRequest(
            request_id=f"{tenant}-{count}",
            prompt_token_ids=[numbers.randrange(1000, 40_000) for _ in range(load.prompt)],
            params=SamplingParams(n=load.n, max_tokens=load.answer, ignore_eos=True, temperature=1.0, seed=count),
            arrival_s=machine.now(),
            tenant=tenant,
        )
        count += 1


def serve(machine: Machine, loads: dict[str, Load], seconds: float) -> Seen:
    """Runs the machine for so long, after a warm-up, and ends what still runs."""
    makers = {tenant: requests(machine, tenant, load, seed) for seed, (tenant, load) in enumerate(loads.items())}
    left: dict[str, int] = {}
    seen = Seen()

    def send(tenant: str) -> None:
        request = next(makers[tenant])
        left[request.request_id] = loads[tenant].n
        machine.add(request)
        if tenant in CALM:
            seen.begun[request.request_id] = [request.arrival_s]

    for tenant, load in loads.items():
        for _ in range(load.requests):
            send(tenant)
    begin = machine.now() + WARM_UP_S
    while machine.now() < begin + seconds:
        outputs, now = machine.step(), machine.now()
        for name, num_tokens, ended in outputs:
            tenant = name.partition("-")[0]
            if tenant in CALM:
                if len(seen.begun[name]) == 1:
                    seen.begun[name].append(now)
                seen.tokens += num_tokens if now >= begin else 0
            left[name] -= ended
            if not left[name]:
                if tenant in CALM:
                    came, first = seen.begun.pop(name)
                    if now >= begin:
                        seen.first_s.append(first - came)
                        seen.per_token_s.append((now - first) / (ANSWER - 1))
                send(tenant)
    machine.clear()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="simulation", choices=["simulation", "engine"])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--floods", default="short,long,wide")
    parser.set_defaults(kv_mib=KV_MIB)
    add_device_arguments(parser)
    add_output_argument(parser)
    arguments = parser.parse_args()
    times: StepModel = StepTimes.load(CALIBRATION) if arguments.device is None else chosen_roofline(arguments)
    print(heading(describe_machine()) if arguments.on == "engine" else times.description, end="\n\n")
    print(
        "| limits | the fourth | tokens/s of the others | of share | ms per token | of share | first token, ms | p99 |"
    )
    print("| --- | --- |" + " ---: |" * 6)
    shares: dict[str, list[float]] = {}
    safe = safe_defaults({name: {} for name in TENANTS})
    for label, defaults in (("none", {}), ("default", safe)):
        limits = {name: TenantLimits.read(name, {}, defaults) for name in TENANTS}
        machine = RealEngine(limits) if arguments.on == "engine" else Simulation(limits, times)
        calm = dict.fromkeys(CALM, SHARE)
        runs = {"share": calm | {FOURTH: SHARE}, "nobody": calm}
        runs |= {name: calm | {FOURTH: FLOODS[name]} for name in arguments.floods.split(",")}
        fair: Seen | None = None
        for name, loads in runs.items():
            seen = serve(machine, loads, arguments.seconds)
            fair = fair or seen
            shares.setdefault(f"limits: {label}", []).append(seen.tokens / fair.tokens)
            tpot, of_share = float(np.mean(seen.per_token_s)), float(np.mean(fair.per_token_s))
            early, late = np.percentile(seen.first_s, [50, 99])
            print(
                f"| {label} | {name} | {seen.tokens / arguments.seconds:.0f} | {seen.tokens / fair.tokens:.2f} | "
                f"{1e3 * tpot:.1f} | {tpot / of_share:.2f} | {1e3 * early:.0f} | {1e3 * late:.0f} |",
                flush=True,
            )
    if arguments.on == "simulation":
        bars(arguments, "fairness", list(runs), shares, "the fourth tenant", "tokens/s of the others, of their share")


if __name__ == "__main__":
    main()
