"""The step plan: all that the runner must know to carry out one step, in plain arrays.

A row is a place in the persistent batch: state that stays on the device between steps and is edited, never rebuilt.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pagemill.memory.work import MemoryWork
from pagemill.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence enters the persistent batch."""

    row: int
    token_ids: list[int]
    """Prompt and, after a preemption, the tokens generated so far."""
    prompt_len: int
    params: SamplingParams
    seed: int
    """The sequence's own seed, 64 bits, never None."""


@dataclass(slots=True)
class StepPlan:
    """One step. Arrays are of the step's rows unless said otherwise.

    rows        int32 [n]  persistent rows that run, each once
    starts      int32 [n]  position of the first query token (tokens already in the KV cache)
    query_lens  int32 [n]  query tokens of each row, at least 1
    sample_from int32 [m]  index into `rows`: whose last query token's logits are sampled
    sample_to   int32 [m]  persistent row that gets the sampled token (not rows[sample_from] for a forked child)
    prompt_logprobs int32 [k]  indices into `rows` whose every query token needs log probabilities

    Edits (`new_rows`, `freed_rows`, `work`) are applied once, in the order freed, new, work; the rest may be run in
    parts.
    """

    step: int
    work: MemoryWork
    rows: NDArray[np.int32]
    starts: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    sample_from: NDArray[np.int32]
    sample_to: NDArray[np.int32]
    prompt_logprobs: NDArray[np.int32]
    new_rows: list[NewRow] = field(default_factory=list)
    freed_rows: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())

    def select(self, begin: int, end: int) -> StepPlan:
        """The part of this step that runs rows[begin:end]; without edits, which have been applied by then."""
        samples = (self.sample_from >= begin) & (self.sample_from < end)
        logprobs = (self.prompt_logprobs >= begin) & (self.prompt_logprobs < end)
        return replace(
            self,
            rows=self.rows[begin:end],
            starts=self.starts[begin:end],
            query_lens=self.query_lens[begin:end],
            sample_from=self.sample_from[samples] - begin,
            sample_to=self.sample_to[samples],
            prompt_logprobs=self.prompt_logprobs[logprobs] - begin,
            work=MemoryWork.none(),
            new_rows=[],
            freed_rows=[],
        )
