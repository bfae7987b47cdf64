"""Speculation: which rows of a step carry drafts, within what the step and the memory have left.

A row that generates computes its last token; with drafts behind it, one pass over the weights computes those as well,
and what the model says after each is compared with the next. Drafts may branch (`branches`). They take only what nobody
else wants: the rest of a step's budget, free rows, and blocks that are free or cached, which are given back with the
step. So no sequence is preempted, kept waiting or admitted because of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from pagemill.memory.manager import MemoryManager
from pagemill.scheduling import branches
from pagemill.scheduling.answer_cache import AnswerCache
from pagemill.scheduling.branches import Tree
from pagemill.scheduling.controller import CALM
from pagemill.scheduling.draft_control import Candidate, DraftControl
from pagemill.scheduling.drafting import Drafting, Match, NgramTable, first_chances
from pagemill.scheduling.sequence import Request, Sequence
from pagemill.scheduling.state import SchedulerState, StepDraft
from pagemill.scheduling.step_plan import DraftWork
from pagemill.speculative_config import SpeculativeConfig

TAKEN_IN = 2048
"""The most tokens that all sequences take into their tables in a step: one or two milliseconds."""


class Drafter(Protocol):
    """Guesses the next tokens of sequences that generate.

    answers: where it looks up what other requests have answered; None if it does not.
    """

    answers: AnswerCache | None

    def may_draft(self, rows: int) -> bool:
        """Returns whether drafts could pay in a step in which so many rows generate."""

    def propose(
        self, room: Mapping[Sequence, int], rows: int, budget: int, limit_s: float, branches: int
    ) -> dict[Sequence, list[list[int]]]:
        """Returns paths of drafts, as of a plan, none empty, for each sequence that gets any. All but the first are no
        longer than that, and leave it somewhere.

        room: by sequence, the most drafts that it may get on a path. rows: how many rows generate in the step. budget:
        the most tokens that the step computes for drafts, a further one for each path but the first. limit_s: the
        longest that the step should take. branches: the most paths beside the first of all sequences.
        """

    def verified(self, sequence: Sequence, tree: Tree) -> None:
        """Is told which of a sequence's drafts were right."""

    def note_step(self, tokens: int, drafts: int, accepted: int, seconds: float, work: DraftWork) -> None:
        """Is told how long a step took in which all of its query tokens, drafts among them, were generating rows', how
        many of the drafts were right, and what the draft model did in it."""


def add_drafts(state: SchedulerState, draft: StepDraft, drafter: Drafter, now: float) -> None:
    """Adds drafts to a step that is planned otherwise."""
    room, rows = {}, 0
    for sequence, count in draft.planned.items():
        if sequence.generates:
            rows += 1
            if count == 1 and (most := _most_drafts(sequence)) > 0:
                room[sequence] = most
    limit_s = CALM * state.controller.target_s
    if not room or draft.budget < 1 or (rows < len(draft.planned) and limit_s < math.inf):
        return
    draft.catch_up = draft.budget
    free_rows = 0 if state.batch.flights else state.batch.num_free
    proposed = drafter.propose(room, rows, draft.budget, limit_s, free_rows)
    for sequence, (first, *_) in proposed.items():
        fitting = first[: _reserve(state.memory, sequence, len(first))]
        if fitting:
            draft.add_drafts(sequence, fitting)
    for sequence, (first, *others) in proposed.items():
        if free_rows and others and draft.drafts.get(sequence) == first:
            _branch(state, draft, sequence, others, now)


def give_back(state: SchedulerState, sequence: Sequence, length: int) -> None:
    """Gives back what was reserved for drafts behind the first `length` tokens, which are committed."""
    table = sequence.table
    assert table is not None
    if table.num_entries > -(-length // state.memory.block_size):
        state.memory.truncate(table, length)


def _branch(state: SchedulerState, draft: StepDraft, sequence: Sequence, paths: list[list[int]], now: float) -> None:
    """Adds branches to what is drafted for a sequence, as far as budget, rows and blocks go."""
    for path in paths:
        if len(path) >= draft.budget:
            return
        if not branches.begin(state.memory, state.batch, sequence, draft.drafts[sequence], path, now):
            return
        draft.budget -= 1 + len(path)


def _most_drafts(sequence: Sequence) -> int:
    """Returns how many drafts a sequence may have: none before its first token, in a search, or behind a step in flight
    that is to bring the token before them."""
    if sequence.group is not None or sequence.in_flight or not sequence.num_output_tokens:
        return 0
    return sequence.request.max_len - len(sequence.tokens) - 1


def _reserve(memory: MemoryManager, sequence: Sequence, count: int) -> int:
    """Reserves the places of so many drafts behind a token that has its own. Returns how many have one."""
    table, known = sequence.table, sequence.scheduled + 1
    assert table is not None
    if known + count > table.writable and memory.reserve(table, known + count) is not None:
        return max(0, table.writable - known)
    return count


class NgramDrafter:
    """Drafts by look-up in each sequence's own tokens (`drafting`), as many as pay (`draft_control`)."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.most_drafts()
        self._lengths = range(config.prompt_lookup_min, config.prompt_lookup_max + 1)
        self._chances = first_chances(self._lengths)
        self._control = DraftControl()
        self.answers: AnswerCache | None = None

    def may_draft(self, rows: int) -> bool:
        return self._control.pays(1.0, rows)

    def propose(
        self, room: Mapping[Sequence, int], rows: int, budget: int, limit_s: float, branches: int
    ) -> dict[Sequence, list[list[int]]]:
        if not self.may_draft(rows):
            return {}
        found: list[tuple[Sequence, Drafting, Match, Candidate]] = []
        left = TAKEN_IN
        for sequence, most in room.items():
            if not isinstance(sequence.drafting, Drafting):
                sequence.drafting = self._begin(sequence)
            drafting = sequence.drafting
            left -= drafting.take_in(sequence.tokens, left)
            match = drafting.match(sequence.tokens)
            if match is not None:
                candidate = Candidate(drafting.chance(match), min(most, self._most))
                found.append((sequence, drafting, match, candidate))
        self._control.choose([candidate for *_, candidate in found], rows, budget, limit_s)
        proposed = {
            sequence: drafting.draft(sequence.tokens, match, candidate.count)
            for sequence, drafting, match, candidate in found
        }
        return {sequence: [drafts] for sequence, drafts in proposed.items() if drafts}

    def _begin(self, sequence: Sequence) -> Drafting:
        table = self._prompt_table(sequence.request)
        return Drafting(sequence.prompt_len, self._lengths, table, self._chances)

    def _prompt_table(self, request: Request) -> NgramTable:
        request.ngrams = request.ngrams or NgramTable(0, self._lengths)
        return request.ngrams

    def verified(self, sequence: Sequence, tree: Tree) -> None:
        if isinstance(sequence.drafting, Drafting):
            sequence.drafting.verified(tree.first, tree.right)

    def note_step(self, tokens: int, drafts: int, accepted: int, seconds: float, work: DraftWork) -> None:
        self._control.note_step(tokens, drafts, seconds, accepted)
