"""Turns the logits of a step into tokens and log probabilities.

Rows are those of the persistent batch: `add_row` when a sequence takes one, `remove_row` when it leaves. `sample`
remembers the tokens that it chose: penalties, bad words, min_tokens and the random numbers need no more.
The token and log probabilities of a row are, bitwise, a function of its own logits, parameters, seed and position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pagemill.sampling.constraints import RowConstraints, apply_constraints
from pagemill.sampling.kernels import ALL_FORBIDDEN, Choices, Ids, SamplingKernels, leave_out, take_rows
from pagemill.sampling.params import SamplingParams, TokenLogprobs
from pagemill.sampling.random import uniform

if TYPE_CHECKING:
    from pagemill.sampling.grammar_cache import CompiledGrammar
    from pagemill.sampling.grammar_rows import GrammarRows


Rows: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass
class Sampled:
    """Holds the result of one `sample` call for m rows.

    token_ids: meaningless where there is none; such rows remember nothing.
    logprobs: for rows that asked for them.
    not_finite: places whose largest logit is NaN or infinite. Logits of -inf are never drawn, and no fault.
    exhausted: places whose parameters (allowed_token_ids, bad_words, a grammar, …) forbid every token.
    failed: by place, why a grammar could not be followed any longer.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    not_finite: list[int]
    exhausted: list[int]
    failed: dict[int, Exception] = field(default_factory=dict)


class Sampler:
    """Samples for up to `max_rows` sequences, over a vocabulary of `vocab_size` logits.

    kernels: those of the device on which the logits lie.
    tokenizer_json: returns the model's tokenizer in Hugging Face's form, which structured outputs need.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        kernels: SamplingKernels,
        eos_token_ids: Iterable[int] = (),
        tokenizer_json: Callable[[], str] = str,
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
        self._structured = np.zeros(max_rows, np.bool_)
        self._tokenizer_json = tokenizer_json
        self._params: list[SamplingParams | None] = [None] * max_rows
        self._roots = [b""] * max_rows

    @cached_property
    def _grammars(self) -> GrammarRows:
        """What holds rows to grammars; imported when the first request wants it."""
        from pagemill.sampling.grammar_cache import Grammars
        from pagemill.sampling.grammar_rows import GrammarRows

        return GrammarRows(Grammars(self._tokenizer_json, self.vocab_size, self.eos_token_ids), len(self._params))

    def prepare(self, params: SamplingParams, root: bytes = b"") -> Future[CompiledGrammar] | None:
        """Begins to prepare what sampling by these parameters needs, for a namespace; it stays there while this future
        is held. Its error is `SamplingParamsError` for what cannot be. None: they need nothing."""
        return None if params.structured_outputs is None else self._grammars.prepare(params.structured_outputs, root)

    def add_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: npt.NDArray[np.int32],
        output_token_ids: npt.NDArray[np.int32],
        root: bytes = b"",
    ) -> None:
        """Gives `row` to a sequence, whose parameters `check_vocabulary` has accepted.

        seed:             any integer; its low 64 bits count.
        output_token_ids: what the sequence generated before. Its random numbers go on from there.
        root:             stands for its namespace.
        """
        self._params[row], self._roots[row] = params, root
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
        self._structured[row] = params.structured_outputs is not None
        if params.structured_outputs is not None:
            self._grammars.add(row, params.structured_outputs, root, output_token_ids)

    def rewind(
        self, row: int, prompt_token_ids: npt.NDArray[np.int32], output_token_ids: npt.NDArray[np.int32]
    ) -> None:
        """Brings `row` back to where its sequence had generated just this, whatever has been sampled since."""
        self.add_row(row, self.params(row), int(self._seeds[row]), prompt_token_ids, output_token_ids, self._roots[row])

    def remove_row(self, row: int) -> None:
        """Takes `row` from the sequence that leaves; it may be given again."""
        self._params[row] = None
        self._constraints.pop(row, None)
        self._constrained[row] = False
        if self._structured[row]:
            self._grammars.remove(row)
            self._structured[row] = False

    def params(self, row: int) -> SamplingParams:
        """Returns the parameters of the sequence in `row`. Raises KeyError if there is none."""
        params = self._params[row]
        if params is None:
            raise KeyError(f"no sequence in row {row}")
        return params

    def only_argmax(self, rows: Rows) -> bool:
        """Returns True if the argmax of what is `allowed` is all that `rows` need of their logits."""
        return bool(self._only_argmax[rows].all())

    def samples_on_device(self, rows: Rows, *, truncated: bool) -> bool:
        """Returns True if the next tokens of `rows` follow from their logits and their `choices_ahead` alone: then they
        can be chosen, and become the next step's input, before the host has seen them. truncated: whether the device
        follows top_k, top_p and min_p."""
        held = self._constrained[rows] | self._structured[rows] | (self._logprobs[rows] >= 0)
        if not truncated:
            limited = leave_out(self._top_k[rows], self._top_p[rows], self._min_p[rows])
            held |= limited & (self._temperature[rows] > 0)
        return not held.any()

    def choices_ahead(self, rows: Rows) -> Choices:
        """Returns how each of `rows` chooses its next token, behind those that `note_ahead` was told of."""
        return self._choices(rows.astype(np.int64))

    def note_ahead(self, rows: Rows) -> None:
        """Takes note that the next token of each of `rows` is being chosen on the device. One that turns out not to be
        there ends its sequence."""
        self._positions[rows] += 1

    def allowed(self, rows: Rows) -> tuple[npt.NDArray[np.uint32], Ids] | None:
        """Returns bits of the tokens that grammars let come next, and each row's place among them, negative for a row
        without a grammar. None: no row has one."""
        structured = self._structured[rows]
        if not structured.any():
            return None
        return self._grammars.allowed(), np.where(structured, rows.astype(np.int64), -1)

    def forbidden(self, tokens: Ids, rows: Rows) -> Ids:
        """Returns the places whose token must not come next in their row, by its grammar."""
        structured = np.flatnonzero(self._structured[rows] & (tokens >= 0))
        if not len(structured):
            return structured
        return structured[~self._grammars.allows(rows[structured], tokens[structured])]

    def best_allowed(self, logits: torch.Tensor, rows: Rows) -> Ids:
        """Returns the argmax of each of `rows` among what its grammar lets come next. `logits` is overwritten."""
        places = np.arange(len(rows))
        self._mask(logits, places, rows)
        return self._kernels.choose(logits, places, Choices.argmax(len(rows)))

    def take_argmax(self, tokens: Ids, rows: Rows) -> Sampled:
        """Returns what `sample` would for rows that are `only_argmax`. Their positions stand still: they draw nothing.

        tokens: int64 [m], the argmax of their logits, as `SamplingKernels.choose` returns it, and where that is
            `forbidden`, what `best_allowed` returns.
        """
        token_ids = tokens.tolist()
        structured = self._structured[rows]
        exhausted = structured & (tokens == ALL_FORBIDDEN)
        not_finite = [] if min(token_ids) >= 0 else np.flatnonzero((tokens < 0) & ~exhausted).tolist()
        failed = self._follow(tokens, rows) if structured.any() else {}
        return Sampled(token_ids, [None] * len(token_ids), not_finite, np.flatnonzero(exhausted).tolist(), failed)

    @torch.inference_mode()
    def guess(self, logits: torch.Tensor, rows: Rows, ahead: int, ranks: Ids | None = None) -> Ids:
        """Returns what `sample` would choose `ahead` tokens later if the logits there were these; it may be none.

        It draws with the random numbers of those tokens, so that of a distribution that is near the later one it
        chooses mostly the same. Penalties, grammars and other constraints are left out. Nothing is remembered.
        ranks: by row, how many such choices are to be forbidden, one after the other, before the one that is returned;
            `logits` is overwritten for that.
        """
        choices = self._choices(rows.astype(np.int64), ahead)
        ranks = np.zeros(len(rows), np.int64) if ranks is None else ranks
        for rank in range(int(ranks.max(initial=0))):
            further = np.flatnonzero(ranks > rank)
            chosen = np.maximum(self._kernels.choose(logits, further, choices.at(further)), 0)
            logits[torch.from_numpy(further).to(logits.device), torch.from_numpy(chosen).to(logits.device)] = -torch.inf
        return self._kernels.choose(logits, np.arange(len(rows)), choices)

    def sample(self, logits: torch.Tensor, rows: Rows) -> Sampled:
        """Chooses the next token of each of `rows` ([m], distinct) from `logits` (float32 [m, vocab], on this device).

        `logits` is overwritten.
        """
        rows = rows.astype(np.int64)
        constrained = np.flatnonzero(self._constrained[rows])
        structured = np.flatnonzero(self._structured[rows])
        asked = np.flatnonzero(self._logprobs[rows] >= 0)
        model, places = logits, asked  # where log probabilities find what the model said
        if len(asked) and (len(constrained) or len(structured)):
            model, places = take_rows(logits, asked), np.arange(len(asked))
        if len(constrained):
            finite = self._kernels.choose(logits, constrained, Choices.argmax(len(constrained))) >= 0
            constrained = constrained[finite]
        if len(structured):
            self._mask(logits, structured, rows[structured])
        if len(constrained):
            apply_constraints(logits, [(i, self._constraints[int(rows[i])]) for i in constrained.tolist()])
        tokens = self._kernels.choose(logits, np.arange(len(rows)), self._choices(rows))

        chosen = tokens >= 0
        exhausted = np.zeros(len(rows), np.bool_)
        exhausted[constrained] = ~chosen[constrained]
        exhausted[structured] |= tokens[structured] == ALL_FORBIDDEN
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
        failed = self._follow(tokens, rows) if len(structured) else {}
        not_finite = np.flatnonzero(~(chosen | exhausted))
        return Sampled(tokens.tolist(), logprobs, not_finite.tolist(), np.flatnonzero(exhausted).tolist(), failed)

    def _mask(self, logits: torch.Tensor, places: Ids, rows: Rows) -> None:
        """Forbids, at these places, what the grammars of these rows do not let come next."""
        self._kernels.mask(logits, places, self._grammars.allowed(), rows.astype(np.int64))

    def _follow(self, tokens: Ids, rows: Rows) -> dict[int, Exception]:
        """Moves the grammars of `rows` on by their tokens. Returns, by place, why one cannot be followed."""
        structured = np.flatnonzero(self._structured[rows])
        failed = self._grammars.failures(structured.tolist(), rows[structured].tolist())
        moved = [i for i in structured.tolist() if tokens[i] >= 0 and i not in failed]
        self._grammars.append(rows[moved].tolist(), tokens[moved].tolist())
        return failed

    def _choices(self, rows: npt.NDArray[np.int64], ahead: int = 0) -> Choices:
        temperature = self._temperature[rows]
        if not temperature.any():
            return Choices.argmax(len(rows))
        uniforms = uniform(self._seeds[rows], self._positions[rows] + ahead)
        return Choices(temperature, self._top_k[rows], self._top_p[rows], self._min_p[rows], uniforms)

    def prompt_logprobs(self, row: int, logits: torch.Tensor, next_token_ids: npt.ArrayLike) -> list[TokenLogprobs]:
        """Returns log probabilities of the tokens that follow in the row's prompt, with as many others as it asks for.

        logits: float32 [t, vocab]; next_token_ids: [t].
        """
        tokens = np.asarray(next_token_ids, np.int64)
        counts = np.full(len(tokens), self.params(row).prompt_logprobs or 0, np.int64)
        return self._kernels.log_probabilities(logits, np.arange(len(tokens)), tokens, counts)
