"""Sampler: logits of a step become tokens and log probabilities.

Rows are those of the persistent batch: `add_row` when a sequence takes one, `remove_row` when it leaves. `sample`
remembers the tokens it chose, which is all that penalties, bad words, min_tokens and the random numbers need.
The token and log probabilities of a row are, bitwise, a function of its own logits, parameters, seed and position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagemill.sampling.constraints import RowConstraints, apply_constraints
from pagemill.sampling.draw import candidates_above, draw, draw_truncated
from pagemill.sampling.logprobs import TokenLogprobs
from pagemill.sampling.params import SamplingParams
from pagemill.sampling.random import uniform

_CHUNK = 1 << 21
"""Rows are drawn, and prompt logprobs made, in chunks of at most this many logits (or one row): bounds the memory."""


@dataclass
class Sampled:
    """Result of one `sample` call for m rows.

    token_ids: int32 [m], meaningless where `finite` is False or `exhausted` is True; such rows remember nothing.
    logprobs: for rows that asked for them.
    finite: bool [m], False where the largest logit is NaN or infinite. Logits of -inf are never drawn, and no fault.
    exhausted: bool [m], True where the row's parameters (allowed_token_ids, bad_words, min_tokens) forbid every token.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: list[TokenLogprobs | None]
    finite: npt.NDArray[np.bool_]
    exhausted: npt.NDArray[np.bool_]


class Sampler:
    """State of up to `max_rows` sequences over a vocabulary of `vocab_size` logits on `device`."""

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device | str = "cpu", eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.eos_token_ids = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._seeds = np.zeros(max_rows, np.uint64)
        self._positions = np.zeros(max_rows, np.int64)
        self._greedy = np.ones(max_rows, np.bool_)
        self._truncated = np.zeros(max_rows, np.bool_)
        self._temperature = np.ones(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.ones(max_rows, np.float32)
        self._min_p = np.zeros(max_rows, np.float32)
        self._logprobs = np.full(max_rows, -1, np.int64)
        self._constraints: list[RowConstraints | None] = [None] * max_rows
        self._params: list[SamplingParams | None] = [None] * max_rows

    def add_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: npt.NDArray[np.int32],
        output_token_ids: npt.NDArray[np.int32],
    ) -> None:
        """A sequence takes `row`. `output_token_ids` is what it generated before: its random numbers go on from there.

        `seed` is any integer; its low 64 bits count. The caller has checked the parameters with `check_vocabulary`.
        """
        self._params[row] = params
        self._seeds[row] = seed % 2**64
        self._positions[row] = len(output_token_ids)
        self._greedy[row] = params.greedy
        self._temperature[row] = params.temperature
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self._top_k[row], self._top_p[row], self._min_p[row] = top_k, params.top_p, params.min_p
        self._truncated[row] = top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self._logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._constraints[row] = (
            RowConstraints(params, self.eos_token_ids, prompt_token_ids, output_token_ids)
            if RowConstraints.needed(params)
            else None
        )

    def remove_row(self, row: int) -> None:
        """The sequence in `row` leaves; the row may be taken again."""
        self._params[row] = None
        self._constraints[row] = None
        self._logprobs[row] = -1
        self._greedy[row] = True

    def params(self, row: int) -> SamplingParams:
        """Parameters of the sequence in `row`; KeyError if there is none."""
        params = self._params[row]
        if params is None:
            raise KeyError(f"no sequence in row {row}")
        return params

    def sample(self, logits: torch.Tensor, rows: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> Sampled:
        """Choose the next token of each of `rows` ([m], distinct) from `logits` (float32 [m, vocab], on this device).

        `logits` is overwritten.
        """
        return self._sample(logits.contiguous(), rows.astype(np.int64))

    def _sample(self, logits: torch.Tensor, rows: npt.NDArray[np.int64]) -> Sampled:
        greedy = self._greedy[rows]
        constrained = [(i, c) for i, row in enumerate(rows.tolist()) if (c := self._constraints[row]) is not None]
        asked = np.flatnonzero(self._logprobs[rows] >= 0)
        exhausted = np.zeros(len(rows), np.bool_)
        tokens: npt.NDArray[np.int64]

        if greedy.all() and not constrained and not len(asked):
            tokens, finite = _argmax(logits)
        else:
            finite = logits.amax(-1).isfinite().cpu().numpy()
            if not finite.all():
                logits[self._to_device(~finite)] = 0.0
            raw = torch.log_softmax(self._select(logits, asked), -1) if len(asked) else None
            if constrained:
                apply_constraints(logits, constrained)
                index = np.array([i for i, _ in constrained])
                forbidden = index[(self._select(logits, index).amax(-1) == -torch.inf).cpu().numpy()]
                if len(forbidden):
                    exhausted[forbidden] = True
                    logits[self._to_device(forbidden)] = 0.0
            tokens = np.zeros(len(rows), np.int64)
            index = np.flatnonzero(greedy)
            if len(index):
                tokens[index] = _argmax(self._select(logits, index))[0]
            drawn = np.flatnonzero(~greedy)
            tokens[drawn] = self._draw(logits, rows[drawn], drawn)

        chosen = finite & ~exhausted
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if len(asked):
            assert raw is not None
            made = token_logprobs(raw, tokens[asked], self._logprobs[rows[asked]])
            for i, entry in zip(asked.tolist(), made, strict=True):
                logprobs[i] = entry if chosen[i] else None
        self._positions[rows[chosen]] += 1
        for i, constraints in constrained:
            if chosen[i]:
                constraints.append(int(tokens[i]))
        return Sampled(tokens.astype(np.int32), logprobs, finite, exhausted)

    def _draw(
        self, logits: torch.Tensor, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """A token for each of `rows`, drawn at random from the rows of `logits` at `places`."""
        tokens = np.zeros(len(rows), np.int64)
        uniforms = uniform(self._seeds[rows], self._positions[rows])
        chunk = max(1, _CHUNK // self.vocab_size)
        for truncated in (False, True):
            same = np.flatnonzero(self._truncated[rows] == truncated)
            for index in (same[i : i + chunk] for i in range(0, len(same), chunk)):
                taken = rows[index]
                scaled = self._select(logits, places[index]) / self._to_device(self._temperature[taken])[:, None]
                probabilities = torch.softmax(scaled, -1)
                u = self._to_device(uniforms[index])
                if truncated:
                    top_k, top_p, min_p = (self._to_device(x[taken]) for x in (self._top_k, self._top_p, self._min_p))
                    chosen = draw_truncated(scaled, probabilities, top_k, top_p, min_p, u)
                else:
                    chosen = draw(probabilities, u)
                tokens[index] = chosen.cpu().numpy()
        return tokens

    def _select(self, logits: torch.Tensor, index: npt.NDArray[np.int64]) -> torch.Tensor:
        """Rows `index` of `logits`; the tensor itself if these are all."""
        return logits if len(index) == len(logits) else logits[self._to_device(index)]

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def prompt_logprobs(logits: torch.Tensor, next_token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Log probabilities of the tokens that follow in the prompt: `logits` float32 [t, vocab], `next_token_ids` [t]."""
    made: list[TokenLogprobs] = []
    chunk = max(1, _CHUNK // logits.shape[1])
    for start in range(0, len(logits), chunk):
        tokens = np.asarray(next_token_ids[start : start + chunk], np.int64)
        raw = torch.log_softmax(logits[start : start + chunk].float(), -1)
        made += token_logprobs(raw, tokens, np.full(len(tokens), k, np.int64))
    return made


def token_logprobs(
    raw: torch.Tensor, tokens: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> list[TokenLogprobs]:
    """For log probabilities `raw` float32 [m, vocab], the tokens that stand there [m], how many others to give [m]."""
    own = raw.gather(1, torch.from_numpy(tokens).to(raw.device)[:, None])
    ranks = ((raw > own).sum(-1) + 1).tolist()
    made = [
        TokenLogprobs([token], [value], rank)
        for token, value, rank in zip(tokens.tolist(), own[:, 0].tolist(), ranks, strict=True)
    ]
    counts = np.minimum(counts, raw.shape[1])
    most = int(counts.max(initial=0))
    if most:
        cut = raw.topk(most, dim=-1).values[:, -1]
        for group, values, indices, _ in candidates_above(raw, torch.arange(len(raw), device=raw.device), cut):
            for row, ids, logprobs in zip(group.tolist(), indices.tolist(), values.tolist(), strict=True):
                made[row].token_ids += ids[: counts[row]]
                made[row].logprobs += logprobs[: counts[row]]
    return made


def _argmax(logits: torch.Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """First largest logit of each row (a NaN counts as largest), and whether it is finite."""
    if logits.device.type == "cpu":  # measured: NumPy's is six times as fast as torch's here
        array = logits.numpy()
        tokens = array.argmax(-1)
        return tokens, np.isfinite(array[np.arange(len(array)), tokens])
    best = logits.argmax(-1)
    return best.cpu().numpy(), logits.gather(1, best[:, None])[:, 0].isfinite().cpu().numpy()
