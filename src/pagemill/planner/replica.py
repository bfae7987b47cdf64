"""Simulates one replica: the scheduler and the memory that serve, over the step times of a model on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.loading import Stored
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.step_plan import StepPlan
from pagemill.simulate.lower_tier import LowerTier
from pagemill.simulate.roofline import Roofline
from pagemill.simulate.simulator import END_TOKEN, Replay, Served, replay
from pagemill.simulate.step_time import StepModel
from pagemill.simulate.trace import TracedRequest


@dataclass(frozen=True)
class Setup:
    """Holds the engine's settings, as in EngineConfig."""

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

    def scheduler(self, memory: Any, *, caching: bool = True, stored: Stored | None = None) -> Scheduler:
        return Scheduler(
            memory,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            eos_token_ids=frozenset({END_TOKEN}),
            ageing_s=10.0,
            enable_prefix_caching=caching,
            stored=stored,
            target_tpot_s=self.target_tpot_s,
            compacts=self.kv_compaction == "auto" and isinstance(memory, MemoryManager),
        )


def latencies(served: Sequence[Served]) -> dict[str, float]:
    """Medians and 99th percentiles over finished requests, in seconds."""
    finished = [one for one in served if one.finished_s is not None]
    ttft = [one.ttft_s for one in finished]
    tpot = [one.tpot_s for one in finished if one.tpot_s is not None]
    nothing = float("nan")
    return {
        "ttft_median_s": median(ttft) if ttft else nothing,
        "ttft_p99_s": float(np.percentile(ttft, 99)) if ttft else nothing,
        "tpot_median_s": median(tpot) if tpot else nothing,
        "tpot_p99_s": float(np.percentile(tpot, 99)) if tpot else nothing,
    }


@dataclass(frozen=True)
class Settings:
    """Holds what a replica is made of. kv_dtype, max_num_seqs, max_num_batched_tokens, kv_host_memory: as in
    EngineConfig. ranks: as tensor_parallel_size. kv_host_memory: bytes of one rank; 0 for none.
    """

    ranks: int
    kv_dtype: str = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    kv_host_memory: int = 0

    def __str__(self) -> str:
        host = f", {self.kv_host_memory / 2**30:g} GiB host" if self.kv_host_memory else ""
        return (
            f"tensor parallel {self.ranks}, K/V {self.kv_dtype}, {self.max_num_seqs} sequences, "
            f"{self.max_num_batched_tokens} tokens a step{host}"
        )


@dataclass(frozen=True)
class Trial:
    """Holds what became of requests that one replica served at a rate.

    Latencies are of requests that came after the first WARM_UP of the time. rate: that asked for, in requests per
    second. pool: the share of the KV pool that sequences held, the mean over time. busy: share of the time in steps.
    cached: share of the prompts' tokens that were found. refused: requests that could never run.
    """

    rate: float
    requests: int
    ttft_median_s: float
    ttft_p99_s: float
    tpot_median_s: float
    tpot_p99_s: float
    output_tokens_per_s: float
    running: float
    most_running: int
    pool: float
    busy: float
    cached: float
    preemptions: int
    refused: int


WARM_UP = 0.25
"""Of the time in which requests arrive, the share whose requests are not counted: the replica fills up in it."""


def run_trial(roofline: Roofline, settings: Settings, trace: Sequence[TracedRequest], rate: float) -> Trial:
    """Simulates a replica that serves the trace, which comes at this rate."""
    setup = Setup(
        roofline.kv_bytes,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    host, link = settings.kv_host_memory, roofline.device.link_bytes_per_s
    memory = setup.memory(roofline, saves_evicted=host > 0)
    tier = None
    if host > 0 and link is not None:
        block_bytes = roofline.shape.frame_bytes(setup.block_size)
        speed = roofline.device.efficiency["link"] * link
        tier = LowerTier(memory, int(host / block_bytes), block_bytes / speed)
    scheduler = setup.scheduler(memory, stored=None if tier is None else tier.stored)
    held_s = 0.0

    def look(plan: StepPlan, seconds: float) -> None:
        nonlocal held_s
        held_s += seconds * (1 - memory.num_available / memory.num_frames)

    outcome = replay(trace, scheduler, roofline, [look], tier=tier)
    return _trial(outcome, held_s, rate)


def _trial(outcome: Replay, held_s: float, rate: float) -> Trial:
    arrived_s = outcome.served[-1].request.arrival_s
    counted = [one for one in outcome.served if one.request.arrival_s >= WARM_UP * arrived_s]
    prompts = sum(one.request.prompt_len for one in counted) or 1
    return Trial(
        rate=rate,
        requests=len(outcome.served),
        **latencies(counted),
        output_tokens_per_s=outcome.output_tokens_per_s,
        running=outcome.mean_running,
        most_running=outcome.most_running,
        pool=held_s / outcome.busy_s if outcome.busy_s else 0.0,
        busy=outcome.busy_s / outcome.end_s if outcome.end_s else 0.0,
        cached=sum(one.num_cached_tokens for one in counted) / prompts,
        preemptions=outcome.preemptions,
        refused=sum(one.refused for one in outcome.served),
    )
