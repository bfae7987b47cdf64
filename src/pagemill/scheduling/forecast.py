"""Forecast: how many blocks running sequences will hold, so that those that begin do not have to be preempted.

How long an answer becomes is taken from the lengths of those that have ended: the chance that one that has so many
tokens gets more than so many further ones, up to its own limit. At any later step the blocks held are then a sum of
independent terms with known means and variances. That the peak of the future decides, not the present, is from Gong et
al., "Past-future scheduler for LLM serving under SLA guarantees", 2025; chances in place of one sampled length each
let sequences that end at different times share the same room.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KEPT = 512
"""Answers of which the length is remembered."""
PRIOR_WEIGHT = 4
"""The number of answers that the first assumption counts as, once answers have ended."""
PRIOR_TOKENS = 256
"""The mean length that is assumed, with a tail of power 3: what is long is expected to become longer."""
DEVIATIONS = 1.0
"""Room is kept for the mean of what will be held and so many standard deviations."""
AT_ONCE = 0.7
"""The share of the room that may be promised however far ahead. The rest may only be promised for a time: less of it
the further ahead, and none as far ahead as an answer is long. Those that begin at once end at once, and would leave the
pool half empty until then."""
MOST_HELD = (1 + math.sqrt(1 + DEVIATIONS**2)) / 2
"""The most of c + DEVIATIONS * sqrt(c * (1 - c)): as much of its blocks a sequence counts as, whatever the chance c."""
HORIZONS = 48
"""The most later steps that are looked at."""

Floats = NDArray[np.float64]


class AnswerLengths:
    """Remembers how the last answers ended: at how many tokens by themselves, and how many at a limit of their own."""

    def __init__(self) -> None:
        self._last: deque[int | None] = deque()
        """How many tokens each had, None for one that reached its limit."""
        self._sorted: list[int] = []

    def note(self, num_tokens: int, at_limit: bool) -> None:
        """Notes that an answer has ended with so many tokens."""
        if len(self._last) == KEPT and (oldest := self._last.popleft()) is not None:
            self._sorted.remove(oldest)
        self._last.append(None if at_limit else num_tokens)
        if not at_limit:
            insort(self._sorted, num_tokens)

    @property
    def mean(self) -> float:
        """Returns how many tokens an answer has in the mean that ends by itself."""
        return (sum(self._sorted) + PRIOR_WEIGHT * PRIOR_TOKENS) / (len(self._sorted) + PRIOR_WEIGHT)

    @property
    def reach_limit(self) -> float:
        """Returns the share of the answers that reach a limit that their request sets."""
        return (len(self._last) - len(self._sorted) + 0.5) / (len(self._last) + 1)

    def survival(self, has: Floats, more: Floats, limited: Floats) -> Floats:
        """Returns the chance that an answer that has `has` tokens gets at least `more` further ones within its limit.

        limited: 1 where the request sets the limit, else 0. The three are broadcast against each other.
        """
        known, now, later = np.array(self._sorted, dtype=np.float64), has, has + more
        reach = limited * self.reach_limit
        return (reach + (1 - reach) * _longer(known, later)) / (reach + (1 - reach) * _longer(known, now))


def _longer(known: Floats, tokens: Floats) -> Floats:
    """Returns the share of the known answers, sorted, and the assumed ones that have at least so many tokens."""
    assumed = PRIOR_WEIGHT * (1 + tokens / (2 * PRIOR_TOKENS)) ** -3
    return (len(known) - np.searchsorted(known, tokens, side="left") + assumed) / (len(known) + PRIOR_WEIGHT)


class Growing(NamedTuple):
    """A sequence that holds blocks and takes more.

    held:    blocks that come free with it. entries: of its table.
    coming:  blocks that it takes at once.
    length:  its tokens. has: those of its answer.
    most:    the most tokens that it gets from now on. sure: whether it gets exactly so many. limited: whether its
             request sets this limit.
    """

    held: int
    entries: int
    coming: int
    length: int
    has: int
    most: int
    sure: bool
    limited: bool


class Forecast:
    """Foresees the blocks that running sequences hold while they go on, and others that begin now.

    running: [fields of `Growing`, sequences]. available: blocks that nobody holds now. windows: by layer group, as in
    `MemoryManager`.
    """

    def __init__(
        self,
        lengths: AnswerLengths,
        running: Floats,
        available: int,
        block_size: int,
        windows: AbstractSequence[int | None],
    ) -> None:
        self._lengths = lengths
        self._running = running
        self._room = available + int(running[0].sum())
        self._block_size, self._windows = block_size, windows

    def fits(self, new: AbstractSequence[Growing]) -> bool:
        """Returns whether sequences that begin now will find the blocks that they and the running ones need."""
        everyone = np.concatenate((self._running, np.array(new, dtype=np.float64).T), axis=1)[:, :, None]
        held, entries, coming, length, has, most, sure, limited = everyone
        horizons = _horizons(most.ravel())
        needed = np.ceil((length + horizons - 1) / self._block_size)
        blocks = held + coming
        for window in self._windows:
            cap = np.inf if window is None else -(-window // self._block_size) + 1
            blocks = blocks + np.maximum(0.0, np.minimum(needed, cap) - np.minimum(entries, cap))
        within, full = horizons <= most, has + most
        if sure.all():  # no chance is left, and the same comes out
            most_held, expected = (within * blocks).sum(axis=0), full
        else:
            chance = np.where(sure > 0, 1.0, self._lengths.survival(has, horizons, limited)) * within
            mean, variance = (chance * blocks).sum(axis=0), (chance * (1 - chance) * blocks**2).sum(axis=0)
            most_held = mean + DEVIATIONS * np.sqrt(variance)
            reach = np.where(sure > 0, 1.0, limited * self._lengths.reach_limit)
            expected = reach * full + (1 - reach) * np.minimum(full, self._lengths.mean)
        staggered = np.maximum(0.0, 1 - horizons / expected.mean())
        room = self._room * (AT_ONCE + (1 - AT_ONCE) * staggered)
        return bool((most_held <= room).all())


def surely_fits(blocks: int, room: int, all_sure: bool) -> bool:
    """Returns whether a forecast would say that sequences fit, whatever it knows of lengths.

    blocks: those that all of them would hold at most, together. room: those that nobody holds now, or that come free
    with one of them; fewer will do. all_sure: whether all get exactly as many tokens as they may.
    """
    return (1.0 if all_sure else MOST_HELD) * blocks <= AT_ONCE * room


def _horizons(most: Floats) -> Floats:
    """Returns later steps, in tokens from now: when sequences reach their limits, and some on the way."""
    ends = np.unique(most)
    if len(ends) > HORIZONS // 2:
        ends = ends[np.linspace(0, len(ends) - 1, HORIZONS // 2).astype(np.int64)]
    return np.union1d(ends, np.geomspace(1.0, max(2.0, float(ends[-1])), HORIZONS // 2))
