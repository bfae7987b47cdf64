"""Losses: how many replicas have been lost, and whether these are too many for requests to wait for another."""

from __future__ import annotations

from collections import deque

from pagemill.frontend.supervisor import RestartLimits


class Losses:
    """Counts replicas that were lost. Times are in seconds, of one clock.

    count: all of them.
    """

    def __init__(self, limits: RestartLimits) -> None:
        self.count = 0
        self._limits = limits
        self._times: deque[float] = deque()
        """Times of the losses within the window of the limits."""

    def note(self, now: float) -> None:
        """Counts a replica that was lost now."""
        self.count += 1
        self._times.append(now)

    def too_many(self, now: float) -> str | None:
        """Returns why requests should wait for no other where none is left; None if they may."""
        window_s = self._limits.engine_restart_window_s
        while self._times and now - self._times[0] > window_s:
            self._times.popleft()
        if len(self._times) <= self._limits.max_engine_restarts:
            return None
        return f"no replica is left, and {len(self._times)} were lost in {window_s:g} s (max_engine_restarts)"
