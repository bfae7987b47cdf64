"""A step's arrays, as the device gets them: rows, starts, where each row's queries begin, the keys that rows have in
common, which queries are sampled, where their tokens go, and how each is chosen (`Choices`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagemill.executor.staging import Array
from pagemill.sampling.kernels import Choices
from pagemill.scheduling.step_plan import StepPlan


def step_arrays(plan: StepPlan, common: NDArray[np.int32], written: NDArray[np.int64], choices: Choices) -> list[Array]:
    """Returns a plan's arrays. common: see `AttentionBatch`. written: by sample, the flat place of its token."""
    query_start = np.zeros(len(plan.rows) + 1, np.int32)
    np.cumsum(plan.query_lens, out=query_start[1:])
    last = query_start[1:][plan.sample_from].astype(np.int64) - 1
    return [plan.rows, plan.starts, query_start, common, last, written, *choices]


def nobodys_arrays(size: int, nobody: int, nowhere: int) -> list[Array]:
    """Returns the arrays of a decode step of `size` rows that are all `nobody`'s: as `padded_arrays` gives them for a
    plan without rows."""
    rows, last = np.full(size, nobody, np.int32), np.arange(size)
    zeros, query_start = np.zeros(size, np.int32), np.zeros(size + 1, np.int32)
    return [rows, zeros, query_start, zeros, last, np.full(size, nowhere), *Choices.argmax(size)]


def padded_arrays(
    plan: StepPlan,
    common: NDArray[np.int32],
    written: NDArray[np.int64],
    choices: Choices,
    size: int,
    nobody: int,
    nowhere: int,
) -> list[Array]:
    """Returns the arrays of a plan whose rows have one query token each, for `size` rows with a sample each.

    Rows beyond the plan's are `nobody`'s: they have no query, so they do not attend. What is sampled for them, and for
    rows that the plan does not sample, goes `nowhere`, a flat place too.
    """
    count, at = len(plan.rows), plan.sample_from

    def spread(values: Array, rest: float, where: Array | slice) -> Array:
        spread_out = np.full(size, rest, values.dtype)
        spread_out[where] = values
        return spread_out

    rows, starts = spread(plan.rows, nobody, slice(count)), spread(plan.starts, 0, slice(count))
    query_start = np.minimum(np.arange(size + 1, dtype=np.int32), count)
    last = np.arange(size)
    alike = Choices.argmax(1)
    chosen = [spread(getattr(choices, name), getattr(alike, name)[0], at) for name in Choices._fields]
    return [rows, starts, query_start, spread(common, 0, slice(count)), last, spread(written, nowhere, at), *chosen]
