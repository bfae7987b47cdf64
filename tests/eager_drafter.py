"""A drafter that asks for drafts without measuring whether they pay, so that many steps have some."""

from __future__ import annotations

import random

MOST = 4


class Eager:
    """Asks for drafts wherever there may be some, of a share of the sequences at a time, up to `most` of each.

    works: what steps were noted with.
    """

    answers = None

    def __init__(self, seed: int = 0, share: float = 0.7, most: int = MOST) -> None:
        self._most = most
        self._random = random.Random(seed)
        self._share = share
        self.works = []

    def may_draft(self, rows):
        return self._random.random() < 0.5

    def propose(self, room, rows, budget, limit_s):
        asked = {}
        for sequence, most in room.items():
            count = min(most, budget, self._random.randint(1, self._most))
            if count > 0 and self._random.random() < self._share:
                asked[sequence] = [-1] * count
                budget -= count
        return asked

    def verified(self, sequence, proposed, accepted):
        assert 0 <= accepted <= proposed

    def note_step(self, tokens, drafts, accepted, seconds, work):
        self.works.append(work)
