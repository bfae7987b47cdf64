"""Runs one simulated engine over a trace, in simulated time, and records what became of each request."""

from __future__ import annotations

import collections.abc as abc
import math
from array import array
from dataclasses import dataclass, field
from heapq import heappop, heappush

from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.sequence import Sequence, SequenceUpdate
from pagemill.scheduling.step_plan import StepPlan
from pagemill.simulate.engine import ROOT, Observer, SimulatedEngine, Step
from pagemill.simulate.lower_tier import LowerTier
from pagemill.simulate.step_time import KVShape, StepModel
from pagemill.simulate.trace import TracedRequest


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
    streams: bool = field(init=False)
    """True if its tokens come as they are computed."""

    def __post_init__(self) -> None:
        self.streams = self.request.streams

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
        streams = length > 1 and self.streams
        return (self.finished_s - self.first_token_s) / (length - 1) if streams else None


@dataclass(slots=True)
class Replay:
    """Records a replayed trace.

    busy_s: simulated seconds in steps; running_s: their sum over running sequences. gaps_s: the seconds between two
    tokens of a request, for all tokens but first ones, preemptions included. stopped: True if it was ended before all
    requests had.
    """

    served: list[Served] = field(default_factory=list)
    steps: int = 0
    end_s: float = 0.0
    busy_s: float = 0.0
    running_s: float = 0.0
    most_running: int = 0
    preemptions: int = 0
    stopped: bool = False
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
        """Returns tokens per second. Counted are the answers of requests that ended in time."""
        return sum(one.request.answer_tokens for one in self.finished) / self.end_s if self.end_s else 0.0

    def note_step(self, step: Step, running: int) -> None:
        """Counts a step in which so many sequences run."""
        for number in step.started:
            self.served[number].starts += 1
        self.steps += 1
        self.busy_s += step.seconds
        self.running_s += step.seconds * running
        self.most_running = max(self.most_running, running)

    def note(self, update: SequenceUpdate, now: float) -> bool:
        """Takes in what a step that ends now has brought for a sequence. Returns whether its request has ended."""
        sequence = update.sequence
        one, branch = self.served[sequence.request.seed], sequence.index
        last_token_s, ended = one.last_token_s, False
        one.num_tokens += len(update.tokens if update.hypothesis is None else update.hypothesis.token_ids)
        if update.finish_reason is not None:
            one.num_ended += 1
            if one.num_ended == one.request.num_sequences:
                one.finished_s, ended = now, True
        if one.first_token_s is None:
            if one.streams or ended:
                one.first_token_s = now
                one.num_cached_tokens = sequence.num_cached_tokens
        elif one.streams and branch in last_token_s:
            self.gaps_s.append(now - last_token_s[branch])
        last_token_s[branch] = now
        return ended

    def end_late(
        self, deadlines: list[tuple[float, int]], now: float, engines: abc.Sequence[SimulatedEngine]
    ) -> list[int]:
        """Ends the requests whose deadline was before now, wherever they are, and returns their numbers.

        deadlines: a heap of them, with numbers of requests.
        """
        late = []
        while deadlines and deadlines[0][0] < now:
            _, number = heappop(deadlines)
            one = self.served[number]
            if one.finished_s is None and not one.refused:
                one.timed_out = True
                late.append(number)
                for engine in engines:
                    engine.scheduler.abort(str(number), now)
        return late


def never(one: Served) -> bool:
    """Stops no replay."""
    return False


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
    stops: abc.Callable[[Served], bool] = never,
    coasts: bool = False,
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
    stops:   told of each request that has ended, by itself or by its timeout; the replay stops where it says so.
    coasts:  whether sequences coast, which is quicker, and no other replay but for the order of `gaps_s`. Not with a
             tier or timeouts, not for models with windows, and not for observers of plans or of what sequences hold.
    """
    outcome = Replay()
    served = outcome.served
    deadlines: list[tuple[float, int]] = []
    ended: list[int] = []
    now = 0.0

    def coasted(sequence: Sequence, count: int) -> None:
        one = served[sequence.request.seed]
        one.num_tokens += count
        one.last_token_s[sequence.index] = now

    engine = SimulatedEngine(
        scheduler,
        step_times,
        lambda number: served[number].request,
        observe=observe,
        max_tokens=max_tokens,
        source=tier,
        coasts=coasted if coasts else None,
    )
    while now < until_s and not outcome.stopped:
        while len(served) < len(trace) and trace[len(served)].arrival_s <= now:
            request, number = trace[len(served)], len(served)
            served.append(Served(request))
            served[number].refused = not engine.submit(number, root=root(request))
            heappush(deadlines, (request.deadline_s, number))
        ended += outcome.end_late(deadlines, now, [engine])
        step = engine.begin(now)
        now += step.waits_s
        if step.plan is None:
            loaded_s = math.inf if tier is None else tier.next_s
            assert loaded_s < math.inf or not scheduler.has_work(), "requests wait, and nothing can run"
            arrival_s = trace[len(served)].arrival_s if len(served) < len(trace) else math.inf
            if loaded_s == arrival_s == math.inf:
                break
            now = max(now, min(loaded_s, arrival_s))
            continue
        began_s, now = now, now + step.seconds
        outcome.note_step(step, scheduler.num_running)
        if engine.coasting is not None:
            outcome.gaps_s.extend([now - began_s] * engine.coasting.count)
        ended += outcome.end_late(deadlines, now, [engine])
        for update in engine.end(step, now):
            if outcome.note(update, now):
                ended.append(update.sequence.request.seed)
        outcome.stopped = any(stops(served[number]) for number in ended)
        ended.clear()
    if engine.coasting is not None:
        engine.coasting.settle()
    outcome.end_s = now
    outcome.preemptions = scheduler.preemptions
    return outcome


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
