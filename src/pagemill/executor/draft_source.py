"""DraftSource: what proposes tokens on the device, before the step in which they are verified.

A draft model is one (`draft_model`), and heads that were trained for the model are (`medusa_drafts`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagemill.executor.rows import Inputs, Rows
from pagemill.kvcache.device_pool import DevicePool
from pagemill.sampling.sampler import Sampler
from pagemill.scheduling.step_plan import DraftWork, StepPlan


class DraftSource(Protocol):
    """Proposes drafts for the rows of a `LocalExecutor`."""

    def begin(self, pool: DevicePool, rows: Rows, sampler: Sampler) -> None:
        """Begins, once the pool is there. The sampler knows how each row's tokens are chosen."""

    def apply(self, plan: StepPlan) -> None:
        """Follows a plan's edits of rows and tables."""

    def propose(self, plan: StepPlan) -> tuple[StepPlan, set[int], DraftWork]:
        """Returns the plan with drafts where it asks for them, without those that cannot be had, and the samples that
        have none for that reason."""

    def note_step(self, plan: StepPlan, inputs: Inputs, hidden: Tensor, tokens: list[list[int]]) -> None:
        """Is told what the model has computed of a plan that `propose` returned, or of a part of one.

        hidden: of the query tokens, after the final norm. tokens: what each sample has accepted; none if it failed.
        """


class Asked(NamedTuple):
    """Holds which samples of a plan ask for drafts. Arrays are of these samples.

    rows: where they run. origins: the rows whose tokens they sample, others than their own for branches.
    starts: where the last known tokens stand. counts: how many drafts each asks for.
    ranks: int64 [n, most drafts], which of the tokens at each place: 0 for the likeliest.
    """

    samples: NDArray[np.int64]
    rows: NDArray[np.int32]
    origins: NDArray[np.int32]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    ranks: NDArray[np.int64]


def asked_of(plan: StepPlan) -> Asked:
    """Returns which samples of a plan ask for drafts."""
    samples = np.flatnonzero(plan.max_accepted > 1)
    at, counts = plan.sample_from[samples], plan.max_accepted[samples] - 1
    ranks = np.zeros((len(samples), int(counts.max(initial=0))), np.int64)
    ranks[np.arange(ranks.shape[1]) < counts[:, None]] = -1 - plan.draft_tokens
    return Asked(samples, plan.rows[at], plan.sample_to[samples], plan.starts[at], counts, ranks)


def with_drafts(
    plan: StepPlan, asked: Asked, drafting: NDArray[np.bool_], tokens: NDArray[np.int32]
) -> tuple[StepPlan, int]:
    """Returns the plan with the drafts that stand in `tokens` [rows, positions] behind the last known ones of samples
    that are `drafting`, and without those of the others; and how many these were."""
    samples, rows, starts, counts = asked.samples, asked.rows, asked.starts, asked.counts
    without = samples[~drafting]
    max_accepted, query_lens = plan.max_accepted.copy(), plan.query_lens.copy()
    query_lens[plan.sample_from[without]] -= counts[~drafting]
    max_accepted[without] = 1
    of_rows = zip(rows[drafting].tolist(), starts[drafting].tolist(), counts[drafting].tolist(), strict=True)
    found = [tokens[row, start + 1 : start + 1 + count] for row, start, count in of_rows]
    drafts = np.concatenate(found) if found else plan.draft_tokens[:0]
    plan = replace(plan, query_lens=query_lens, max_accepted=max_accepted, draft_tokens=drafts)
    return plan, int(counts[~drafting].sum())
