"""Holds rows of the persistent batch to grammars: says which tokens may come next in each.

A matcher follows each row's answer. What it allows next is computed in a thread as soon as a row has its token, beside
the commit and the next forward pass, without the interpreter's lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import SamplingParamsError
from pagemill.sampling.grammar import why_stuck
from pagemill.sampling.grammar_cache import CompiledGrammar, Grammars
from pagemill.sampling.structured import StructuredOutputsParams

MOST_AT_ONCE = 256
"""Tokens that may follow each other without a mask: its limits are counted from mask to mask."""
WORK_S = 0.002
"""Seconds of a processor that following an answer may take for each of its tokens, on average: a hundred times what
usual forms take."""
WORK_AHEAD_S = 0.1
"""Seconds that it may take beyond that: the first tokens cost the most."""


class Followed:
    """An answer that is followed, and what that took."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.failure: SamplingParamsError | None = None
        """Why it cannot go on."""
        self._grammar = grammar
        self._beginning = grammar.beginning
        self.matcher = self._beginning.deep_copy()
        self._tokens: list[int] = []
        self._seconds = 0.0

    def go_on(self, tokens: list[int], mask: NDArray[np.uint32]) -> str | None:
        """Moves on by tokens, and writes what may come next, unless the answer is complete. Returns why it cannot, else
        None."""
        begin = time.thread_time()
        self._tokens += tokens
        self._compute(tokens, mask)
        if self.matcher.is_error():  # it may be but the automaton that is full, in one of several words
            self._beginning = self._grammar.renew(self._beginning)
            self.matcher = self._beginning.deep_copy()
            self._seconds += self._grammar.seconds
            self._compute(self._tokens, mask)
        self._seconds += time.thread_time() - begin
        if self.matcher.is_error():
            return why_stuck(self.matcher)
        if self._seconds > WORK_AHEAD_S + len(self._tokens) * WORK_S:
            return f"an answer may take {1e3 * WORK_S:g} ms a token to be followed, and this one takes more"
        return None

    def _compute(self, tokens: list[int], mask: NDArray[np.uint32]) -> None:
        for begin in range(0, max(len(tokens), 1), MOST_AT_ONCE):
            for token in tokens[begin : begin + MOST_AT_ONCE]:
                if not self.matcher.is_stopped():
                    self.matcher.consume_token(token)
            if not self.matcher.is_stopped():
                self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    @property
    def is_complete(self) -> bool:
        return bool(self.matcher.is_stopped() and not self.matcher.is_error())


class GrammarRows:
    """Follows the answers of up to `max_rows` rows.

    What is begun in its thread is done in the order in which it was begun, so that a row can be given again at once.
    """

    def __init__(self, grammars: Grammars, max_rows: int) -> None:
        self._grammars = grammars
        self._bits = np.zeros((max_rows, -(-grammars.vocab_size // 32)), np.uint32)
        self._end = np.zeros(self._bits.shape[1], np.uint32)
        for token in grammars.eos_token_ids:
            self._end[token // 32] |= np.uint32(1 << token % 32)
        self._followed: dict[int, Followed] = {}
        self._refused: dict[int, SamplingParamsError] = {}
        """Why rows have a grammar that does not compile."""
        self._thread = ThreadPoolExecutor(1, "masks")
        self._begun: Future[None] | None = None

    def prepare(self, asked: StructuredOutputsParams, root: bytes) -> Future[CompiledGrammar]:
        """Does what `Grammars.prepare` does."""
        return self._grammars.prepare(asked, root)

    def add(self, row: int, asked: StructuredOutputsParams, root: bytes, output: NDArray[np.int32]) -> None:
        """Gives a row to a sequence that has generated `output` before."""
        self._refused.pop(row, None)
        try:
            followed = Followed(self._grammars.compiled(asked, root))
        except SamplingParamsError as error:
            self._refused[row] = error
            return
        self._followed[row] = followed
        self._begun = self._thread.submit(self._advance, [(row, followed, output.tolist())])

    def remove(self, row: int) -> None:
        """Takes a row from the sequence that leaves."""
        self._followed.pop(row, None)
        self._refused.pop(row, None)

    def append(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes note of the tokens that joined the answers of these rows, one each, and begins the next masks."""
        work = [(row, self._followed[row], [token]) for row, token in zip(rows, tokens, strict=True)]
        self._begun = self._thread.submit(self._advance, work)

    def failures(self, places: Sequence[int], rows: Sequence[int]) -> dict[int, Exception]:
        """Returns, by place, why rows cannot go on. `places` and `rows` belong together."""
        self._wait()
        failures = ((place, self._failure(row)) for place, row in zip(places, rows, strict=True))
        return {place: failure for place, failure in failures if failure is not None}

    def _failure(self, row: int) -> SamplingParamsError | None:
        followed = self._followed.get(row)
        return self._refused.get(row) if followed is None else followed.failure

    def allowed(self) -> NDArray[np.uint32]:
        """Returns bits [max_rows, ceil(vocab_size / 32)]: which tokens may come next in each row."""
        self._wait()
        return self._bits

    def allows(self, rows: NDArray[np.integer[Any]], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether these tokens may come next in these rows, one in each."""
        self._wait()
        bits = self._bits[rows, tokens // 32] >> (tokens % 32).astype(np.uint32)
        allowed: NDArray[np.bool_] = bits & np.uint32(1) != 0
        return allowed

    def _wait(self) -> None:
        if self._begun is not None:
            self._begun.result()
            self._begun = None

    def _advance(self, work: list[tuple[int, Followed, list[int]]]) -> None:
        """Moves answers on by their tokens, and writes what may come next."""
        for row, followed, tokens in work:
            try:
                stuck = followed.go_on(tokens, self._bits[row])
            except Exception as error:  # others' rows go on
                stuck = f"{type(error).__name__}: {error}"
            if followed.is_complete:
                self._bits[row] = self._end
            if stuck is not None:
                followed.failure = SamplingParamsError(
                    f"structured_outputs lead no further here: {stuck}; change or simplify them",
                    param="structured_outputs",
                )
