"""Turnover: how often requests of a tenant end, from which a refused one learns when to come again."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from statistics import median

from pagemill.frontend.request_state import RequestState

ENDS = 9
"""The number of a tenant's last ends that are remembered."""
LEAST_S, MOST_S = 1.0, 60.0


class Turnover:
    """Measures the time between ends of a tenant's requests. Where its queue is full, each end gives a place in it."""

    def __init__(self) -> None:
        self._ends: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=ENDS))

    def note(self, request: RequestState) -> None:
        """Takes note of a request that has ended; one that never ran gave no place."""
        if request.metrics.first_scheduled_time is not None:
            self._ends[request.space.tenant].append(time.monotonic())

    def wait_s(self, tenant: str) -> float:
        """Returns the median of the times between a tenant's last ends, 1 to 60 seconds: idle times do not count much
        in it. 1 where fewer than two have ended."""
        ends = self._ends.get(tenant, ())
        between = [later - earlier for earlier, later in zip(ends, [*ends][1:], strict=False)]
        return min(max(median(between), LEAST_S), MOST_S) if between else LEAST_S
