"""DraftCounts: tells what became of drafts, those of one request or of all."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftCounts:
    """Counts drafts that were verified, under vLLM's names."""

    num_drafts: int = 0
    """Counts rows of steps that had drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Counts drafts that the model says too, up to the answer's end."""
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    """Counts drafts by their place behind the last token."""
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def note(self, proposed: int, accepted: int) -> None:
        """Counts one verified row."""
        self.num_drafts += 1
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        further = [0] * (proposed - len(self.num_draft_tokens_per_pos))
        self.num_draft_tokens_per_pos += further
        self.num_accepted_tokens_per_pos += further
        for position in range(proposed):
            self.num_draft_tokens_per_pos[position] += 1
        for position in range(accepted):
            self.num_accepted_tokens_per_pos[position] += 1
