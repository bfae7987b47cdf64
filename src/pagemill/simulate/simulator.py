"""Runs the engine's loop over simulated time, with the real scheduler, the real memory manager and a step-time model.

As in `engine.core`, each step is scheduled, run and committed. But running computes nothing: it only moves `now` by the
seconds that the model gives the step.
"""

from __future__ import annotations

import collections.abc as abc
import math
from array import array
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from pagemill.errors import RequestTooLargeError
from pagemill.memory.digest import root_digest
from pagemill.memory.manager import MemoryManager
from pagemill.sampling.params import BeamSearchParams, SamplingParams, TokenLogprobs
from pagemill.scheduling.beam import row_params
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.sequence import Request, Sequence
from pagemill.scheduling.step_plan import StepPlan, StepResult
from pagemill.simulate.continuations import beam_candidates
from pagemill.simulate.lower_tier import LowerTier
from pagemill.simulate.step_time import KVShape, StepModel, work_of
from pagemill.simulate.trace import TracedRequest

ROOT = root_digest(b"simulated", "simulated", "simulated", "")
OUTPUT_TOKENS = 1 << 31
"""The first generated token; each has a number of its own, so that no two answers are alike. No prompt has such."""
END_TOKEN = OUTPUT_TOKENS - 1
"""Ends an answer whose length the scheduler is not told: it must be among the scheduler's `eos_token_ids`."""

Observer = abc.Callable[[StepPlan, float], None]
"""A function that is called in every step, before its commit, with the plan and the seconds that the step takes."""


@dataclass(slots=True)
class Served:
    """Records what became of one request. Times are simulated seconds; None: not yet, or never."""

    request: TracedRequest
    first_token_s: float | None = None
    finished_s: float | None = None
    last_token_s: dict[int, float] = field(default_factory=dict)
    """The time of the last token, by sample or beam."""
    num_ended: int = 0
    """Its samples or beams that have ended."""
    num_tokens: int = 0
    num_cached_tokens: int = 0
    timed_out: bool = False
    """True if its timeout was over before its answer had ended."""
    starts: int = 0
    """Times that it entered the batch, forks apart; each after the first follows a preemption."""
    refused: bool = False
    """True if it could never run in this pool."""

    @property
    def ttft_s(self) -> float:
        assert self.first_token_s is not None
        return self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None where there is no second one, or all come at once."""
        assert self.first_token_s is not None
        assert self.finished_s is not None
        length = self.num_tokens // self.request.num_sequences
        streams = length > 1 and self.request.streams
        return (self.finished_s - self.first_token_s) / (length - 1) if streams else None


@dataclass(slots=True)
class Replay:
    """Records a replayed trace.

    busy_s: simulated seconds in steps; running_s: their sum over running sequences. gaps_s: the seconds between two
    tokens of a request, for all tokens but first ones, preemptions included.
    """

    served: list[Served] = field(default_factory=list)
    steps: int = 0
    end_s: float = 0.0
    busy_s: float = 0.0
    running_s: float = 0.0
    most_running: int = 0
    preemptions: int = 0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))

    @property
    def finished(self) -> list[Served]:
        return [one for one in self.served if one.finished_s is not None]

    @property
    def mean_running(self) -> float:
        return self.running_s / self.busy_s if self.busy_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return sum(one.num_tokens for one in self.served) / self.end_s if self.end_s else 0.0

    @property
    def goodput_tokens_per_s(self) -> float:
        """Returns the tokens per second of the answers that requests have got which ended in time."""
        return sum(one.request.answer_tokens for one in self.finished) / self.end_s if self.end_s else 0.0


def replay(
    trace: abc.Sequence[TracedRequest],
    scheduler: Scheduler,
    step_times: StepModel,
    observe: abc.Sequence[Observer] = (),
    *,
    root: abc.Callable[[TracedRequest], bytes] = lambda request: ROOT,
    until_s: float = float("inf"),
    max_tokens: int | None = None,
    tier: LowerTier | None = None,
) -> Replay:
    """Serves the trace (in order of arrival), each request for exactly its output length, until all have ended.

    root:    gives the digest at which a request's prefix chain begins; by default one for all, so that all may share.
    A request's samples and beams fork as they do in the engine, and are always told their length. Beams choose among
    `beam_candidates`, which depend on nothing but the request's place and the beam's tokens. A request whose timeout is
    over is ended between two steps, as the front end ends it, and gives back all that it held.
    until_s: simulated second at which the replay stops, with whatever is still running.
    max_tokens: what all requests set, at least; they end by `END_TOKEN`, and nobody knows before how long they become.
             None: each sets its output length, and the scheduler is told that nothing else ends it.
    tier:    host memory below the pool; its `stored` must be the scheduler's.
    """
    outcome = Replay()
    served = outcome.served
    groups = step_times.shape.groups
    fresh = count(OUTPUT_TOKENS)
    deadlines: list[tuple[float, int]] = []
    now = 0.0
    while now < until_s:
        while len(served) < len(trace) and trace[len(served)].arrival_s <= now:
            _submit(scheduler, served, trace[len(served)], root, max_tokens)
            heappush(deadlines, (served[-1].request.deadline_s, len(served) - 1))
        _end_late(scheduler, served, deadlines, now)
        if tier is not None:
            tier.finish_loads(scheduler, now)
        plan = scheduler.schedule(now)
        waits_s = 0.0 if tier is None else tier.start_transfers(scheduler, now)
        now += waits_s
        if plan is None:
            loaded_s = math.inf if tier is None else tier.next_s
            assert loaded_s < math.inf or not scheduler.has_work(), "requests wait, and nothing can run"
            arrival_s = trace[len(served)].arrival_s if len(served) < len(trace) else math.inf
            if loaded_s == arrival_s == math.inf:
                break
            now = max(now, min(loaded_s, arrival_s))
            continue
        running = {sequence.row: sequence for sequence in scheduler.state.running}
        for new in plan.new_rows:
            sequence = running.get(new.row)  # none: the row is kept for a sequence that is to fork off
            if sequence is not None and (sequence.group is None or sequence.group.beams == [sequence]):
                served[sequence.request.seed].starts += 1
        seconds = step_times.seconds(work_of(plan, groups))
        if tier is not None:
            tier.note_step(plan, seconds)
        for observer in observe:
            observer(plan, seconds)
        now += seconds
        outcome.steps += 1
        outcome.busy_s += seconds
        outcome.running_s += seconds * scheduler.num_running
        outcome.most_running = max(outcome.most_running, scheduler.num_running)
        tokens: list[list[int]] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        for row, target in zip(plan.rows[plan.sample_from].tolist(), plan.sample_to.tolist(), strict=True):
            sequence = running[row]
            index = sequence.request.seed
            request = served[index].request
            token = _next_token(request, sequence, max_tokens) if row == target else None
            tokens.append([next(fresh) if token is None else token])
            width = request.beam_width
            logprobs.append([beam_candidates(index, sequence.tokens[sequence.prompt_len :], width)] if width else None)
        _end_late(scheduler, served, deadlines, now)
        for update in scheduler.commit(StepResult(tokens, logprobs), now):
            one, branch = served[update.sequence.request.seed], update.sequence.index
            hypothesis = update.hypothesis
            one.num_tokens += len(update.tokens if hypothesis is None else hypothesis.token_ids)
            one.num_ended += update.finish_reason is not None
            if one.num_ended == one.request.num_sequences:
                one.finished_s = now
            if one.first_token_s is None and (one.request.streams or one.finished_s is not None):
                one.first_token_s = now
                one.num_cached_tokens = update.sequence.num_cached_tokens
            elif one.request.streams and branch in one.last_token_s:
                outcome.gaps_s.append(now - one.last_token_s[branch])
            one.last_token_s[branch] = now
        scheduler.note_step(plan, waits_s + seconds)
    outcome.end_s = now
    outcome.preemptions = scheduler.preemptions
    return outcome


def _end_late(
    scheduler: Scheduler, served: abc.Sequence[Served], deadlines: list[tuple[float, int]], now: float
) -> None:
    """Ends the requests whose deadline was before now. deadlines: a heap, with places in `served`."""
    while deadlines and deadlines[0][0] < now:
        _, index = heappop(deadlines)
        if served[index].finished_s is None and not served[index].refused:
            scheduler.abort(str(index), now)
            served[index].timed_out = True


def _next_token(request: TracedRequest, sequence: Sequence, max_tokens: int | None) -> int | None:
    """Returns a sequence's next token if it ends there, or a later prompt may continue it: a request's first answer."""
    length = sequence.num_output_tokens
    if request.num_sequences == 1 and max_tokens is not None and max_tokens > request.output_len == length + 1:
        return END_TOKEN
    return request.answer_token(length) if sequence.index == 0 else None


def _submit(
    scheduler: Scheduler,
    served: list[Served],
    request: TracedRequest,
    root: abc.Callable[[TracedRequest], bytes],
    max_tokens: int | None,
) -> None:
    """Adds a request. Its index in `served` is its id and seed, by which the results of steps find back to it."""
    forks = request.num_sequences > 1 or request.beam_width > 0
    index, most = len(served), request.output_len if forks else max(request.output_len, max_tokens or 0)
    params = SamplingParams(
        n=1 if request.beam_width else request.num_sequences,
        temperature=float(forks),
        max_tokens=most,
        ignore_eos=forks or max_tokens is None,
    )
    beam = BeamSearchParams(request.beam_width, most, ignore_eos=True) if request.beam_width else None
    served.append(Served(request))
    try:
        scheduler.add(
            Request(
                request_id=str(index),
                prompt_token_ids=request.prompt(),
                params=params if beam is None else row_params(beam, 0),
                beam=beam,
                seed=index,
                priority=0,
                arrival_s=request.arrival_s,
                root=root(request),
                max_len=request.prompt_len + most,
            )
        )
    except RequestTooLargeError:
        served[index].refused = True


class WasteMeter:
    """Integrates over time the bytes of KV memory that are reserved, and those that hold tokens. It is an observer.

    reserved:      bytes of the frames that sequences hold during a step, each shared block once. The frames' padding
                   counts, and so do frames that are reserved for the tokens of the step.
    written:       bytes of the tokens that were committed before the step.
    being_written: bytes of the tokens that the step computes: their slots are in use, and not yet committed.
    """

    def __init__(self, memory: MemoryManager, shape: KVShape) -> None:
        self._memory = memory
        self._slot_bytes = shape.slot_bytes
        self._reserved_slot_bytes = shape.frame_bytes(memory.block_size) / memory.block_size
        self._num_groups = len(memory.windows)
        self.reserved = self.written = self.being_written = 0.0  # byte-seconds

    def __call__(self, plan: StepPlan, seconds: float) -> None:
        found = self._memory.occupancy()
        self.reserved += seconds * found.slots_reserved * self._reserved_slot_bytes
        self.written += seconds * found.slots_written * self._slot_bytes
        self.being_written += seconds * plan.num_tokens * self._num_groups * self._slot_bytes

    @property
    def uncommitted(self) -> float:
        """The share of the reserved bytes, over time, that hold no committed token."""
        return 1 - self.written / self.reserved if self.reserved else 0.0

    @property
    def waste(self) -> float:
        """The share of the reserved bytes, over time, in which no token is or is being written."""
        return self.uncommitted - self.being_written / self.reserved if self.reserved else 0.0
