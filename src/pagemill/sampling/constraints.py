"""Applies to logits what a request's parameters demand before a token is drawn: bans, biases and penalties.

Each row that uses any of them has a `RowConstraints`, which is told each token of the sequence. `apply_constraints`
edits a batch of logits through index lists, so its work grows with the tokens concerned, not with the vocabulary. The
order is vLLM's: allowed tokens, bad words, min_tokens, logit_bias, penalties.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagemill.sampling.params import SamplingParams

Ids = npt.NDArray[np.int64]


class RowConstraints:
    """Holds the state of one sequence. Token arrays are int64, counts and biases float32."""

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        prompt: npt.NDArray[np.int32],
        output: npt.NDArray[np.int32],
    ) -> None:
        self.allowed = (
            None if params.allowed_token_ids is None else np.unique(np.array(params.allowed_token_ids, np.int64))
        )
        bad_words = params.bad_words_token_ids or []
        self._bad_tokens = [words[0] for words in bad_words if len(words) == 1]
        self._bad_sequences: dict[int, list[list[int]]] = {}
        """Sequences that must not be completed, by their last token but one."""
        for words in bad_words:
            if len(words) > 1:
                self._bad_sequences.setdefault(words[-2], []).append(words)
        self._min_tokens = params.min_tokens
        self._stops = sorted({*params.stop_token_ids, *eos_token_ids}) if params.min_tokens else []
        bias = params.logit_bias or {}
        self.bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        self.repetition = params.repetition_penalty
        self.frequency = params.frequency_penalty
        self.presence = params.presence_penalty
        self.penalized = self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0
        self._length = 0
        self._tail: list[int] = []
        self._tail_length = max((len(words) for words in bad_words), default=1) - 1
        self._place: dict[int, int] = {}
        self._seen_ids = np.empty(64, np.int64)
        self._seen_counts = np.empty(64, np.float32)
        if self.penalized and self.repetition != 1.0:
            for token in np.unique(prompt).tolist():
                self._see(token)
        for token in output.tolist():
            self.append(token)

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Returns True if these parameters constrain logits at all."""
        return bool(
            params.allowed_token_ids is not None
            or params.bad_words_token_ids
            or params.min_tokens
            or params.logit_bias
            or params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )

    def append(self, token: int) -> None:
        """Takes note of a token that joined the output."""
        self._length += 1
        if self._tail_length:
            self._tail = [*self._tail, token][-self._tail_length :]
        if self.penalized:
            place = self._see(token)  # first: it may replace the arrays by longer ones
            self._seen_counts[place] += 1.0

    def _see(self, token: int) -> int:
        place = self._place.get(token, -1)
        if place >= 0:
            return place
        place = self._place[token] = len(self._place)
        if place == len(self._seen_ids):
            self._seen_ids = np.resize(self._seen_ids, 2 * place)
            self._seen_counts = np.resize(self._seen_counts, 2 * place)
        self._seen_ids[place], self._seen_counts[place] = token, 0.0
        return place

    def seen(self) -> tuple[Ids, npt.NDArray[np.float32]]:
        """Returns the tokens that a penalty may concern, each once, and their counts in the output (0: prompt only)."""
        count = len(self._place)
        return self._seen_ids[:count], self._seen_counts[:count]

    def banned(self) -> list[int]:
        """Returns the tokens that must not come next, some perhaps twice."""
        banned = list(self._bad_tokens)
        ending = self._bad_sequences.get(self._tail[-1], ()) if self._tail else ()
        banned += [words[-1] for words in ending if self._tail[1 - len(words) :] == words[:-1]]
        if self._length < self._min_tokens:
            banned += self._stops
        return banned


def apply_constraints(logits: torch.Tensor, rows: Sequence[tuple[int, RowConstraints]]) -> None:
    """Edits `logits`, float32 [m, vocab], contiguous, in place.

    rows: pairs of a row of `logits` and its constraints.
    """
    vocab_size = logits.shape[1]
    flat = logits.view(-1)

    def places(ids: list[Ids]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(ids)).to(logits.device)

    limited = [(row, c.allowed) for row, c in rows if c.allowed is not None]
    if limited:
        index = places([row * vocab_size + allowed for row, allowed in limited])
        kept = flat[index]
        for row, _ in limited:
            _forbid_all(logits[row])
        flat[index] = kept
    banned = [row * vocab_size + np.array(ids, np.int64) for row, c in rows if (ids := c.banned())]
    if banned:
        flat[places(banned)] = -torch.inf
    biased = [(row, c) for row, c in rows if len(c.bias_ids)]
    if biased:
        index = places([row * vocab_size + c.bias_ids for row, c in biased])
        flat[index] = flat[index] + torch.from_numpy(np.concatenate([c.bias_values for _, c in biased])).to(
            logits.device
        )
    penalized = [(row, c, *c.seen()) for row, c in rows if c.penalized]
    if penalized:
        _apply_penalties(flat, vocab_size, penalized)


def _forbid_all(row: torch.Tensor) -> None:
    if row.is_cpu:
        row.numpy().fill(-np.inf)  # torch would wake threads of its own
    else:
        row.fill_(-torch.inf)


def _apply_penalties(
    flat: torch.Tensor, vocab_size: int, rows: list[tuple[int, RowConstraints, Ids, npt.NDArray[np.float32]]]
) -> None:
    lengths = [len(ids) for _, _, ids, _ in rows]
    index = torch.from_numpy(np.concatenate([row * vocab_size + ids for row, _, ids, _ in rows])).to(flat.device)
    counts = np.concatenate([counts for _, _, _, counts in rows])
    penalties = np.array([(c.repetition, c.frequency, c.presence) for _, c, _, _ in rows], np.float32)
    repetition, frequency, presence = np.repeat(penalties, lengths, axis=0).T
    subtract = torch.from_numpy(frequency * counts + presence * (counts > 0)).to(flat.device)
    scale = torch.from_numpy(np.ascontiguousarray(repetition)).to(flat.device)
    values = flat[index]
    flat[index] = torch.where(values > 0, values / scale, values * scale) - subtract
