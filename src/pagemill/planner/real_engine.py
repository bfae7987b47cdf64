"""Runs the real engine by the clock, and notes the work and the time of each of its steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.executor.interface import StepHandle
from pagemill.executor.load import open_executor
from pagemill.planner.model_shape import shape_of
from pagemill.planner.other_work import OtherWork
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.step_plan import StepPlan, StepResult
from pagemill.simulate.device_fit import MeasuredStep
from pagemill.simulate.simulator import Replay, Served
from pagemill.simulate.step_time import KVShape, work_of
from pagemill.simulate.trace import MOONCAKE_BLOCK, TracedRequest

if TYPE_CHECKING:
    from pagemill.executor.interface import Executor

WORDS = 1000
"""Random prompts are of the vocabulary's first so many tokens, if it has as many."""

LOOK_S = 0.25
"""Seconds after which it is looked anew whether something else runs on the machine."""
OTHERS = 0.04
"""Share of the processors from which on something else does."""


class WallClock:
    """Counts the seconds since it was made.

    counts_others: whether other work on the machine makes what it counts longer.
    """

    counts_others = True

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


class CpuClock(WallClock):
    """Counts the seconds that this process has computed, and those that it has waited, which pass at once.

    That is what a single thread takes on a machine that serves others too, without the time in their queue.
    """

    counts_others = False

    def __init__(self) -> None:
        self._start = time.process_time()

    def now(self) -> float:
        return time.process_time() - self._start

    def wait(self, seconds: float) -> None:
        self._start -= max(0.0, seconds)


CLOCKS: dict[str, type[WallClock]] = {"wall": WallClock, "cpu": CpuClock}


class _TimedExecutor:
    """Is an executor, and notes which step it has brought last, and how long the engine waited for that."""

    def __init__(self, executor: Any, clock: WallClock) -> None:
        self._executor = executor
        self._clock = clock
        self.plan: StepPlan | None = None
        self.seconds = 0.0
        self._submitting: dict[int, float] = {}
        """Seconds by the steps that have not been collected."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: StepPlan) -> StepHandle:
        begin = self._clock.now()
        handle: StepHandle = self._executor.submit(plan)
        self._submitting[plan.step] = self._clock.now() - begin
        return handle

    def collect(self, handle: StepHandle) -> StepResult:
        begin = self._clock.now()
        result: StepResult = self._executor.collect(handle)
        self.plan = handle.plan
        self.seconds = self._submitting.pop(handle.plan.step) + self._clock.now() - begin
        return result


class _Noted(NamedTuple):
    """Holds a step that has run, whose work is counted later."""

    plan: StepPlan
    seconds: float
    own_s: float


class RealEngine:
    """Runs an engine's core in this process, without a front end.

    clock: makes clocks; all times are by them.

    disturbed: seconds of the last `serve`, from and to, in which something else ran on the machine.
    shape, kv_shape: of the model, and of its K/V. dtype: of the weights, where these are not quantized.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        clock: type[WallClock] = WallClock,
    ) -> None:
        config = replace(config, speculative_config="off")  # a model of steps knows no drafts
        executor = open_executor(config, progress)
        self._clock = clock
        self._timed = _TimedExecutor(executor, clock())
        self.core = EngineCore(config, executor=cast("Executor", self._timed))
        self.dtype = str(executor.decoder.dtype).removeprefix("torch.")
        spec = executor.decoder.spec
        self.shape = shape_of(spec, config.model)
        self.kv_shape = KVShape(
            tuple(layer.window for layer in spec.layers),
            spec.num_kv_heads,
            spec.head_dim,
            executor.facts.kv.itemsize,
            executor.facts.kv.name,
        )
        self._groups = self.kv_shape.groups
        self._tokens = range(min(WORDS, spec.vocab_size))
        self._draw = random.Random(0)
        self._requests = 0
        self._intake_s = 0.0
        self._steps: list[MeasuredStep] = []
        self._noted: list[_Noted] = []
        self._looks: list[tuple[int, bool]] = []
        """How many of these had been noted at each look, and whether the steps before it had run alone."""
        # Ranks are processes of their own, and would count as others.
        self._others = OtherWork() if clock.counts_others and config.tensor_parallel_size == 1 else None
        self._looked_s = time.perf_counter()
        self._alone = True
        self._served_s = 0.0
        self.disturbed: list[tuple[float, float]] = []

    @property
    def steps(self) -> list[MeasuredStep]:
        """Returns what each step did, its seconds by the clock, and whether it had the machine for itself."""
        self._look(LOOK_S)
        self._count_noted()
        return self._steps

    @property
    def num_steps(self) -> int:
        return len(self._steps) + len(self._noted)

    def prompt(self, length: int) -> list[int]:
        """Returns a prompt of random tokens."""
        return self._draw.choices(self._tokens, k=length)

    def add(self, prompt: list[int], output_len: int) -> str:
        """Queues a request that generates so many tokens, whatever they are. Returns its id."""
        self._requests += 1
        clock = self._clock()
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        self.core.add_request(
            EngineRequest(
                request_id=str(self._requests), prompt_token_ids=prompt, params=params, arrival_s=time.monotonic()
            )
        )
        self._intake_s += clock.now()
        return str(self._requests)

    def step(self) -> list[tuple[str, str | None]]:
        """Runs one step. Returns (request id, reason of its end or None) for each new token.

        The time of taking requests in counts as part of the next step.
        """
        self._timed.plan = None
        clock = self._clock()
        outputs = self.core.step()
        seconds = self._intake_s + clock.now()
        if (plan := self._timed.plan) is not None and len(plan.rows):
            self._noted.append(_Noted(plan, seconds, seconds - self._timed.seconds))
            self._intake_s = 0.0
        self._look(LOOK_S)
        for output in outputs:
            if output.error is not None:
                raise output.error.to_error()
        return [(output.request_id, output.finish_reason) for output in outputs]

    def _look(self, after_s: float) -> None:
        """Looks whether something else has run, if the last look was so long ago."""
        now = time.perf_counter()
        if self._others is None or now - self._looked_s < after_s:
            return
        share = self._others.look()
        self._alone = share is None or share < OTHERS
        if not self._alone:
            self.disturbed.append((self._looked_s - self._served_s, now - self._served_s))
        self._looks.append((len(self._noted), self._alone))
        self._looked_s = now

    def _count_noted(self) -> None:
        """Counts the work of the steps that were noted. Those since the last look count as those before it."""
        begin = 0
        for end, alone in [*self._looks, (len(self._noted), self._alone)]:
            for noted in self._noted[begin:end]:
                work = work_of(noted.plan, self._groups)
                self._steps.append(MeasuredStep(work, noted.seconds, noted.own_s, alone))
            begin = end
        self._noted.clear()
        self._looks.clear()

    def serve(self, trace: Sequence[TracedRequest], progress: Callable[[int], None] = lambda ended: None) -> Replay:
        """Serves the trace by the clock, with prompts as the trace has them: equal where it says so.

        progress(ended): requests that have ended, called when there is one more.
        """
        outcome = Replay()
        live: dict[str, Served] = {}
        before = self.core.stats().preemptions
        prompts = self._prompts(trace)
        waiting = list(zip(trace, prompts, strict=True))[::-1]
        ended = 0
        self._look(0.0)  # what came before is not this trace's
        self.disturbed.clear()
        self._served_s = time.perf_counter()
        clock = self._clock()
        while waiting or self.core.has_work():
            while waiting and waiting[-1][0].arrival_s <= clock.now():
                request, prompt = waiting.pop()
                outcome.served.append(Served(request))
                live[self.add(prompt, request.output_len)] = outcome.served[-1]
            if not self.core.has_work():
                clock.wait(waiting[-1][0].arrival_s - clock.now())
                continue
            noted = len(self._noted)
            outputs = self.step()
            now = clock.now()
            for step in self._noted[noted:]:
                rows = len(step.plan.rows)
                outcome.steps += 1
                outcome.busy_s += step.seconds
                outcome.running_s += step.seconds * rows
                outcome.most_running = max(outcome.most_running, rows)
            for request_id, reason in outputs:
                one = live[request_id]
                one.num_tokens += 1
                if one.first_token_s is None:
                    one.first_token_s = now
                else:
                    outcome.gaps_s.append(now - one.last_token_s[0])
                one.last_token_s[0] = now
                if reason is not None:
                    one.finished_s = now
                    ended += 1
                    progress(ended)
        outcome.end_s = clock.now()
        self._look(LOOK_S)
        self._count_noted()
        outcome.preemptions = self.core.stats().preemptions - before
        return outcome

    def _prompts(self, trace: Sequence[TracedRequest]) -> list[list[int]]:
        """Returns a prompt for each request: random tokens for each of the trace's, so that attention is as usual."""
        words: dict[tuple[int, int], list[int]] = {}
        prompts = []
        for request in trace:
            prompt: list[int] = []
            for place, hash_id in enumerate(request.hash_ids):
                if (place, hash_id) not in words:
                    words[place, hash_id] = self.prompt(MOONCAKE_BLOCK)
                prompt += words[place, hash_id][: request.prompt_len - len(prompt)]
            prompts.append(prompt + self.prompt(request.prompt_len - len(prompt)))
        return prompts
