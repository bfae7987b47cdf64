"""Simulates one replica: the scheduler and the memory that serve, over the step times of a model on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np

from pagemill.memory.manager import MemoryManager
from pagemill.planner.limits import Limits
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.step_plan import StepPlan
from pagemill.simulate.engine import END_TOKEN
from pagemill.simulate.lower_tier import LowerTier
from pagemill.simulate.roofline import Roofline
from pagemill.simulate.simulator import Replay, Served, never, replay
from pagemill.simulate.step_time import StepModel
from pagemill.simulate.trace import TracedRequest


@dataclass(frozen=True)
class Setup:
    """Holds the engine's settings, as in EngineConfig. target_tpot_s: as of `Scheduler`: None for "auto", infinite for
    "off"."""

    kv_bytes: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    target_tpot_s: float | None = math.inf
    kv_compaction: str = "auto"

    def memory(self, step_times: StepModel, **settings: Any) -> MemoryManager:
        shape = step_times.shape
        frames = self.kv_bytes // shape.frame_bytes(self.block_size)
        return MemoryManager(frames, self.block_size, [group.window for group in shape.groups.groups], **settings)

    def scheduler(
        self,
        memory: Any,
        *,
        caching: bool = True,
        tier: LowerTier | None = None,
        swap_blocks: int = 0,
    ) -> Scheduler:
        """Returns the scheduler over a memory and the tier below it. swap_blocks: without a tier, how many blocks it
        would have room for."""
        return Scheduler(
            memory,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            eos_token_ids=frozenset({END_TOKEN}),
            ageing_s=10.0,
            enable_prefix_caching=caching,
            stored=None if tier is None else tier.stored,
            swap_blocks=swap_blocks if tier is None else tier.swap_blocks,
            target_tpot_s=self.target_tpot_s,
            compacts=self.kv_compaction == "auto" and isinstance(memory, MemoryManager),
        )


def latencies(served: Sequence[Served]) -> dict[str, float]:
    """Returns medians and 99th percentiles over finished requests, in seconds; 0 per token where no answer has a second
    one.

    A request that was ended by its timeout took for ever per token, and for its first one if that had not come: so no
    limit holds where more than one in a hundred was.
    """
    ended = [one for one in served if one.finished_s is not None or one.timed_out]
    ttft = [math.inf if one.first_token_s is None else one.ttft_s for one in ended]
    tpot = [seconds for one in ended if (seconds := math.inf if one.timed_out else one.tpot_s) is not None]
    nothing = float("nan")
    no_second = 0.0 if ended else nothing
    return {
        "ttft_median_s": median(ttft) if ttft else nothing,
        "ttft_p99_s": _p99(ttft) if ttft else nothing,
        "tpot_median_s": median(tpot) if tpot else no_second,
        "tpot_p99_s": _p99(tpot) if tpot else no_second,
    }


def _p99(seconds: Sequence[float]) -> float:
    """Returns the 99th percentile, infinite where one of the two between which it lies is."""
    above = sorted(seconds)[math.ceil(P99 * (len(seconds) - 1))]
    return math.inf if above == math.inf else float(np.percentile(seconds, 99))


@dataclass(frozen=True)
class ReplicaSettings:
    """Holds what a replica is made of. kv_dtype, max_num_seqs, max_num_batched_tokens, kv_host_memory: as in
    EngineConfig. ranks: as tensor_parallel_size. kv_host_memory: bytes of one rank; 0 for none; None for as much as the
    pool where a link leads to host memory, which is the default of engines too.
    """

    ranks: int
    kv_dtype: str = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    kv_host_memory: int | None = None

    def host_bytes(self, roofline: Roofline) -> int:
        """Returns the bytes of host memory for the K/V of one rank."""
        if self.kv_host_memory is not None:
            return self.kv_host_memory
        return 0 if roofline.device.link_bytes_per_s is None else roofline.kv_bytes

    def __str__(self) -> str:
        host = "" if self.kv_host_memory is None else f", {self.kv_host_memory / 2**30:g} GiB host"
        return (
            f"tensor parallel {self.ranks}, K/V {self.kv_dtype}, {self.max_num_seqs} sequences, "
            f"{self.max_num_batched_tokens} tokens a step{host}"
        )


@dataclass(frozen=True)
class Trial:
    """Holds what became of requests that one replica served at a rate.

    Latencies, running and pool are of requests that came after the first WARM_UP of the time, and of the time in which
    they did. counted: how many they are. timed_out: those of them that their timeout ended.
    rate: that asked for, in requests per second. output_len, length: tokens of a request's answers, and of prompt and
    answers together, in the mean of all. running: sequences, in the mean over time. pool: the share of the KV pool that
    sequences held, likewise. short: share of that time in which a request waited for blocks. busy: share of the time
    in steps. cached: share of the prompts' tokens that were found. refused: requests that could never run.
    waiting_grows: True if more and more wait, so that no latency is steady.
    most_rows: an upper bound on the rows that all that ran and waited at once would take.
    cut: True if it was ended once so many requests had broken a limit that its p99 would have, whatever came. All else
    is of what had ended until then.
    """

    rate: float
    requests: int
    counted: int
    output_len: float
    length: float
    ttft_median_s: float
    ttft_p99_s: float
    tpot_median_s: float
    tpot_p99_s: float
    output_tokens_per_s: float
    running: float
    most_running: int
    pool: float
    short: float
    busy: float
    cached: float
    preemptions: int
    refused: int
    timed_out: int
    waiting_grows: bool
    most_rows: int
    cut: bool = False


P99 = 0.99
WARM_UP = 1 / 3
"""Share of the time of arrivals whose requests are not counted: the replica fills up in it."""
GROWTH = 0.02
"""Share of the counted requests by which those that wait must grow in the last two thirds of the time."""
FEW_WAIT = 10
"""Requests that may come to wait, and go, by chance."""


def run_trial(
    roofline: Roofline,
    settings: ReplicaSettings,
    trace: Sequence[TracedRequest],
    rate: float,
    limits: Limits | None = None,
) -> Trial:
    """Simulates a replica that serves the trace, which comes at this rate.

    limits: given, the trial is cut once it is certain that its p99 breaks one.
    """
    if not any(one.hash_ids or one.num_sequences > 1 for one in trace):
        # Nothing can be found again but what a preempted sequence had: without one, neither names of blocks nor what is
        # below the pool change anything, but for whether admission counts on it.
        trial = _simulate(roofline, settings, trace, rate, limits, caching=False)
        if trial is not None:
            return trial
    trial = _simulate(roofline, settings, trace, rate, limits, caching=True)
    assert trial is not None
    return trial


def _simulate(
    roofline: Roofline,
    settings: ReplicaSettings,
    trace: Sequence[TracedRequest],
    rate: float,
    limits: Limits | None,
    *,
    caching: bool,
) -> Trial | None:
    """Simulates a replica. caching: whether blocks can be found again; without, None once a sequence is preempted."""
    # Compaction takes no simulated time and changes no table: without it the same is served, but for a cached block
    # that it may evict a little sooner.
    setup = Setup(
        roofline.kv_bytes,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        target_tpot_s=None,
        kv_compaction="off",
    )
    host, link = settings.host_bytes(roofline), roofline.device.link_bytes_per_s
    block_bytes = roofline.shape.frame_bytes(setup.block_size)
    memory = setup.memory(roofline, saves_evicted=caching and host > 0)
    tier = None
    if caching and host > 0 and link is not None:
        tier = LowerTier(memory, host // block_bytes, block_bytes / (roofline.device.efficiency["link"] * link))
    scheduler = setup.scheduler(memory, caching=caching, tier=tier, swap_blocks=host // block_bytes)
    first = next(index for index, one in enumerate(trace) if one.arrival_s >= WARM_UP * trace[-1].arrival_s)
    widest = max(one.num_sequences for one in trace)
    latest, most_rows = -1, 0
    busy_s = held_s = running_s = short_s = 0.0

    def look(plan: StepPlan, seconds: float) -> None:
        nonlocal latest, most_rows, busy_s, held_s, running_s, short_s
        batch = scheduler.state.batch
        most_rows = max(most_rows, settings.max_num_seqs - batch.num_free + widest * scheduler.num_waiting)
        if scheduler.state.running:
            latest = max(latest, scheduler.state.running[-1].request.seed)
        if first <= latest < max(len(trace) - 1, first + 1):
            busy_s += seconds
            held_s += seconds * (1 - memory.num_available / memory.num_frames)
            running_s += seconds * scheduler.num_running
            short_s += seconds * (scheduler.state.crowded and batch.num_free > 0)

    breaking = never if limits is None else _Breaking(limits, trace[first].arrival_s, len(trace) - first)

    def stops(one: Served) -> bool:
        return breaking(one) or (not caching and scheduler.preemptions > 0)

    coasts = tier is None and memory.windows == (None,) and all(one.timeout is None for one in trace)
    outcome = replay(trace, scheduler, roofline, [look], tier=tier, stops=stops, coasts=coasts)
    if not caching and outcome.preemptions:
        return None
    counted_s = busy_s or math.inf
    shares = [part_s / counted_s for part_s in (running_s, held_s, short_s)]
    return _trial(outcome, outcome.served[first:], shares, rate, most_rows)


class _Breaking:
    """Counts those of the counted requests that end beyond a limit, and says when they are too many for any p99."""

    def __init__(self, limits: Limits, first_s: float, counted: int) -> None:
        """first_s: arrival of the first request that is counted. counted: how many are."""
        self._limits = limits
        self._first_s = first_s
        self._enough = counted - math.floor(P99 * (counted - 1))
        self._late = self._slow = 0

    def __call__(self, one: Served) -> bool:
        """Takes in a request that has ended. Returns whether p99 breaks a limit however quickly all others end."""
        if one.request.arrival_s < self._first_s:
            return False
        limits = self._limits
        late = one.first_token_s is None or (limits.ttft_p99_s is not None and one.ttft_s > limits.ttft_p99_s)
        self._late += late
        self._slow += one.timed_out or (one.tpot_s or 0.0) > limits.tpot_p99_s
        return max(self._late, self._slow) >= self._enough


def _trial(outcome: Replay, counted: Sequence[Served], shares: Sequence[float], rate: float, most_rows: int) -> Trial:
    running, pool, short = shares
    prompts = sum(one.request.prompt_len for one in counted) or 1
    return Trial(
        rate=rate,
        requests=len(outcome.served),
        counted=len(counted),
        output_len=mean(one.request.answer_tokens for one in outcome.served),
        length=mean(one.request.prompt_len + one.request.answer_tokens for one in outcome.served),
        **latencies(counted),
        output_tokens_per_s=outcome.output_tokens_per_s,
        running=running,
        most_running=outcome.most_running,
        pool=pool,
        short=short,
        busy=outcome.busy_s / outcome.end_s if outcome.end_s else 0.0,
        cached=sum(one.num_cached_tokens for one in counted) / prompts,
        preemptions=outcome.preemptions,
        refused=sum(one.refused for one in outcome.served),
        timed_out=sum(one.timed_out for one in counted),
        waiting_grows=_waiting_grows(counted),
        most_rows=most_rows,
        cut=outcome.stopped,
    )


def _waiting_grows(counted: Sequence[Served]) -> bool:
    """Says whether more requests wait for their first token after each third of the time in which these come."""
    begin, end = counted[0].request.arrival_s, counted[-1].request.arrival_s
    served = [one for one in counted if not one.refused]
    arrived = np.array([one.request.arrival_s for one in served])
    began = np.array([one.request.deadline_s if one.first_token_s is None else one.first_token_s for one in served])
    waiting = [int(((arrived <= at) & (began > at)).sum()) for at in np.linspace(begin, end, 4)]
    least = max(FEW_WAIT, GROWTH * len(counted))
    return waiting[3] > waiting[2] > waiting[1] and waiting[3] - waiting[1] > least
