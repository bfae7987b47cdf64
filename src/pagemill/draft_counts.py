"""DraftCounts: tells what became of drafts, those of one request or of all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Drafted(NamedTuple):
    """Says what one sequence had of drafts in a step.

    tokens: all drafts that were verified. places: how many places they were for: fewer than drafts where they branch.
    accepted: those that became tokens of the answer. branches: how many paths there were beside the first. branched:
    whether the model followed one of these.
    """

    tokens: int
    places: int
    accepted: int
    branches: int = 0
    branched: bool = False


@dataclass(slots=True)
class DraftCounts:
    """Counts drafts that were verified, under vLLM's names."""

    num_drafts: int = 0
    """Counts sequences of steps that had drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Counts drafts that the model says too, up to the answer's end."""
    num_branches: int = 0
    """Counts paths of drafts beside the first of their step."""
    num_accepted_branches: int = 0
    """Counts those of them that the model followed."""
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    """Counts steps that had drafts for a place, by that place behind the last token."""
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def note(self, drafted: Drafted) -> None:
        """Adds what one sequence had in a step."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted.tokens
        self.num_accepted_tokens += drafted.accepted
        self.num_branches += drafted.branches
        self.num_accepted_branches += drafted.branched
        further = [0] * (drafted.places - len(self.num_draft_tokens_per_pos))
        self.num_draft_tokens_per_pos += further
        self.num_accepted_tokens_per_pos += further
        for position in range(drafted.places):
            self.num_draft_tokens_per_pos[position] += 1
        for position in range(drafted.accepted):
            self.num_accepted_tokens_per_pos[position] += 1
