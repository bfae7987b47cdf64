"""Verifies drafts: samples position after position from the target, as plain decoding would, while drafts come true.

A draft from a look-up is a point mass: rejection sampling (Leviathan, Kalman, Matias: "Fast Inference from Transformers
via Speculative Decoding", ICML 2023) accepts it with the target's probability of it, and else draws from the target
without it. That is the distribution of a draw from the target that is compared with the draft. Each draw is made with
the position's own random number, behind the accepted tokens only, so that the outcome is plain decoding's to the bit.
Where drafts branch, the draw is compared with those of all paths that have come true so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill.sampling.params import TokenLogprobs
from pagemill.sampling.sampler import Sampled
from pagemill.scheduling.step_plan import StepPlan

Choose = Callable[[NDArray[np.int64] | None, NDArray[np.int32]], Sampled]
"""Samples for persistent rows from the logits at these places: those of sample 0 and its drafts, of sample 1, …; or, of
one for each row, from all."""


class Verified(NamedTuple):
    """Holds what the samples of a plan accept.

    first: what `choose` said of the first token of each that is no branch; where there is none, it is named by sample.
    """

    first: Sampled
    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]

    @classmethod
    def without_drafts(cls, first: Sampled) -> Verified:
        return cls(
            first,
            [[token] for token in first.token_ids],
            [None if entry is None else [entry] for entry in first.logprobs],
        )


class Walk:
    """Follows the paths of one sequence's drafts, as its tokens come.

    sample: the last path that was followed. paths: the samples whose drafts have all come so far.
    """

    __slots__ = ("logprobs", "paths", "sample", "tokens")

    def __init__(self, paths: range) -> None:
        self.sample = paths[0]
        self.paths: Sequence[int] = paths
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []

    def take(self, token: int, logprobs: TokenLogprobs | None, drafts: list[list[int]]) -> bool:
        """Takes the token that comes next on the first of its paths. Returns whether one of them has it as a draft."""
        depth = len(self.tokens)
        self.sample = self.paths[0]
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.paths = [path for path in self.paths if depth < len(drafts[path]) and drafts[path][depth] == token]
        return bool(self.paths)


def verify(plan: StepPlan, choose: Choose) -> Verified:
    """Samples for a plan with drafts. `choose` knows as many places of each sample as `logits_of` says.

    Where there is no token behind accepted ones, these are all: the next step finds that out again, and the row fails
    as it would have without drafts.
    """
    drafts, samples = drafts_of(plan), len(plan.sample_to)
    places = np.cumsum(logits_of(plan)) - plan.max_accepted
    roots = [*np.flatnonzero(~plan.branches).tolist(), samples]
    walks = going = [Walk(range(root, end)) for root, end in pairwise(roots)]
    first, depth = None, 0
    while going:
        followed = [walk.paths[0] for walk in going]
        found = choose(places[followed] + depth, plan.sample_to[followed])
        first = first or found
        lost = {*found.not_finite, *found.exhausted, *found.failed}
        came, going = going, []
        for place, walk in enumerate(came):
            if depth and place in lost:
                continue
            if walk.take(found.token_ids[place], found.logprobs[place], drafts) and place not in lost:
                going.append(walk)
        depth += 1
    assert first is not None
    tokens: list[list[int]] = [[] for _ in range(samples)]
    logprobs: list[list[TokenLogprobs] | None] = [None] * samples
    for walk in walks:
        tokens[walk.sample], logprobs[walk.sample] = walk.tokens, walk.logprobs or None
    if plan.branched:
        first = replace(
            first,
            not_finite=[roots[place] for place in first.not_finite],
            exhausted=[roots[place] for place in first.exhausted],
            failed={roots[place]: error for place, error in first.failed.items()},
        )
    return Verified(first, tokens, logprobs)


def logits_of(plan: StepPlan) -> NDArray[np.int32]:
    """Returns at how many places each sample has logits: for each token that it may accept, but for a branch's first,
    for which the sample that it branches off has them."""
    return plan.max_accepted - plan.branches if plan.branched else plan.max_accepted


def drafts_of(plan: StepPlan) -> list[list[int]]:
    """Returns a plan's drafts by sample."""
    counts = plan.max_accepted - 1
    each = zip(counts, np.cumsum(counts), strict=True)
    return [plan.draft_tokens[end - count : end].tolist() for count, end in each]
