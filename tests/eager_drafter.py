"""A drafter that asks for drafts without measuring whether they pay, so that many steps have some."""

from __future__ import annotations

import random

MOST = 4


class SeesTrees:
    """A drafter that checks what it is told of its drafts. branched: how many branches were followed."""

    branched = 0

    def verified(self, sequence, tree):
        assert 0 <= tree.right <= tree.first <= tree.drafts
        assert tree.others >= (tree.gained > 0)
        self.branched += tree.gained > 0


class Eager(SeesTrees):
    """Asks for drafts wherever there may be some, of a share of the sequences at a time: up to `most` on each path,
    and so many branches.

    works: what steps were noted with.
    """

    answers = None

    def __init__(self, seed: int = 0, share: float = 0.7, most: int = MOST, branches: int = 0) -> None:
        self._most = most
        self._branches = branches
        self._random = random.Random(seed)
        self._share = share
        self.works = []

    def may_draft(self, rows):
        return self._random.random() < 0.5

    def propose(self, room, rows, budget, limit_s, branches):
        asked = {}
        for sequence, most in room.items():
            count = min(most, budget, self._random.randint(1, self._most))
            if count > 0 and self._random.random() < self._share:
                asked[sequence] = [[-1] * count, *self._paths(count)]
                budget -= count
        return asked

    def _paths(self, most):
        """Several may be the same, or as long as the scheduler has no room for them."""
        paths = []
        for _ in range(self._random.randint(0, self._branches)):
            path = [-1] * self._random.randint(1, most)
            path[self._random.randrange(len(path))] -= self._random.randint(1, 3)
            paths.append(path)
        return paths

    def note_step(self, tokens, drafts, accepted, seconds, work):
        self.works.append(work)
