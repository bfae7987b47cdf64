"""DraftCounts: tells what became of drafts, those of one request or of all."""

from __future__ import annotations

from dataclasses import dataclass, field


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

    def note(self, proposed: int, reach: int, accepted: int, branches: int = 0, branched: bool = False) -> None:
        """Counts what one sequence had in a step.

        reach: how many places the drafts were for: fewer than drafts where they branch. branches: how many paths there
        were beside the first. branched: whether the model followed one of these.
        """
        self.num_drafts += 1
        self.num_branches += branches
        self.num_accepted_branches += branched
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        further = [0] * (reach - len(self.num_draft_tokens_per_pos))
        self.num_draft_tokens_per_pos += further
        self.num_accepted_tokens_per_pos += further
        for position in range(reach):
            self.num_draft_tokens_per_pos[position] += 1
        for position in range(accepted):
            self.num_accepted_tokens_per_pos[position] += 1
