"""Losses: how many replicas have been lost, and whether these are too many for requests to wait for another."""

from __future__ import annotations

from collections import deque

from pagemill.frontend.supervisor import RestartLimits

TOGETHER_S = 1.0
"""Seconds within which what is lost has one cause: the machine of several replicas, or their Ray cluster."""


class Losses:
    """Counts replicas that were lost. Times are in seconds, of one clock.

    count: all of them; of those that are lost together, the limits see one.
    """

    def __init__(self, limits: RestartLimits) -> None:
        self.count = 0
        self._limits = limits
        self._times: deque[float] = deque()
        """Times of the losses within the window of the limits."""

    def note(self, now: float) -> None:
        """Counts a replica that was lost now."""
        self.count += 1
        if not self._times or now - self._times[-1] > TOGETHER_S:
            self._times.append(now)

    def too_many(self, now: float) -> str | None:
        """Returns why requests should wait for no other where none is left; None if they may."""
        window_s = self._limits.engine_restart_window_s
        while self._times and now - self._times[0] > window_s:
            self._times.popleft()
        if len(self._times) <= self._limits.max_engine_restarts:
            return None
        lost = f"replicas were lost {len(self._times)} times in {window_s:g} s"
        return f"no replica is left, and {lost}, more than max_engine_restarts, {self._limits.max_engine_restarts}"
