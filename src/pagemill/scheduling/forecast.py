"""Forecast: how many blocks running sequences will hold, so that those that begin do not have to be preempted.

How long an answer becomes is taken from the lengths of those that have ended: the chance that one that has so many
tokens gets more than so many further ones, up to its own limit. At any later step the blocks held are then a sum of
independent terms with known means and variances. That the peak of the future decides, not the present, is from Gong et
al., "Past-future scheduler for LLM serving under SLA guarantees", 2025; chances in place of one sampled length each
let sequences that end at different times share the same room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KEPT = 512
"""Answers of which the length is remembered, of each tenant and of all."""
ENOUGH = 32
"""A tenant's own answers count once so many have ended; until then, those of all tenants."""
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

_APART = 1 << 32
"""More than an answer has tokens."""

Floats = NDArray[np.float64]


class Curve(NamedTuple):
    """Describes how answers end.

    lengths: in ascending order, [answers]. raised: by how much those that were cut before raise the number of the
    longer ones, [answers + 1]. mean: how many tokens an answer has in the mean that nothing cuts.
    """

    lengths: Floats
    raised: Floats
    mean: float


class AnswerLengths:
    """Remembers the lengths of the last answers, and how many of them a limit of their own cut short.

    One that was cut says that it would have become longer, and nothing of how much: it counts as those that became
    longer did. That is the estimate of Kaplan and Meier, over what is assumed before answers have ended (Susarla and
    Van Ryzin, "Nonparametric Bayesian estimation of survival curves from incomplete observations", 1976).
    """

    def __init__(self) -> None:
        self.count = 0
        """Answers that have ended."""
        self._last = np.zeros(KEPT, dtype=np.int64)
        """Holds for each answer twice the tokens that it has at least, and 1 more if it has just so many."""
        self._curve: Curve | None = None

    def note(self, num_tokens: int, cut: bool) -> None:
        """Notes that an answer has ended with so many tokens. cut: whether it would have become longer."""
        self._last[self.count % KEPT] = 2 * (num_tokens + 1) if cut else 2 * num_tokens + 1
        self.count += 1
        self._curve = None

    @property
    def curve(self) -> Curve:
        if self._curve is None:
            ended = np.sort(self._last[: min(self.count, KEPT)])  # of equal ones, those first that were cut
            lengths = (ended // 2).astype(np.float64)
            longer = np.arange(len(ended))[::-1]
            cut, after = 1 - ended % 2, _assumed(lengths) + longer
            raised = np.cumprod(np.append(1.0, (after + cut) / after))
            ends = np.append(0.0, lengths)
            tails = PRIOR_WEIGHT * PRIOR_TOKENS * (1 + ends / (2 * PRIOR_TOKENS)) ** -2
            between = np.append((longer + 1) * np.diff(ends), 0.0) + tails - np.append(tails[1:], 0.0)
            self._curve = Curve(lengths, raised, float(raised @ between) / (len(lengths) + PRIOR_WEIGHT))
        return self._curve


class TenantLengths:
    """The lengths of each tenant's answers; those of all for one of which too few have ended."""

    def __init__(self) -> None:
        self._all = AnswerLengths()
        self._own: dict[str, AnswerLengths] = {}

    def note(self, tenant: str, num_tokens: int, cut: bool) -> None:
        """Notes that an answer has ended, as `AnswerLengths.note` does."""
        for lengths in (self._all, self._own.setdefault(tenant, AnswerLengths())):
            lengths.note(num_tokens, cut)

    def of(self, tenant: str) -> AnswerLengths:
        own = self._own.get(tenant, self._all)
        return own if own.count >= ENOUGH else self._all


class Chances:
    """The chances that answers become longer. Each is like those of one of several `AnswerLengths`, named by its place
    among them."""

    def __init__(self, kinds: AbstractSequence[AnswerLengths]) -> None:
        curves = [kind.curve for kind in kinds]
        self.means = np.array([curve.mean for curve in curves])
        self._ends = np.cumsum([len(curve.lengths) for curve in curves])
        # One array for all, searched at once: beyond the lengths of one lie those of the next.
        self._lengths = np.concatenate([curve.lengths + place * _APART for place, curve in enumerate(curves)])
        self._raised = np.concatenate([curve.raised for curve in curves])

    def survival(self, kind: NDArray[np.int64], has: Floats, more: Floats) -> Floats:
        """Returns the chance that an answer that has `has` tokens gets at least `more` further ones.

        The three are broadcast against each other.
        """
        return self._longer(kind, has + more) / self._longer(kind, has)

    def _longer(self, kind: NDArray[np.int64], tokens: Floats) -> Floats:
        """Returns how many answers have at least so many tokens, of those known and assumed."""
        shorter = np.searchsorted(self._lengths, tokens + kind * _APART, side="left")
        longer: Floats = (self._ends[kind] - shorter + _assumed(tokens)) * self._raised[shorter + kind]
        return longer


def _assumed(tokens: Floats) -> Floats:
    """Returns how many of the assumed answers have at least so many tokens."""
    return PRIOR_WEIGHT * (1 + tokens / (2 * PRIOR_TOKENS)) ** -3


class Growing(NamedTuple):
    """A sequence that holds blocks and takes more.

    held:    blocks that come free with it. entries: of its table.
    coming:  blocks that it takes at once.
    length:  its tokens. has: those of its answer.
    most:    the most tokens that it gets from now on. sure: whether it gets exactly so many.
    kind:    whose answers its own is like, as in `Chances`.
    """

    held: int
    entries: int
    coming: int
    length: int
    has: int
    most: int
    sure: bool
    kind: int


class Forecast:
    """Foresees the blocks that running sequences hold while they go on, and others that begin now.

    running: [fields of `Growing`, sequences]. available: blocks that nobody holds now. windows: by layer group, as in
    `MemoryManager`.
    """

    def __init__(
        self,
        chances: Chances,
        running: Floats,
        available: int,
        block_size: int,
        windows: AbstractSequence[int | None],
    ) -> None:
        self._chances = chances
        self._running = running
        self._room = available + int(running[0].sum())
        self._block_size, self._windows = block_size, windows

    def fits(self, new: AbstractSequence[Growing]) -> bool:
        """Returns whether sequences that begin now will find the blocks that they and the running ones need."""
        everyone = np.concatenate((self._running, np.array(new, dtype=np.float64).T), axis=1)[:, :, None]
        held, entries, coming, length, has, most, sure, kind = everyone
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
            kind = kind.astype(np.int64)
            chance = np.where(sure > 0, 1.0, self._chances.survival(kind, has, horizons)) * within
            mean, variance = (chance * blocks).sum(axis=0), (chance * (1 - chance) * blocks**2).sum(axis=0)
            most_held = mean + DEVIATIONS * np.sqrt(variance)
            expected = np.where(sure > 0, full, np.minimum(full, self._chances.means[kind]))
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
