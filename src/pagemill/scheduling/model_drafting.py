"""Decides how many drafts the executor proposes for each sequence, by a model or heads, and where they branch.

The drafts stay on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagemill.scheduling.answer_cache import AnswerCache
from pagemill.scheduling.branches import Tree
from pagemill.scheduling.draft_control import BranchShape, Candidate
from pagemill.scheduling.model_draft_control import ModelDraftControl
from pagemill.scheduling.sequence import Sequence
from pagemill.scheduling.step_plan import DraftWork

PROPOSED = -1
"""Stands for a draft that the executor proposes; less by 1 for each likelier one that it passes over."""
FIRST_CHANCE = 0.8
"""The chance that a draft is right, as long as nothing is known."""
LEARN = 0.1
"""The weight of one draft in its sequence's chance, beside all before it; a tenth of it in that of new sequences."""
FORGET = 0.005
"""What each step without drafts counts, after which there is another try the sooner, the less a try costs."""
CATCH_UP = 0.25
"""The draft model takes in what it has not yet of a sequence when that takes at most this share of the time in which
the sequence has generated so far: whoever has generated for long is likely to go on for as long."""


class ModelDrafting:
    """What is known of one sequence's drafts. taken_in: tokens that the draft model is sure to have taken in."""

    __slots__ = ("chance", "taken_in")

    def __init__(self, chance: float) -> None:
        self.chance = chance
        self.taken_in = 0


class ModelDrafter:
    """Asks the executor for as many drafts as pay (`draft_control`).

    most: the most of a sequence on one path in one step. most_branches: the most further paths of a sequence in it.
    cost: of one draft, as a multiple of one of the model's tokens.
    takes_in: True if all of a sequence's tokens have to be taken in before it has drafts.
    """

    answers: AnswerCache | None = None

    def __init__(self, most: int, cost: float, takes_in: bool, most_branches: int = 0) -> None:
        self._most = most
        self._takes_in = takes_in
        self._control = ModelDraftControl(cost, most_branches)
        self._chance = FIRST_CHANCE

    def may_draft(self, rows: int) -> bool:
        return self._control.pays(1.0, rows)

    def propose(
        self, room: Mapping[Sequence, int], rows: int, budget: int, limit_s: float, branches: int
    ) -> dict[Sequence, list[list[int]]]:
        if not self.may_draft(rows):
            return {}
        found: list[tuple[Sequence, ModelDrafting, Candidate]] = []
        for sequence, most in room.items():
            if not isinstance(sequence.drafting, ModelDrafting):
                sequence.drafting = ModelDrafting(self._chance)
            drafting = sequence.drafting
            if self._is_worth_catching_up(sequence, drafting, rows):
                found.append((sequence, drafting, Candidate(drafting.chance, min(most, self._most))))
        self._control.choose([candidate for *_, candidate in found], rows, budget, limit_s, branches)
        proposed = {sequence: _paths(one) for sequence, _, one in found if one.count}
        for sequence, drafting, _ in found:
            if sequence not in proposed:
                drafting.chance += FORGET * (self._chance - drafting.chance)
        if not proposed:
            self._chance += FORGET / 10 * (FIRST_CHANCE - self._chance)
        elif not any(candidate.branches for *_, candidate in found):
            self._control.branches.note_none()
        return proposed

    def verified(self, sequence: Sequence, tree: Tree) -> None:
        drafting = sequence.drafting
        tried = min(tree.right + 1, tree.first)
        kept = (1 - LEARN) ** tried
        self._chance += (1 - kept) / 10 * (tree.right / tried - self._chance)
        self._control.branches.note(tree.others, tree.gained > 0)
        if isinstance(drafting, ModelDrafting):
            drafting.chance += (1 - kept) * (tree.right / tried - drafting.chance)
            drafting.taken_in = len(sequence.tokens)

    def note_step(self, tokens: int, drafts: int, accepted: int, seconds: float, work: DraftWork) -> None:
        self._control.note_work(work)
        self._control.note_step(tokens, drafts, seconds - work.seconds - work.catch_up_s, accepted)

    def _is_worth_catching_up(self, sequence: Sequence, drafting: ModelDrafting, rows: int) -> bool:
        """Returns whether the draft model should take in what it may not have of a sequence's tokens."""
        if not self._takes_in:
            return True
        length = len(sequence.tokens)
        going_on = min(sequence.num_output_tokens, sequence.request.max_len - length)
        share = self._control.step_s(rows) / rows
        return self._control.catch_up_s(length - drafting.taken_in) <= CATCH_UP * going_on * share


def _paths(one: Candidate) -> list[list[int]]:
    """Returns what to ask the executor for."""
    return [[PROPOSED] * one.count, *map(_path, one.branches)]


def _path(shape: BranchShape) -> list[int]:
    path = [PROPOSED] * shape.length
    path[shape.depth] -= shape.rank
    return path
