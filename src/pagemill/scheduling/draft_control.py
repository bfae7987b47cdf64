"""Decides how many drafts a step verifies, by what its further tokens are measured to cost and likely to bring.

A step's seconds are taken to be linear in its query tokens, near those of the last steps; line and chances are measured
as it runs. It knows no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace

FADING = 1 / 64
"""What the last step counts in the line, beside all before it."""
DOUBT = 1 / 512
"""What is taken off the cost of a further token by a step without drafts, so that a wrong one does not stay."""
OUTLIER = 2.0
"""A step counts as at most so many times what was expected."""
PLAIN_STEPS = 2
"""So many steps without drafts come first."""
FIRST_DRAFTS = 4
"""The most drafts of the first step that has any. Each step may have twice as many as any before it."""
MARGIN = 1.1
"""A draft must be worth so many times what it costs."""


class Candidate:
    """One sequence's drafts: at most `most`, each right by `chance` if those before it were.

    count: how many are verified.
    """

    __slots__ = ("chance", "count", "most")

    def __init__(self, chance: float, most: int) -> None:
        self.chance = chance
        self.most = most
        self.count = 0


class DraftControl:
    """Fits a step's seconds to its query tokens: a line through the last steps in which all sequences generated."""

    def __init__(self) -> None:
        self._steps = 0
        self._tokens = self._seconds = self._variance = self._covariance = 0.0
        self._each = 0.0
        """Seconds of one more token."""
        self._reach = FIRST_DRAFTS

    def note_step(self, tokens: int, drafts: int, seconds: float) -> None:
        """Notes how long a step took that had so many query tokens, drafts among them, and none of a prompt."""
        self._steps += 1
        if self._steps <= PLAIN_STEPS:  # the first pays for pages and caches
            self._tokens, self._seconds = tokens, seconds
            return
        if drafts:
            self._reach = max(self._reach, 2 * drafts)
        seconds = min(seconds, OUTLIER * self._expected(tokens))
        more, longer = tokens - self._tokens, seconds - self._seconds
        self._tokens += FADING * more
        self._seconds += FADING * longer
        self._variance = (1 - FADING) * (self._variance + FADING * more * more)
        self._covariance = (1 - FADING) * (self._covariance + FADING * more * longer)
        if not drafts:
            self._covariance *= 1 - DOUBT
        if self._variance > 1e-6:
            self._each = max(0.0, self._covariance / self._variance)

    def pays(self, chance: float, rows: int) -> bool:
        """Returns whether the first draft of a step of so many generating rows pays if it is right by `chance`."""
        return self._steps >= PLAIN_STEPS and chance * self._expected(rows) > MARGIN * self._each * rows

    def choose(self, candidates: Sequence[Candidate], rows: int, most: int, limit_s: float = math.inf) -> None:
        """Sets how many drafts of each candidate a step of so many generating rows verifies, at most `most` in all.

        To be called where a draft that is sure to be right pays. The likeliest come first, as long as they raise the
        tokens per second, and the step takes at most `limit_s`.
        """
        left, tokens, seconds = min(most, self._reach), float(rows), self._expected(rows)
        heap = [(-one.chance, index) for index, one in enumerate(candidates) if one.most]
        heapify(heap)
        while heap and left and seconds + self._each <= limit_s:
            negated, index = heap[0]
            if -negated * seconds <= MARGIN * self._each * tokens:
                return
            candidate = candidates[index]
            candidate.count += 1
            left -= 1
            tokens -= negated
            seconds += self._each
            follows = negated * candidate.chance if candidate.count < candidate.most else 0.0
            heapreplace(heap, (follows, index))

    def _expected(self, tokens: int) -> float:
        """Returns the seconds of a step with so many query tokens."""
        return max(self._seconds + self._each * (tokens - self._tokens), self._seconds / OUTLIER)
