"""Verifies drafts: samples position after position from the target, as plain decoding would, while drafts come true.

A draft from a look-up is a point mass: rejection sampling (Leviathan, Kalman, Matias: "Fast Inference from Transformers
via Speculative Decoding", ICML 2023) accepts it with the target's probability of it, and else draws from the target
without it. That is the distribution of a draw from the target that is compared with the draft. Each draw is made with
the position's own random number, behind the accepted tokens only, so that the outcome is plain decoding's to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Holds what the samples of a plan accept, and what `choose` said of the first token of each."""

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


def verify(plan: StepPlan, choose: Choose) -> Verified:
    """Samples for a plan with drafts.

    Where there is no token behind accepted ones, these are all: the next step finds that out again, and the row fails
    as it would have without drafts.
    """
    places = np.cumsum(plan.max_accepted, dtype=np.int64) - plan.max_accepted
    drafts = drafts_of(plan)
    first, tokens, logprobs = verified = Verified.without_drafts(choose(places, plan.sample_to))
    lost = {*first.not_finite, *first.exhausted, *first.failed}
    going = [i for i, guesses in enumerate(drafts) if guesses and i not in lost and guesses[0] == tokens[i][0]]
    depth = 0
    while going:
        depth += 1
        found = choose(places[going] + depth, plan.sample_to[going])
        lost = {*found.not_finite, *found.exhausted, *found.failed}
        came, going = going, []
        for place, i in enumerate(came):
            if place in lost:
                continue
            tokens[i].append(found.token_ids[place])
            entry, known = found.logprobs[place], logprobs[i]
            if entry is not None and known is not None:
                known.append(entry)
            if depth < len(drafts[i]) and drafts[i][depth] == found.token_ids[place]:
                going.append(i)
    return verified


def drafts_of(plan: StepPlan) -> list[list[int]]:
    """Returns a plan's drafts by sample."""
    counts = plan.max_accepted - 1
    each = zip(counts, np.cumsum(counts), strict=True)
    return [plan.draft_tokens[end - count : end].tolist() for count, end in each]
