"""Decides how many drafts a step verifies, by what its further tokens are measured to cost and likely to bring.

A step's seconds are taken to be linear in its query tokens, near those of the last steps; line and chances are measured
as it runs. It knows no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

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
FREE_ROWS = 16
"""Before it is measured, a further token is taken to cost what one of a step's does that has so many more."""
ALLOWED_LOSS = 0.01
"""The share of the steps' time that wrong drafts may cost: they are tried again now and then."""
MOST_LOST_STEPS = 2
"""The most steps' worth of time that is remembered as saved, to pay for later losses."""


class BranchShape(NamedTuple):
    """One branch of a sequence's drafts: it leaves the first path `depth` drafts behind the last token, with the choice
    that comes `rank` places behind the likeliest one, and has `length` drafts."""

    depth: int
    rank: int
    length: int


class Candidate:
    """One sequence's drafts: at most `most`, each right by `chance` if those before it were.

    count: how many are verified. branches: the shapes of those beside them.
    """

    __slots__ = ("branches", "chance", "count", "most")

    def __init__(self, chance: float, most: int) -> None:
        self.chance = chance
        self.most = most
        self.count = 0
        self.branches: list[BranchShape] = []


class Line:
    """Fits seconds to a count by a line through the last values, near which it holds.

    each: seconds for one more, at least 0; `slope` at first, which counts the less, the more counts have differed.
    """

    def __init__(self, count: float, seconds: float, slope: float = 0.0) -> None:
        self._count, self._seconds = count, seconds
        self._variance, self._covariance = 1.0, slope
        self.each = slope

    def at(self, count: float) -> float:
        """Returns the seconds of a count."""
        return max(self._seconds + self.each * (count - self._count), self._seconds / OUTLIER)

    def note(self, count: float, seconds: float, fading: float = FADING) -> None:
        """Takes in what a count took."""
        seconds = min(seconds, OUTLIER * self.at(count))
        more, longer = count - self._count, seconds - self._seconds
        self._count += fading * more
        self._seconds += fading * longer
        self._variance = (1 - fading) * (self._variance + fading * more * more)
        self._covariance = (1 - fading) * (self._covariance + fading * more * longer)
        self._settle()

    def doubt(self) -> None:
        """Takes a little off the slope."""
        self._covariance *= 1 - DOUBT
        self._settle()

    def _settle(self) -> None:
        if self._variance > 1e-6:
            self.each = max(0.0, self._covariance / self._variance)


class DraftControl:
    """Fits a step's seconds to its query tokens, in steps in which all sequences generated."""

    def __init__(self) -> None:
        self._steps = 0
        self._balance = 0.0
        self._line = Line(0.0, 0.0)
        self._reach = FIRST_DRAFTS

    def note_step(self, tokens: int, drafts: int, seconds: float, accepted: int) -> None:
        """Notes how long a step took that had so many query tokens, drafts among them, and none of a prompt; and how
        many of the drafts were right."""
        self._steps += 1
        if self._steps <= PLAIN_STEPS:  # the first pays for pages and caches
            self._line = Line(tokens, seconds, seconds / (tokens + FREE_ROWS))
            self._balance = seconds
            return
        if drafts:
            self._reach = max(self._reach, 2 * drafts)
        self._settle(tokens - drafts, accepted, drafts * self._line.each)
        self._line.note(tokens, seconds)
        if not drafts:
            self._line.doubt()

    def _settle(self, rows: int, accepted: int, cost: float) -> None:
        """Sets what accepted drafts have saved in a step of so many rows against what all cost, in seconds."""
        step = self._line.at(rows)
        saved = accepted * step / max(1, rows)
        self._balance = min(self._balance + ALLOWED_LOSS * step + saved - cost, MOST_LOST_STEPS * step)

    def pays(self, chance: float, rows: int) -> bool:
        """Returns whether the first draft of a step of so many generating rows pays if it is right by `chance`.

        Never while all drafts so far have cost more than may be lost.
        """
        if self._steps < PLAIN_STEPS or self._balance < 0:
            return False
        return chance * self._line.at(rows) > MARGIN * self._line.each * rows

    def choose(self, candidates: Sequence[Candidate], rows: int, most: int, limit_s: float = math.inf) -> None:
        """Sets how many drafts of each candidate a step of so many generating rows verifies, at most `most` in all.

        To be called where a draft that is sure to be right pays. The likeliest come first, as long as they raise the
        tokens per second, and the step takes at most `limit_s`.
        """
        left, tokens, seconds = min(most, self._reach), float(rows), self._line.at(rows)
        heap = [(-one.chance, index) for index, one in enumerate(candidates) if one.most]
        heapify(heap)
        while heap and left and seconds + self._line.each <= limit_s:
            negated, index = heap[0]
            if -negated * seconds <= MARGIN * self._line.each * tokens:
                return
            candidate = candidates[index]
            candidate.count += 1
            left -= 1
            tokens -= negated
            seconds += self._line.each
            follows = negated * candidate.chance if candidate.count < candidate.most else 0.0
            heapreplace(heap, (follows, index))
