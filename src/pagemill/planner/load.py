"""The load that a plan is for: requests at any rate, from a generator or a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from statistics import mean, median_low
from typing import Protocol

import numpy as np

from pagemill.errors import ConfigError, TraceError
from pagemill.planner.limits import Limits
from pagemill.planner.replica import ReplicaSettings
from pagemill.planner.workload import Workload
from pagemill.simulate.roofline import Roofline
from pagemill.simulate.step_time import StepWork
from pagemill.simulate.trace import TracedRequest

LEAST_REQUESTS = 50
LIFETIMES = 1.5
"""Requests of a simulation arrive for so many of the longest answers' lives, and of the limits on the first token."""


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
    """Takes a trace's first requests, whose arrivals come closer together or farther apart.

    A trace with too few is repeated; a repeat shares no prompts with the ones before.
    """

    trace: Sequence[TracedRequest]

    def __post_init__(self) -> None:
        if len(self.trace) < LEAST_REQUESTS or self.trace[-1].arrival_s <= 0:
            raise TraceError(
                f"the trace has {len(self.trace)} requests; a plan needs {LEAST_REQUESTS} or more that do not all come "
                "at once; take a longer part of it"
            )

    @property
    def rate(self) -> float:
        """Returns the requests per second in the trace itself."""
        return (len(self.trace) - 1) / self.trace[-1].arrival_s

    def take(self, count: int, rate: float) -> list[TracedRequest]:
        rounds = ceil(count / len(self.trace))
        chosen = [one for number in range(rounds) for one in self._round(number)][:count]
        if chosen[-1].arrival_s <= 0:
            raise TraceError(f"the trace's first {len(chosen)} requests all come at once; raise --requests above that")
        factor = (len(chosen) - 1) / chosen[-1].arrival_s / rate
        return [replace(one, arrival_s=one.arrival_s * factor) for one in chosen]

    def _round(self, number: int) -> Sequence[TracedRequest]:
        """Returns the trace's repeat of this number, 0 for the trace itself."""
        if number == 0:
            return self.trace
        later_s = number * (self.trace[-1].arrival_s + 1 / self.rate)
        later, ids = number * (1 + max(one.number for one in self.trace)), number * self._ids
        return [
            replace(
                one,
                number=one.number + later,
                arrival_s=one.arrival_s + later_s,
                hash_ids=tuple(name + ids for name in one.hash_ids),
                continued_ids=tuple(name + ids for name in one.continued_ids),
            )
            for one in self.trace
        ]

    @cached_property
    def _ids(self) -> int:
        return 1 + max((max((*one.hash_ids, *one.continued_ids), default=-1) for one in self.trace), default=-1)


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

        They are at least `times` times `count`. They come for LIFETIMES times as long as the longest answers take at
        the limit per token, so that as many run at once as would for ever, and as a first token may take, so that
        a queue has time to grow.
        """
        longest = float(np.percentile([one.output_len for one in self._sample], 99))
        lifetime_s = max(longest * limits.tpot_p99_s, limits.ttft_p99_s or 0.0)
        return self.source.take(max(times * self.count, ceil(LIFETIMES * rate * lifetime_s)), rate)

    @property
    def usual(self) -> TracedRequest:
        """Returns the request of median length, which comes at 0 s."""
        middle = median_low(one.length for one in self._sample)
        return replace(next(one for one in self._sample if one.length == middle), arrival_s=0.0)

    @cached_property
    def _sample(self) -> list[TracedRequest]:
        return self.source.take(self.count, self.rate)

    @cached_property
    def tokens_per_request(self) -> tuple[float, float]:
        """Returns the tokens of a request's answers, and of prompt and answers together, in the mean of the first
        `count`."""
        output = mean(one.answer_tokens for one in self._sample)
        return output, output + mean(one.prompt_len for one in self._sample)

    @property
    def shares(self) -> bool:
        """Returns whether prompts begin alike."""
        return any(one.hash_ids for one in self._sample)

    def guess(self, roofline: Roofline, settings: ReplicaSettings) -> float:
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
