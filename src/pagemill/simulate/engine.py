"""One simulated engine: the real scheduler and memory, whose steps compute nothing, and take what a model says.

As in `engine.core`, each step is scheduled, run and committed. `begin` does the first, `end` the last. Between them
lies time, of which the caller keeps count.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol

from pagemill.errors import RequestTooLargeError
from pagemill.memory.digest import root_digest
from pagemill.sampling.params import BeamSearchParams, SamplingParams, TokenLogprobs
from pagemill.scheduling.beam import row_params
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.sequence import Request, Sequence, SequenceUpdate
from pagemill.scheduling.step_plan import StepPlan, StepResult
from pagemill.simulate.coasting import Coasting
from pagemill.simulate.continuations import beam_candidates
from pagemill.simulate.step_time import StepModel, work_of
from pagemill.simulate.trace import TracedRequest

ROOT = root_digest(b"simulated", "simulated", "simulated", "")
OUTPUT_TOKENS = 1 << 31
"""The first generated token; each has a number of its own, so that no two answers are alike. No prompt has such."""
END_TOKEN = OUTPUT_TOKENS - 1
"""Ends an answer whose length the scheduler is not told: it must be among the scheduler's `eos_token_ids`."""

Observer = abc.Callable[[StepPlan, float], None]
"""A function that is called in every step, before its commit, with the plan and the seconds that the step takes."""


class Source(Protocol):
    """Holds blocks that are not in the pool, and brings them while steps run."""

    @property
    def next_s(self) -> float:
        """When the next load ends; infinity if none is under way."""

    def finish_loads(self, scheduler: Scheduler, now: float) -> None:
        """Tells the scheduler of the loads that have ended by now."""

    def start_transfers(self, scheduler: Scheduler, now: float) -> float:
        """Begins what the step that has been planned asks for. Returns the seconds for which the step waits."""

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Notes how long a step took."""


@dataclass(frozen=True)
class Step:
    """Is a step under way. plan: None if nothing can run. waits_s: seconds before it begins. seconds: that it takes.

    rows: the sequences that run, by row. started: numbers of requests that entered the batch with it.
    """

    plan: StepPlan | None
    waits_s: float
    seconds: float
    rows: dict[int, Sequence]
    started: list[int]


class SimulatedEngine:
    """Runs the scheduler that serves in simulated steps. requests: by number, those that it may be given.

    tokens:     gives each generated token its number; engines that share blocks share it too.
    max_tokens: what all requests set, at least; they end by `END_TOKEN`, and nobody knows before how long they become.
                None: each sets its output length, and the scheduler is told that nothing else ends it.
    source:     blocks outside the pool; its `stored` must be the scheduler's.
    coasts:     told of tokens that a sequence has got since; given, sequences coast (`simulate.coasting`). Then nobody
                may look at them or at plans, all requests set their output length, and none may be aborted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step_times: StepModel,
        requests: abc.Callable[[int], TracedRequest],
        *,
        observe: abc.Sequence[Observer] = (),
        tokens: abc.Iterator[int] | None = None,
        max_tokens: int | None = None,
        source: Source | None = None,
        coasts: abc.Callable[[Sequence, int], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.source = source
        self._step_times = step_times
        self._groups = step_times.shape.groups
        self._requests = requests
        self._observe = observe
        self._tokens = count(OUTPUT_TOKENS) if tokens is None else tokens
        self._max_tokens = max_tokens
        self._coasts = coasts
        self.coasting = None if coasts is None else Coasting(scheduler, self._bring)

    def submit(
        self,
        number: int,
        *,
        root: bytes = ROOT,
        most: int | None = None,
        answered: abc.Sequence[int] = (),
    ) -> bool:
        """Adds a request, whose number is its id and seed. Returns False if it could never run in this pool.

        most: tokens that it gets here, if it is to go on elsewhere. answered: those that it got elsewhere.
        """
        request = self._requests(number)
        forks = request.num_sequences > 1 or request.beam_width > 0
        if most is None:
            most = request.output_len if forks else max(request.output_len, self._max_tokens or 0)
        params = SamplingParams(
            n=1 if request.beam_width else request.num_sequences,
            temperature=float(forks),
            max_tokens=most,
            ignore_eos=forks or self._max_tokens is None,
        )
        beam = BeamSearchParams(request.beam_width, most, ignore_eos=True) if request.beam_width else None
        try:
            self.scheduler.add(
                Request(
                    request_id=str(number),
                    prompt_token_ids=request.prompt(),
                    params=params if beam is None else row_params(beam, 0),
                    beam=beam,
                    seed=number,
                    priority=0,
                    arrival_s=request.arrival_s,
                    root=root,
                    max_len=request.prompt_len + most,
                    answered=[*answered],
                )
            )
        except RequestTooLargeError:
            return False
        return True

    def begin(self, now: float) -> Step:
        """Plans a step."""
        source, scheduler = self.source, self.scheduler
        if source is not None:
            source.finish_loads(scheduler, now)
        coasting = self.coasting
        if coasting is not None:
            coasting.prepare()
        plan = scheduler.schedule(now, 0 if coasting is None else coasting.count)
        waits_s = 0.0 if source is None else source.start_transfers(scheduler, now)
        if plan is None:
            return Step(None, waits_s, 0.0, {}, [])
        rows = {entry.sequence.row: entry.sequence for entry in scheduler.state.batch.flights[-1].entries}
        started = []
        for new in plan.new_rows:
            sequence = rows.get(new.row)  # none: the row is kept for a sequence that is to fork off
            if sequence is None or (sequence.index and sequence.residency is None):
                continue  # its request had begun without it
            if sequence.group is None or sequence.group.beams == [sequence]:
                started.append(sequence.request.seed)
        work = work_of(plan, self._groups)
        if coasting is not None:
            work = work.join(coasting.work(self._groups))
        seconds = self._step_times.seconds(work)
        if source is not None:
            source.note_step(plan, seconds)
        for observer in self._observe:
            observer(plan, seconds)
        return Step(plan, waits_s, seconds, rows, started)

    def end(self, step: Step, now: float) -> list[SequenceUpdate]:
        """Commits a step that has run. Returns what it brought."""
        plan = step.plan
        assert plan is not None
        tokens: list[list[int]] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        ends_unforeseen = self._max_tokens is not None
        for row, target in zip(plan.rows[plan.sample_from].tolist(), plan.sample_to.tolist(), strict=True):
            sequence = step.rows[row]
            number = sequence.request.seed
            request = self._requests(number)
            token = None
            if row == target and (ends_unforeseen or request.continued_ids):
                token = self._next_token(request, sequence)
            tokens.append([next(self._tokens) if token is None else token])
            if width := request.beam_width:
                generated = sequence.tokens[sequence.prompt_len :]
                logprobs.append([beam_candidates(number, generated, width)])
            else:
                logprobs.append(None)
        updates = self.scheduler.commit(StepResult(tokens, logprobs), now)
        coasting = self.coasting
        self.scheduler.note_step(plan, step.waits_s + step.seconds, 0 if coasting is None else coasting.count)
        if coasting is not None:
            coasting.step()
            for update in updates:
                if update.finish_reason is None:
                    coasting.enter(update.sequence)
        return updates

    def _bring(self, sequence: Sequence, count: int) -> None:
        """Gives a sequence so many tokens that it got while it coasted."""
        request, have = self._requests(sequence.request.seed), sequence.num_output_tokens
        if request.continued_ids:
            sequence.tokens += filter(None, map(request.answer_token, range(have, have + count)))
        else:
            sequence.tokens += islice(self._tokens, count)
        assert self._coasts is not None
        self._coasts(sequence, count)

    def _next_token(self, request: TracedRequest, sequence: Sequence) -> int | None:
        """Returns a sequence's next token if it ends there, or a later prompt may continue it: a first answer."""
        length, most = sequence.num_output_tokens, self._max_tokens
        if request.num_sequences == 1 and most is not None and most > request.output_len == length + 1:
            return END_TOKEN
        return request.answer_token(length) if sequence.index == 0 else None
