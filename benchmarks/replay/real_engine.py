"""Runs the real engine over a trace, by the clock, and notes the work and the time of each of its steps."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.step_plan import StepPlan, StepResult
from pagemill.simulate.simulator import Replay, Served
from pagemill.simulate.step_time import KVShape, StepWork, work_of
from pagemill.simulate.trace import TracedRequest

RUNNING = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of requests that `sample_steps` runs at once, one after the other."""
LEAST_STEPS = 4
"""Steps with each of them, however slow the machine is."""
CONTEXT = 16384
VOCABULARY = 49152


class WallClock:
    """Counts the seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


class CpuClock:
    """Counts the seconds that this process has computed, and those that it has waited, which pass at once.

    That is what a single thread takes on a machine that serves others too, without the time in their queue.
    """

    def __init__(self) -> None:
        self._start = time.process_time()

    def now(self) -> float:
        return time.process_time() - self._start

    def wait(self, seconds: float) -> None:
        self._start -= max(0.0, seconds)


CLOCKS: dict[str, type[WallClock] | type[CpuClock]] = {"wall": WallClock, "cpu": CpuClock}


class RealEngine:
    """Runs an engine, and notes in `steps` the work of each step, and its seconds by the clock.

    clock: "wall"; or "cpu", which takes one thread.
    """

    def __init__(self, model: str, dtype: str, clock: str, **settings: Any) -> None:
        self._clock = CLOCKS[clock]
        if clock == "cpu":
            torch.set_num_threads(1)
            settings["num_threads"] = 1
        # SmolLM2 declares 8,192 positions; the traces go further, and nobody reads the answers.
        overrides = {"max_position_embeddings": CONTEXT}
        self.core = EngineCore(
            EngineConfig(
                model=str(resolve_model(model)), dtype=dtype, max_model_len=CONTEXT, hf_overrides=overrides, **settings
            )
        )
        runner = self.core.executor
        spec, kv_dtype = runner.decoder.spec, runner.pool.dtype
        self.shape = KVShape(
            tuple(layer.window for layer in spec.layers), spec.num_kv_heads, spec.head_dim, kv_dtype.itemsize
        )
        self.steps: list[tuple[StepWork, float]] = []
        self._work: StepWork | None = None
        self._groups = self.shape.groups
        self._run = runner.run
        runner.run = self._note  # type: ignore[method-assign]
        self._requests = 0

    def _note(self, plan: StepPlan) -> StepResult:
        self._work = work_of(plan, self._groups)
        return self._run(plan)

    def add(self, prompt: list[int], output_len: int) -> str:
        self._requests += 1
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        self.core.add_request(
            EngineRequest(
                request_id=str(self._requests), prompt_token_ids=prompt, params=params, arrival_s=time.monotonic()
            )
        )
        return str(self._requests)

    def step(self) -> list[tuple[str, str | None]]:
        """Runs one step. Returns (request id, reason of its end or None) for each new token."""
        clock = self._clock()
        outputs = self.core.step()
        if self._work is not None:
            self.steps.append((self._work, clock.now()))
            self._work = None
        for output in outputs:
            if output.error is not None:
                raise output.error.to_error()
        return [(output.request_id, output.finish_reason) for output in outputs]

    def serve(self, trace: Sequence[TracedRequest]) -> Replay:
        """Serves the trace by the clock, each request with random token ids."""
        outcome = Replay()
        live: dict[str, Served] = {}
        draw = random.Random(0)
        before = self.core.stats().preemptions
        waiting = [(request, draw.choices(range(VOCABULARY), k=request.prompt_len)) for request in trace]
        waiting.reverse()
        clock = self._clock()
        while waiting or self.core.has_work():
            while waiting and waiting[-1][0].arrival_s <= clock.now():
                request, prompt = waiting.pop()
                outcome.served.append(Served(request))
                live[self.add(prompt, request.output_len)] = outcome.served[-1]
            if not self.core.has_work():
                clock.wait(waiting[-1][0].arrival_s - clock.now())
                continue
            outputs = self.step()
            now = clock.now()
            work, seconds = self.steps[-1]
            outcome.steps += 1
            outcome.busy_s += seconds
            outcome.running_s += seconds * work.rows
            outcome.most_running = max(outcome.most_running, work.rows)
            for request_id, reason in outputs:
                one = live[request_id]
                one.num_tokens += 1
                if one.first_token_s is None:
                    one.first_token_s = now
                if reason is not None:
                    one.finished_s = now
        outcome.end_s = clock.now()
        outcome.preemptions = self.core.stats().preemptions - before
        return outcome

    def sample_steps(self, seconds: float) -> None:
        """Runs steps of all kinds: phases of 1 to 128 requests at once, with lengths that are log-uniform.

        Each phase takes its share of `seconds`, and LEAST_STEPS steps at least.
        """
        draw = random.Random(1)
        for target in RUNNING:
            clock, enough = self._clock(), len(self.steps) + LEAST_STEPS
            live: set[str] = set()
            while clock.now() < seconds / len(RUNNING) or len(self.steps) < enough:
                while len(live) < target:
                    prompt_len = int(2 ** draw.uniform(4, 13 if target == 1 else 11))
                    output_len = int(2 ** draw.uniform(3, 7))
                    live.add(self.add(draw.choices(range(VOCABULARY), k=prompt_len), output_len))
                live -= {request_id for request_id, reason in self.step() if reason is not None}
            self.core.abort(live)
