"""Keeps the compiled grammars of an engine, those last used, for each namespace apart."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from llguidance import LLMatcher, LLTokenizer

from pagemill.errors import SamplingParamsError
from pagemill.sampling.grammar import compile_grammar, in_roomy_thread, lark_of
from pagemill.sampling.structured import StructuredOutputsParams

MAX_GRAMMARS = 1024
MAX_CHARACTERS = 1 << 22
"""Compiled grammars that are kept, and the characters that they may have together, which their memory grows with."""


class Grammars:
    """Compiles grammars over a model's vocabulary, each once in a namespace: how long a request waits for its own says
    nothing of what others asked for. One thread calls it.

    `root` stands for the namespace.
    """

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """tokenizer_json: returns the tokenizer in Hugging Face's form; called when there is a first grammar."""
        self.vocab_size = vocab_size
        self.eos_token_ids = [*eos_token_ids]
        self._tokenizer_json = tokenizer_json
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[bytes, str], Future[LLMatcher]] = OrderedDict()
        self._characters = 0

    def prepare(self, asked: StructuredOutputsParams, root: bytes) -> bool:
        """Begins to compile a grammar that is not there. Returns whether `matcher` need not wait for it. Raises
        `SamplingParamsError` once it has turned out not to compile."""
        future = self._of(root, lark_of(asked))
        if future.done() and (error := future.exception()) is not None:
            raise error
        return future.done()

    def matcher(self, asked: StructuredOutputsParams, root: bytes) -> LLMatcher:
        """Returns a matcher of its own at the beginning of an answer. Waits for it, and raises as `prepare` does."""
        return self._of(root, lark_of(asked)).result().deep_copy()

    def _of(self, root: bytes, lark: str) -> Future[LLMatcher]:
        key = root, lark
        future = self._compiled.get(key)
        if future is None:
            future = self._compiled[key] = in_roomy_thread(lambda: self._compile(lark))
            self._characters += len(lark)
            self._forget()
        else:
            self._compiled.move_to_end(key)
        return future

    def _forget(self) -> None:
        """Drops grammars that were used long ago, none that is being compiled: somebody waits for it."""
        for key in [*self._compiled]:
            if len(self._compiled) <= MAX_GRAMMARS and self._characters <= MAX_CHARACTERS:
                break
            if self._compiled[key].done():
                del self._compiled[key]
                self._characters -= len(key[1])

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
