"""The load that a plan is for: requests at any rate, from a generator or a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean
from typing import Protocol

from pagemill.errors import ConfigError, TraceError
from pagemill.planner.limits import Limits
from pagemill.planner.replica import Settings
from pagemill.planner.workload import Workload
from pagemill.simulate.roofline import Roofline
from pagemill.simulate.step_time import StepWork
from pagemill.simulate.trace import TracedRequest

LEAST_REQUESTS = 50
LIFETIMES = 3
MOST_TIMES = 3


class Source(Protocol):
    """Gives requests at any rate."""

    def take(self, count: int, rate: float) -> list[TracedRequest]:
        """Returns about so many requests, on average `rate` a second."""


@dataclass(frozen=True)
class Generated:
    """Draws a workload's requests by a seed."""

    workload: Workload
    seed: int

    def take(self, count: int, rate: float) -> list[TracedRequest]:
        return self.workload.requests(rate, count / rate, self.seed)


@dataclass(frozen=True)
class Traced:
    """Takes a trace's first requests, whose arrivals come closer together or farther apart."""

    trace: Sequence[TracedRequest]

    def __post_init__(self) -> None:
        if len(self.trace) < LEAST_REQUESTS or self.trace[-1].arrival_s <= 0:
            raise TraceError(
                f"the trace has {len(self.trace)} requests; a plan needs {LEAST_REQUESTS} or more that do not all come "
                "at once; take a longer part of it"
            )

    @property
    def rate(self) -> float:
        """Requests per second in the trace itself."""
        return (len(self.trace) - 1) / self.trace[-1].arrival_s

    def take(self, count: int, rate: float) -> list[TracedRequest]:
        chosen = self.trace[:count]
        factor = (len(chosen) - 1) / chosen[-1].arrival_s / rate if chosen[-1].arrival_s else 1.0
        return [replace(one, arrival_s=one.arrival_s * factor) for one in chosen]


@dataclass(frozen=True)
class Load:
    """Holds requests per second of the whole fleet, and how many one simulation takes, unless it is asked for more.

    Raises ConfigError for numbers that are too small.
    """

    source: Source
    rate: float
    count: int

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate is {self.rate:g}; it must be a number of requests per second above 0")
        if self.count < LEAST_REQUESTS:
            raise ConfigError(f"requests is {self.count}; a p99 needs {LEAST_REQUESTS} or more")

    def requests(self, rate: float, limits: Limits, times: int = 1) -> list[TracedRequest]:
        """Returns the requests of a simulation at this rate.

        They come for LIFETIMES times as long as one takes at half of the limit per token, so that as many run at once
        as would for ever, but they are no more than MOST_TIMES times `count`.
        """
        lifetime_s = self.tokens_per_request[0] * limits.tpot_p99_s / 2
        enough = min(MOST_TIMES * self.count, max(self.count, int(LIFETIMES * rate * lifetime_s)))
        return self.source.take(times * enough, rate)

    @cached_property
    def _sample(self) -> list[TracedRequest]:
        return self.source.take(self.count, self.rate)

    @cached_property
    def tokens_per_request(self) -> tuple[float, float]:
        """Tokens of an answer, and of prompt and answer together, in the mean."""
        return mean(one.output_len for one in self._sample), mean(one.length for one in self._sample)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(one.length for one in self._sample)

    @property
    def shares(self) -> bool:
        """True if prompts begin alike."""
        return any(one.hash_ids for one in self._sample)

    def guess(self, roofline: Roofline, settings: Settings) -> float:
        """Returns requests per second that full batches would serve: all steps generate, and compute prompts too."""
        output, everything = self.tokens_per_request
        prompt = everything - output
        held = roofline.kv_bytes / (roofline.shape.slot_bytes * len(roofline.shape.groups.groups))
        rows = max(1, int(min(settings.max_num_seqs, held / (prompt + output / 2))))
        layers = roofline.model.layers
        keys = int(rows * layers * (prompt + output / 2))
        beside = int(rows * prompt / output)
        pairs = keys + int(layers * beside * prompt / 2)
        seconds = roofline.seconds(StepWork(rows, rows + beside, rows, pairs, keys))
        return rows / output / seconds
