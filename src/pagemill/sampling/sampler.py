"""Turns the logits of a step into tokens and log probabilities.

Rows are those of the persistent batch: `add_row` when a sequence takes one, `remove_row` when it leaves. `sample`
remembers the tokens that it chose: penalties, bad words, min_tokens and the random numbers need no more.
The token and log probabilities of a row are, bitwise, a function of its own logits, parameters, seed and position.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagemill.sampling.constraints import RowConstraints, apply_constraints
from pagemill.sampling.kernels import Choices, SamplingKernels
from pagemill.sampling.params import SamplingParams, TokenLogprobs
from pagemill.sampling.random import uniform


@dataclass
class Sampled:
    """Holds the result of one `sample` call for m rows.

    token_ids: meaningless where there is none; such rows remember nothing.
    logprobs: for rows that asked for them.
    not_finite: places whose largest logit is NaN or infinite. Logits of -inf are never drawn, and no fault.
    exhausted: places whose parameters (allowed_token_ids, bad_words, min_tokens) forbid every token.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    not_finite: list[int]
    exhausted: list[int]


class Sampler:
    """Samples for up to `max_rows` sequences, over a vocabulary of `vocab_size` logits.

    kernels: those of the device on which the logits lie.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, kernels: SamplingKernels, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.vocab_size = vocab_size
        self._kernels = kernels
        self.eos_token_ids = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._seeds = np.zeros(max_rows, np.uint64)
        self._positions = np.zeros(max_rows, np.int64)
        self._temperature = np.zeros(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.ones(max_rows, np.float32)
        self._min_p = np.zeros(max_rows, np.float32)
        self._logprobs = np.full(max_rows, -1, np.int64)
        self._constrained = np.zeros(max_rows, np.bool_)
        self._only_argmax = np.zeros(max_rows, np.bool_)
        self._constraints: dict[int, RowConstraints] = {}
        self._params: list[SamplingParams | None] = [None] * max_rows

    def add_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: npt.NDArray[np.int32],
        output_token_ids: npt.NDArray[np.int32],
    ) -> None:
        """Gives `row` to a sequence, whose parameters `check_vocabulary` has accepted.

        seed:             any integer; its low 64 bits count.
        output_token_ids: what the sequence generated before. Its random numbers go on from there.
        """
        self._params[row] = params
        self._seeds[row] = seed % 2**64
        self._positions[row] = len(output_token_ids)
        self._temperature[row] = 0.0 if params.greedy else params.temperature
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self._top_k[row], self._top_p[row], self._min_p[row] = top_k, params.top_p, params.min_p
        self._logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._constrained[row] = RowConstraints.needed(params)
        self._only_argmax[row] = params.greedy and params.logprobs is None and not self._constrained[row]
        if self._constrained[row]:
            self._constraints[row] = RowConstraints(params, self.eos_token_ids, prompt_token_ids, output_token_ids)

    def rewind(
        self, row: int, prompt_token_ids: npt.NDArray[np.int32], output_token_ids: npt.NDArray[np.int32]
    ) -> None:
        """Brings `row` back to where its sequence had generated just this, whatever has been sampled since."""
        self.add_row(row, self.params(row), int(self._seeds[row]), prompt_token_ids, output_token_ids)

    def remove_row(self, row: int) -> None:
        """Takes `row` from the sequence that leaves; it may be given again."""
        self._params[row] = None
        self._constraints.pop(row, None)
        self._constrained[row] = False

    def params(self, row: int) -> SamplingParams:
        """Returns the parameters of the sequence in `row`. Raises KeyError if there is none."""
        params = self._params[row]
        if params is None:
            raise KeyError(f"no sequence in row {row}")
        return params

    def only_argmax(self, rows: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> bool:
        """Returns True if the argmax is all that `rows` need of their logits."""
        return bool(self._only_argmax[rows].all())

    def take_argmax(self, tokens: npt.NDArray[np.int64]) -> Sampled:
        """Returns what `sample` would for rows that are `only_argmax`. Their positions stand still: they draw nothing.

        tokens: int64 [m], the argmax of their logits, as `SamplingKernels.choose` returns it.
        """
        token_ids = tokens.tolist()
        not_finite = [] if min(token_ids) >= 0 else np.flatnonzero(tokens < 0).tolist()
        return Sampled(token_ids, [None] * len(token_ids), not_finite, [])

    def sample(self, logits: torch.Tensor, rows: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> Sampled:
        """Chooses the next token of each of `rows` ([m], distinct) from `logits` (float32 [m, vocab], on this device).

        `logits` is overwritten.
        """
        rows = rows.astype(np.int64)
        constrained = np.flatnonzero(self._constrained[rows])
        asked = np.flatnonzero(self._logprobs[rows] >= 0)
        model, places = logits, asked  # where log probabilities find what the model said
        if len(constrained):
            finite = self._kernels.choose(logits, constrained, Choices.argmax(len(constrained))) >= 0
            constrained = constrained[finite]
            if len(asked):
                model, places = logits[torch.from_numpy(asked).to(logits.device)], np.arange(len(asked))
            apply_constraints(logits, [(i, self._constraints[int(rows[i])]) for i in constrained.tolist()])
        tokens = self._kernels.choose(logits, np.arange(len(rows)), self._choices(rows))

        chosen = tokens >= 0
        exhausted = np.zeros(len(rows), np.bool_)
        exhausted[constrained] = ~chosen[constrained]
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if len(asked):
            some = chosen[asked]
            asked = asked[some]
            made = self._kernels.log_probabilities(model, places[some], tokens[asked], self._logprobs[rows[asked]])
            for i, entry in zip(asked.tolist(), made, strict=True):
                logprobs[i] = entry
        self._positions[rows[chosen]] += 1
        for i in constrained.tolist():
            if chosen[i]:
                self._constraints[int(rows[i])].append(int(tokens[i]))
        not_finite = np.flatnonzero(~(chosen | exhausted))
        return Sampled(tokens.tolist(), logprobs, not_finite.tolist(), np.flatnonzero(exhausted).tolist())

    def _choices(self, rows: npt.NDArray[np.int64]) -> Choices:
        temperature = self._temperature[rows]
        if not temperature.any():
            return Choices.argmax(len(rows))
        uniforms = uniform(self._seeds[rows], self._positions[rows])
        return Choices(temperature, self._top_k[rows], self._top_p[rows], self._min_p[rows], uniforms)

    def prompt_logprobs(self, row: int, logits: torch.Tensor, next_token_ids: npt.ArrayLike) -> list[TokenLogprobs]:
        """Returns log probabilities of the tokens that follow in the row's prompt, with as many others as it asks for.

        logits: float32 [t, vocab]; next_token_ids: [t].
        """
        tokens = np.asarray(next_token_ids, np.int64)
        counts = np.full(len(tokens), self.params(row).prompt_logprobs or 0, np.int64)
        return self._kernels.log_probabilities(logits, np.arange(len(tokens)), tokens, counts)
