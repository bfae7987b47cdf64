"""Holds rows of the persistent batch to grammars: says which tokens may come next in each.

A matcher follows each row's answer. What it allows next is computed in a thread as soon as a row has its token, beside
the commit and the next forward pass, without the interpreter's lock.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from pagemill.errors import SamplingParamsError
from pagemill.sampling.grammar import why_stuck
from pagemill.sampling.grammar_cache import Grammars
from pagemill.sampling.kernels import Mask
from pagemill.sampling.structured import StructuredOutputsParams

MAX_MASKS = 256
"""Masks that are kept as lists of tokens: most rows of one grammar stand at the same few places."""
WORK_S = 0.002
"""Seconds of a processor that following an answer may take for each of its tokens, on average: a hundred times what
usual forms take."""
WORK_AHEAD_S = 0.1
"""Seconds that it may take beyond that: the first tokens cost the most."""


@dataclass(slots=True)
class Followed:
    """An answer that is followed, and what that took."""

    matcher: LLMatcher
    tokens: int = 0
    seconds: float = 0.0

    def is_costly(self) -> bool:
        return self.seconds > WORK_AHEAD_S + self.tokens * WORK_S


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
        self._failures: dict[int, SamplingParamsError] = {}
        self._masks: OrderedDict[bytes, Mask] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "masks")
        self._begun: Future[None] | None = None

    def prepare(self, asked: StructuredOutputsParams, root: bytes) -> bool:
        """Does what `Grammars.prepare` does."""
        return self._grammars.prepare(asked, root)

    def add(self, row: int, asked: StructuredOutputsParams, root: bytes, output: NDArray[np.int32]) -> None:
        """Gives a row to a sequence that has generated `output` before."""
        self._failures.pop(row, None)
        try:
            followed = Followed(self._grammars.matcher(asked, root))
        except SamplingParamsError as error:
            self._failures[row] = error
            return
        self._followed[row] = followed
        self._begun = self._thread.submit(self._advance, [(row, followed, output.tolist())])

    def remove(self, row: int) -> None:
        """Takes a row from the sequence that leaves."""
        self._followed.pop(row, None)
        self._failures.pop(row, None)

    def append(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes note of the tokens that joined the answers of these rows, one each, and begins the next masks."""
        work = [(row, self._followed[row], [token]) for row, token in zip(rows, tokens, strict=True)]
        self._begun = self._thread.submit(self._advance, work)

    def failures(self, places: Sequence[int], rows: Sequence[int]) -> dict[int, Exception]:
        """Returns, by place, why rows cannot go on. `places` and `rows` belong together."""
        self._wait()
        return {place: self._failures[row] for place, row in zip(places, rows, strict=True) if row in self._failures}

    def allows(self, rows: NDArray[np.integer[Any]], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether these tokens may come next in these rows, one in each."""
        self._wait()
        bits = self._bits[rows, tokens // 32] >> (tokens % 32).astype(np.uint32)
        allowed: NDArray[np.bool_] = bits & np.uint32(1) != 0
        return allowed

    def mask(self, row: int) -> Mask:
        """Returns which tokens may come next in this row."""
        self._wait()
        bits = self._bits[row]
        key = bits.tobytes()
        if key not in self._masks:
            allowed = np.unpackbits(bits.view(np.uint8), count=self._grammars.vocab_size, bitorder="little")
            allows = 2 * np.count_nonzero(allowed) <= len(allowed)
            self._masks[key] = Mask(np.flatnonzero(allowed if allows else allowed == 0), allows)
            while len(self._masks) > MAX_MASKS:
                self._masks.popitem(last=False)
        self._masks.move_to_end(key)
        return self._masks[key]

    def _wait(self) -> None:
        if self._begun is not None:
            self._begun.result()
            self._begun = None

    def _advance(self, work: list[tuple[int, Followed, list[int]]]) -> None:
        """Moves matchers over tokens, and writes what may come next."""
        for row, followed, tokens in work:
            begin = time.thread_time()
            stuck = self._move(row, followed.matcher, tokens)
            followed.seconds += time.thread_time() - begin
            followed.tokens += len(tokens)
            if stuck is None and followed.is_costly():
                stuck = f"an answer may take {1e3 * WORK_S:g} ms a token to be followed, and this one takes more"
            if stuck is not None and self._followed.get(row) is followed:
                self._failures[row] = SamplingParamsError(
                    f"structured_outputs lead no further here: {stuck}; change or simplify them",
                    param="structured_outputs",
                )

    def _move(self, row: int, matcher: LLMatcher, tokens: list[int]) -> str | None:
        """Moves a row's matcher over tokens, and writes what may come next. Returns why it cannot, else None."""
        for token in tokens:
            if not matcher.is_stopped():
                matcher.consume_token(token)
        if matcher.is_stopped() and not matcher.is_error():
            self._bits[row] = self._end
            return None
        matcher.unsafe_compute_mask_ptr(self._bits[row].ctypes.data, self._bits[row].nbytes)
        return why_stuck(matcher) if matcher.is_error() else None
