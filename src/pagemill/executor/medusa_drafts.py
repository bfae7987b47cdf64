"""MedusaDrafts: proposes tokens by heads on the hidden state that the model's last token was sampled from.

The heads keep no keys and values, and take nothing in: where a row's hidden state is not there, as behind a preemption,
it has no drafts until its next token is sampled.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.executor.draft_source import asked_of, with_drafts
from pagemill.executor.rows import Inputs, Rows
from pagemill.kvcache.device_pool import DevicePool
from pagemill.models.medusa import MedusaHeads
from pagemill.sampling.sampler import Sampler
from pagemill.scheduling.step_plan import DraftWork, StepPlan


class MedusaDrafts:
    """Implements `DraftSource` by trained heads.

    _hidden [rows, hidden]: the state that each row's last token was sampled from
    _ends int32 [rows]: the position of that token; -1 if there is none
    """

    def __init__(self, heads: MedusaHeads, hidden_size: int, dtype: torch.dtype) -> None:
        self.heads = heads
        self._hidden = torch.empty(0, hidden_size, dtype=dtype, device="cpu")

    def begin(self, pool: DevicePool, rows: Rows, sampler: Sampler) -> None:
        self._rows = rows
        self._sampler = sampler
        count = len(rows.tokens)
        self._hidden = self._hidden.new_zeros(count, self._hidden.shape[1], device=pool.device)
        self._ends = np.full(count, -1, dtype=np.int32)

    def apply(self, plan: StepPlan) -> None:
        self._ends[plan.freed_rows] = -1

    def propose(self, plan: StepPlan) -> tuple[StepPlan, set[int], DraftWork]:
        asked = asked_of(plan)
        if not len(asked.samples):
            return plan, set(), DraftWork()
        begin = time.perf_counter()
        drafting = self._ends[asked.origins] == asked.starts
        rows, starts, counts = asked.rows[drafting], asked.starts[drafting], asked.counts[drafting]
        origins, ranks = asked.origins[drafting], asked.ranks[drafting]
        passes = int(counts.max(initial=0))
        for head in range(passes):
            going = np.flatnonzero(counts > head)
            tokens = self._choose(head, origins[going], ranks[going, head])
            self._rows.tokens[rows[going], starts[going] + 1 + head] = np.maximum(tokens, 0)
        plan, withdrawn = with_drafts(plan, asked, drafting, self._rows.tokens)
        seconds = time.perf_counter() - begin
        work = DraftWork(passes=passes, rows=int(counts.sum()), seconds=seconds, withdrawn=withdrawn)
        return plan, set(asked.samples[~drafting].tolist()), work

    def note_step(self, plan: StepPlan, inputs: Inputs, hidden: Tensor, tokens: list[list[int]]) -> None:
        accepted = np.array([len(each) for each in tokens], dtype=np.int32)
        good = np.flatnonzero(accepted)
        if not len(good):
            return
        of_rows, rows = plan.sample_from[good], plan.sample_to[good]
        behind = accepted[good] - plan.max_accepted[good]  # rejected drafts, negated
        last = inputs.query_start[of_rows + 1] + behind - 1
        to, taken = (self._rows.to_device(index.astype(np.int64)) for index in (rows, last))
        self._hidden[to] = hidden[taken]
        self._ends[rows] = plan.starts[of_rows] + plan.query_lens[of_rows] + behind

    def _choose(self, head: int, rows: NDArray[np.int32], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns a head's guess for each of `rows`, that of so many better ones; any, if there is none."""
        own, which = np.unique(rows, return_inverse=True)
        logits = self.heads.logits(head, self._hidden[self._rows.to_device(own.astype(np.int64))])
        if not np.array_equal(own, rows):
            logits = logits[self._rows.to_device(which)]
        return self._sampler.guess(logits, rows, head, ranks)
