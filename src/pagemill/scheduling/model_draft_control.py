"""Decides how many drafts a step verifies where a model or heads draft them, which takes time as well."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagemill.scheduling.branch_control import BranchControl
from pagemill.scheduling.draft_control import MARGIN, PLAIN_STEPS, Candidate, DraftControl, Line
from pagemill.scheduling.step_plan import DraftWork

PASS_FADING = 1 / 16
"""The weight of a draft model's last passes in their mean time, beside all before them."""
CATCH_UP_FADING = 1 / 4
"""The weight of the tokens that a draft model took in last, in their mean time, beside all before them."""


class ModelDraftControl(DraftControl):
    """Counts what a draft model takes as well: a pass for each further draft, over the rows that have it.

    cost: of one of its tokens, as a multiple of the model's; what it takes is judged by that until it is measured.
    branches: decides where drafts branch, into at most `most_branches` further paths of a sequence in a step.
    """

    def __init__(self, cost: float, most_branches: int = 0) -> None:
        super().__init__()
        self._cost = cost
        self.branches = BranchControl(most_branches)
        self._passes: Line | None = None
        self._caught_up_s: float | None = None
        self._branched = self._gained = 0

    def note_work(self, work: DraftWork) -> None:
        """Notes what the draft model did in a step, of which `note_step` tells next."""
        self._branched, self._gained = work.branched, work.gained
        self._balance -= max(0.0, work.seconds - work.branched * self._drafting_s())
        if work.passes:
            rows, seconds = work.rows / work.passes, work.seconds / work.passes
            self._passes = self._passes or Line(rows, seconds, self._cost * self._line.each)
            self._passes.note(rows, seconds, PASS_FADING)
        if work.caught_up:
            seconds = work.catch_up_s / work.caught_up
            before = seconds if self._caught_up_s is None else self._caught_up_s
            self._caught_up_s = before + CATCH_UP_FADING * (seconds - before)

    def note_step(self, tokens: int, drafts: int, seconds: float, accepted: int) -> None:
        branches, rows, computed = self.branches, tokens - drafts, self._branched
        usual_s, longer_s = self._line.each, seconds - self._line.at(tokens - computed)
        branches.note_cost(computed, longer_s, usual_s)
        spent_s = computed * branches.each_s(usual_s)
        step_s = self._line.at(rows)
        branches.settle(self._gained * step_s / rows, spent_s + computed * self._drafting_s(), step_s)
        seconds = max(seconds - spent_s, seconds / 2)
        super().note_step(tokens - computed, drafts - computed, seconds, accepted - self._gained)
        self._branched = self._gained = 0

    def catch_up_s(self, tokens: int) -> float:
        """Returns the seconds in which the draft model takes in so many tokens of a sequence, before its drafts."""
        each = self._cost * self._line.each if self._caught_up_s is None else self._caught_up_s
        return tokens * each

    def step_s(self, rows: int) -> float:
        """Returns the seconds of a step without drafts."""
        return self._line.at(rows)

    def pays(self, chance: float, rows: int) -> bool:
        if self._steps < PLAIN_STEPS or self._balance < 0:
            return False
        costs = ((count, count * self._line.each + self._pass_s(count)) for count in (1, rows))
        return any(count * chance * self._line.at(rows) > MARGIN * cost * rows for count, cost in costs)

    def choose(
        self,
        candidates: Sequence[Candidate],
        rows: int,
        most: int,
        limit_s: float = math.inf,
        most_branches: float = math.inf,
    ) -> None:
        """Sets the drafts of each candidate, as `DraftControl.choose` does; draft after draft, as the passes go.

        most_branches: of all candidates.
        """
        left, tokens, seconds = min(most, self._reach), float(rows), self._line.at(rows)
        each = self._line.each + self._drafting_s()
        going = [one for one in candidates if one.most]
        depth = 0
        while going:
            depth += 1
            gains = [(one.chance**depth, one) for one in going]
            gains.sort(key=lambda gain: gain[0], reverse=True)
            chosen = [gain for gain in gains[:left] if gain[0] * seconds > MARGIN * each * tokens]
            cost = len(chosen) * self._line.each + self._pass_s(len(chosen))
            gain = sum(chance for chance, _ in chosen)
            if not chosen or gain * seconds <= MARGIN * cost * tokens or seconds + cost > limit_s:
                break
            tokens, seconds, left = tokens + gain, seconds + cost, left - len(chosen)
            for _, one in chosen:
                one.count = depth
            going = [one for _, one in chosen if one.most > depth]
        left = most - sum(one.count for one in candidates)
        of_branch = self.branches.each_s(self._line.each) + self._drafting_s()
        self.branches.choose(candidates, tokens, seconds, left, limit_s, of_branch, most_branches)

    def _drafting_s(self) -> float:
        """Returns by how much a row more lengthens a pass, in seconds."""
        return self._pass_s(2) - self._pass_s(1)

    def _pass_s(self, rows: int) -> float:
        return self._cost * self._line.at(rows) if self._passes is None else self._passes.at(rows)
