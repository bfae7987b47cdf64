"""Decides where drafts branch: beside the likeliest tokens, which others are worth a row of their own.

Where the likeliest token is wrong, the next likeliest is right by a chance that is measured, the one behind that by the
same chance of what is left, and so on. A branch computes the tokens before it once more, the last known one among them,
since it is a row of its own (`branches`): it pays where a step hardly takes longer for a few tokens more. What these
cost, and what branches have brought and cost in all, is measured apart from other drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from pagemill.scheduling.draft_control import FIRST_DRAFTS, MOST_LOST_STEPS, BranchShape, Candidate

FIRST_CHANCE = 0.35
"""The chance that the next likeliest token is right where all likelier ones are wrong, as long as nothing is known."""
LEARN = 0.03
"""The weight of one such token in that chance, beside all before it."""
FORGET = 0.0005
"""The weight of `FIRST_CHANCE` in that chance after a step whose drafts did not branch: so there is another try."""
DEAREST = 4.0
"""The most times what another draft's token costs that one of a branch is taken to cost."""
DEAR_LEARN = 1 / 16
"""The weight of the last step's branches in that, beside all before them."""
DEAR_FORGET = 1 / 256
"""The weight of the usual cost in that after a step without branches: so a wrong one does not stay."""
MARGIN = 1.3
"""A branch must be worth so many times what it costs: both are known worse than those of other drafts."""
ALLOWED_LOSS = 0.005
"""The share of the steps' time that branches may cost."""

Weighed = tuple[float, int, BranchShape, float]
"""Describes a branch: how many tokens it brings for each that it computes, negated; its candidate's place; its shape;
and how many tokens it brings."""


class BranchControl:
    """Adds branches to drafts that have been chosen. most: of one sequence in one step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._chance = FIRST_CHANCE
        self._balance = 0.0
        self._dear = 1.0
        self._most_tokens = FIRST_DRAFTS

    def note(self, others: int, right: bool) -> None:
        """Notes how many other tokens were tried where the likeliest was wrong, and whether the last was right."""
        for number in range(1, others + 1):
            self._chance += LEARN * ((right and number == others) - self._chance)

    def note_cost(self, tokens: int, longer_s: float, usual_s: float) -> None:
        """Notes by how much a step took longer for so many tokens of branches, where one of another draft costs
        `usual_s`."""
        if not tokens:
            self._dear += DEAR_FORGET * (1.0 - self._dear)
        elif usual_s:
            measured = longer_s / (tokens * usual_s)
            self._dear += DEAR_LEARN * (min(max(measured, 1 / DEAREST), DEAREST) - self._dear)
        self._most_tokens = max(self._most_tokens, 2 * tokens)

    def each_s(self, usual_s: float) -> float:
        """Returns what one of their tokens costs, where one of another draft costs `usual_s`."""
        return self._dear * usual_s

    def settle(self, saved_s: float, spent_s: float, step_s: float) -> None:
        """Sets what branches have saved in a step, which takes `step_s` without drafts, against what they have cost."""
        change = ALLOWED_LOSS * step_s + saved_s - spent_s
        self._balance = min(self._balance + change, MOST_LOST_STEPS * step_s)

    def note_none(self) -> None:
        """Notes a step whose drafts did not branch."""
        self._chance += FORGET * (FIRST_CHANCE - self._chance)

    def choose(
        self,
        candidates: Sequence[Candidate],
        tokens: float,
        seconds: float,
        left: int,
        limit_s: float,
        each_s: float,
        most: float = math.inf,
    ) -> None:
        """Sets the branches of each candidate that has drafts, those that are worth most first.

        tokens, seconds: what the step brings and takes without them. left: the most further tokens that it may compute.
        limit_s: the longest that it may take. each_s: what one more token of a branch takes. most: of all candidates.
        """
        if not self._most or self._balance < 0:
            return
        left = min(left, self._most_tokens)
        heap: list[Weighed] = []
        for place, one in enumerate(candidates):
            self._add(heap, one, place, 0, 1, each_s * tokens / seconds)
        while heap and most >= 1:
            most -= 1
            _, place, shape, gain = heap[0]
            one, cost = candidates[place], (1 + shape.length) * each_s
            if gain * seconds <= MARGIN * cost * tokens or shape.length >= left or seconds + cost > limit_s:
                return
            heappop(heap)
            one.branches.append(shape)
            tokens, seconds, left = tokens + gain, seconds + cost, left - 1 - shape.length
            if len(one.branches) == self._most:
                heap = [weighed for weighed in heap if weighed[1] != place]
                heapify(heap)
                continue
            self._add(heap, one, place, shape.depth, shape.rank + 1, each_s * tokens / seconds)
            if shape.rank == 1:
                self._add(heap, one, place, shape.depth + 1, 1, each_s * tokens / seconds)

    def _add(self, heap: list[Weighed], one: Candidate, place: int, depth: int, rank: int, each: float) -> None:
        """Adds the branch of this kind that is worth most, if there is room for one. each: of a step's tokens, what one
        token more costs."""
        if depth >= one.count:
            return
        chance = one.chance**depth * (1 - one.chance) * self._chance * (1 - self._chance) ** (rank - 1)
        gain, follows, length = chance, chance * one.chance, depth + 1
        while length < one.count and follows > MARGIN * each:
            gain, follows, length = gain + follows, follows * one.chance, length + 1
        heappush(heap, (-gain / (1 + length), place, BranchShape(depth, rank, length), gain))
