"""Finds capacity: the highest rate of requests at which latencies stay within limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.errors import ConfigError

FACTOR = 1.5
BISECTIONS = 3
LOWEST_RATE = 0.1


@dataclass(frozen=True)
class Limits:
    """Holds the limits, in seconds, on p99s over requests. None: no limit.

    tpot_p99_s: of the time per output token. ttft_p99_s: of the time to first token.
    """

    tpot_p99_s: float
    ttft_p99_s: float | None = None

    def __post_init__(self) -> None:
        for flag, limit_s in (("--slo-tpot-p99", self.tpot_p99_s), ("--slo-ttft-p99", self.ttft_p99_s)):
            if limit_s is not None and not 0 < limit_s < math.inf:
                raise ConfigError(f"{flag} is {1000 * limit_s:g}; it must be a number of milliseconds above 0")

    def hold(self, row: Mapping[str, Any]) -> bool:
        """Says whether a row's `tpot_p99_s` and `ttft_p99_s` are within the limits. NaN and None are not."""
        held = [_within(row["tpot_p99_s"], self.tpot_p99_s)]
        if self.ttft_p99_s is not None:
            held.append(_within(row["ttft_p99_s"], self.ttft_p99_s))
        return all(held)

    def __str__(self) -> str:
        text = f"the p99 over requests of the time per output token is at most {1000 * self.tpot_p99_s:g} ms"
        if self.ttft_p99_s is not None:
            text += f", and that of the time to first token at most {1000 * self.ttft_p99_s:g} ms"
        return text


def _within(found_s: float | None, limit_s: float) -> bool:
    return found_s is not None and found_s <= limit_s


def find_capacity(
    holds: Callable[[float], bool], first: float, lowest: float = LOWEST_RATE, most: float = math.inf
) -> float | None:
    """Returns the highest rate tried that holds, None if none from `lowest` on does. None above `most` is tried.

    A higher rate is taken to be harder.

    Rates rise from `first` by `FACTOR` until one breaks, or fall until one holds; then the gap is halved, in ratio,
    `BISECTIONS` times.
    """
    rate = first
    if holds(rate):
        while rate < most and holds(min(most, rate * FACTOR)):
            rate = min(most, rate * FACTOR)
        if rate >= most:
            return rate
    else:
        rate /= FACTOR
        while rate >= lowest and not holds(rate):
            rate /= FACTOR
        if rate < lowest:
            return None
    above = min(most, rate * FACTOR)
    for _ in range(BISECTIONS):
        middle = (rate * above) ** 0.5
        rate, above = (middle, above) if holds(middle) else (rate, middle)
    return rate
