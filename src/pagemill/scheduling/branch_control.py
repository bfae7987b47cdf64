"""Decides where drafts branch: beside the likeliest tokens, which others are worth a row of their own.

Where the likeliest token is wrong, the next likeliest is right by a chance that is measured, the one behind that by the
same chance of what is left, and so on. A branch computes the tokens before it once more, the last known one among them,
since it is a row of its own (`branches`): it pays where a step hardly takes longer for a few tokens more. What these
cost, and what branches have brought and cost in all, is measured apart from other drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from pagemill.scheduling.draft_control import FIRST_DRAFTS, MOST_LOST_STEPS, Candidate, Fork

FIRST_TURN = 0.35
"""The chance that the next likeliest token is right where all likelier ones are wrong, as long as nothing is known."""
LEARN = 0.03
"""The weight of one such token in that chance, beside all before it."""
FORGET = 0.0005
"""What each step with drafts and without branches counts, after which there is another try."""
DEAREST = 4.0
"""The most times what another draft's token costs that one of a branch is taken to cost."""
DEAR_LEARN = 1 / 16
"""The weight of the last step's branches in that, beside all before them."""
DEAR_FORGET = 1 / 256
"""What each step without branches counts in that, so that a wrong one does not stay."""
MARGIN = 1.3
"""A branch must be worth so many times what it costs: both are known worse than those of other drafts."""
ALLOWED_LOSS = 0.005
"""The share of the steps' time that branches may cost."""

Weighed = tuple[float, int, Fork, float]
"""What each token that a branch costs is worth, negated; its candidate's place; itself; how many tokens it brings."""


class BranchControl:
    """Adds branches to drafts that have been chosen. most: of one sequence in one step.

    gained, computed: tokens that branches of steps that are not settled have brought, and computed.
    """

    def __init__(self, most: int) -> None:
        self.gained = self.computed = 0
        self._most = most
        self._turn = FIRST_TURN
        self._balance = 0.0
        self._dear = 1.0
        self._reach = FIRST_DRAFTS

    def note(self, others: int, gained: int, computed: int) -> None:
        """Notes how many other tokens were tried where the likeliest was wrong, how many tokens the last of them has
        brought if it was right, and how many the branches have computed."""
        for number in range(1, others + 1):
            self._turn += LEARN * ((gained > 0 and number == others) - self._turn)
        self.gained += gained
        self.computed += computed

    def each_s(self, usual_s: float) -> float:
        """Returns what one of their tokens costs, where one of another draft costs `usual_s`."""
        return self._dear * usual_s

    def settle(self, longer_s: float, usual_s: float, step_s: float, rows: int) -> None:
        """Sets what branches have brought in a step against what they have cost.

        longer_s: by how much the step took longer than without them. usual_s: what a token of other drafts costs.
        step_s: what the step takes without any. rows: how many generate in it.
        """
        if not self.computed:
            self._dear += DEAR_FORGET * (1.0 - self._dear)
        elif usual_s:
            measured = longer_s / (self.computed * usual_s)
            self._dear += DEAR_LEARN * (min(max(measured, 1 / DEAREST), DEAREST) - self._dear)
        self._reach = max(self._reach, 2 * self.computed)
        saved_s = self.gained * step_s / rows - self.computed * self.each_s(usual_s)
        self._balance = min(self._balance + ALLOWED_LOSS * step_s + saved_s, MOST_LOST_STEPS * step_s)
        self.gained = self.computed = 0

    def note_none(self) -> None:
        """Notes a step whose drafts did not branch."""
        self._turn += FORGET * (FIRST_TURN - self._turn)

    def choose(
        self, candidates: Sequence[Candidate], tokens: float, seconds: float, left: int, limit_s: float, each_s: float
    ) -> None:
        """Sets the branches of each candidate that has drafts, those that are worth most first.

        tokens, seconds: what the step brings and takes without them. left: the most further tokens that it may compute.
        limit_s: the longest that it may take. each_s: what one more token of a branch takes.
        """
        if not self._most or self._balance < 0:
            return
        left = min(left, self._reach)
        heap: list[Weighed] = []
        for place, one in enumerate(candidates):
            self._add(heap, one, place, 0, 1, each_s * tokens / seconds)
        while heap:
            _, place, fork, gain = heap[0]
            one, cost = candidates[place], (1 + fork.length) * each_s
            if gain * seconds <= MARGIN * cost * tokens or fork.length >= left or seconds + cost > limit_s:
                return
            heappop(heap)
            one.forks.append(fork)
            tokens, seconds, left = tokens + gain, seconds + cost, left - 1 - fork.length
            if len(one.forks) == self._most:
                heap = [weighed for weighed in heap if weighed[1] != place]
                heapify(heap)
                continue
            self._add(heap, one, place, fork.depth, fork.rank + 1, each_s * tokens / seconds)
            if fork.rank == 1:
                self._add(heap, one, place, fork.depth + 1, 1, each_s * tokens / seconds)

    def _add(self, heap: list[Weighed], one: Candidate, place: int, depth: int, rank: int, each: float) -> None:
        """Adds the branch of this kind that is worth most, if there is room for one. each: of a step's tokens, what one
        token more costs."""
        if depth >= one.count:
            return
        chance = one.chance**depth * (1 - one.chance) * self._turn * (1 - self._turn) ** (rank - 1)
        gain, follows, length = chance, chance * one.chance, depth + 1
        while length < one.count and follows > MARGIN * each:
            gain, follows, length = gain + follows, follows * one.chance, length + 1
        heappush(heap, (-gain / (1 + length), place, Fork(depth, rank, length), gain))
