"""Holds rows of the persistent batch to grammars: says which tokens may come next in each.

A matcher follows each row's answer. What it allows next is computed in a thread as soon as a row has its token, beside
the commit and the next forward pass, without the interpreter's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from pagemill.errors import SamplingParamsError
from pagemill.sampling.grammar import compile_grammar, in_roomy_thread, lark_of, why_stuck
from pagemill.sampling.kernels import Mask
from pagemill.sampling.structured import StructuredOutputsParams

MAX_GRAMMARS = 64
"""Compiled grammars that are kept, the last used."""
MAX_MASKS = 256
"""Masks that are kept as lists of tokens: most rows of one grammar stand at the same few places."""


class Grammars:
    """Compiles grammars over a model's vocabulary, each once. One thread calls it."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """tokenizer_json: returns the tokenizer in Hugging Face's form; called when there is a first grammar."""
        self.vocab_size = vocab_size
        self.eos_token_ids = [*eos_token_ids]
        self._tokenizer_json = tokenizer_json
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def prepare(self, asked: StructuredOutputsParams) -> bool:
        """Begins to compile a grammar that is not there. Returns whether `matcher` need not wait for it. Raises
        `SamplingParamsError` once it has turned out not to compile."""
        future = self._of(lark_of(asked))
        if future.done() and (error := future.exception()) is not None:
            raise error
        return future.done()

    def matcher(self, asked: StructuredOutputsParams) -> LLMatcher:
        """Returns a matcher of its own at the beginning of an answer. Waits for it, and raises as `prepare` does."""
        return self._of(lark_of(asked)).result().deep_copy()

    def _of(self, lark: str) -> Future[LLMatcher]:
        if lark not in self._compiled:
            self._compiled[lark] = in_roomy_thread(lambda: self._compile(lark))
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(lark)
        return self._compiled[lark]

    def _compile(self, lark: str) -> LLMatcher:
        if not self.eos_token_ids:
            raise SamplingParamsError(
                "structured_outputs need a model with an end-of-sequence token; leave them out",
                param="structured_outputs",
            )
        if self._vocabulary is None:
            try:
                self._vocabulary = LLTokenizer(
                    self._tokenizer_json(), n_vocab=self.vocab_size, eos_token=self.eos_token_ids
                )
            except ValueError as error:
                raise SamplingParamsError(
                    f"structured_outputs cannot be had with this model's tokenizer: {error}; leave them out",
                    param="structured_outputs",
                ) from None
        return compile_grammar(self._vocabulary, lark)


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
        self._matchers: dict[int, LLMatcher] = {}
        self._failures: dict[int, SamplingParamsError] = {}
        self._masks: OrderedDict[bytes, Mask] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "masks")
        self._parallel = LLExecutor(1)
        self._begun: Future[None] | None = None

    def prepare(self, asked: StructuredOutputsParams) -> bool:
        """Does what `Grammars.prepare` does."""
        return self._grammars.prepare(asked)

    def add(self, row: int, asked: StructuredOutputsParams, output: NDArray[np.int32]) -> None:
        """Gives a row to a sequence that has generated `output` before."""
        self._failures.pop(row, None)
        try:
            matcher = self._grammars.matcher(asked)
        except SamplingParamsError as error:
            self._failures[row] = error
            return
        self._matchers[row] = matcher
        self._begun = self._thread.submit(self._advance, [(row, matcher, output.tolist())])

    def remove(self, row: int) -> None:
        """Takes a row from the sequence that leaves."""
        self._matchers.pop(row, None)
        self._failures.pop(row, None)

    def append(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes note of the tokens that joined the answers of these rows, one each, and begins the next masks."""
        work = [(row, self._matchers[row], [token]) for row, token in zip(rows, tokens, strict=True)]
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

    def _advance(self, work: list[tuple[int, LLMatcher, list[int]]]) -> None:
        """Moves matchers over tokens, and writes what may come next."""
        wanted = []
        for row, matcher, tokens in work:
            for token in tokens:
                if not matcher.is_stopped():
                    matcher.consume_token(token)
            if matcher.is_stopped() and not matcher.is_error():
                self._bits[row] = self._end
            else:
                wanted.append((matcher, row))
        if wanted:
            self._parallel.unsafe_compute_mask_ptr(
                wanted, self._bits.ctypes.data, self._bits.shape[1] * self._bits.itemsize, len(self._bits)
            )
        for matcher, row in wanted:
            if matcher.is_error() and self._matchers.get(row) is matcher:
                self._failures[row] = SamplingParamsError(
                    f"structured_outputs lead no further here: {why_stuck(matcher)}; change or simplify them",
                    param="structured_outputs",
                )
