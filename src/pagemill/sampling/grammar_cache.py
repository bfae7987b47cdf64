"""Keeps the compiled grammars of an engine, those last used, for each namespace apart."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from llguidance import LLMatcher, LLTokenizer

from pagemill.errors import SamplingParamsError
from pagemill.sampling.grammar import Key, compile_grammar, in_roomy_thread, key_of, lark_of
from pagemill.sampling.structured import StructuredOutputsParams

MAX_GRAMMARS = 64
MAX_CHARACTERS = 1 << 20
"""Compiled grammars that are kept, and the characters that they may have together: each takes 45 KB, about 90 bytes a
character, and up to 15 MB for the automaton that answers make of it."""


class CompiledGrammar:
    """A grammar over a model's vocabulary, for any number of answers.

    They share an automaton, which grows as they meet new states. When it is full (`LIMITS`), it is made anew: most of
    its states are of tokens that could have come and did not.
    """

    def __init__(self, vocabulary: LLTokenizer, lark: str) -> None:
        begin = time.thread_time()
        self.beginning = compile_grammar(vocabulary, lark)
        """A matcher at the beginning of an answer, to be copied."""
        self.seconds = time.thread_time() - begin
        """What compiling takes."""
        self._vocabulary, self._lark = vocabulary, lark

    def renew(self, spent: LLMatcher) -> LLMatcher:
        """Returns a `beginning` with another automaton than that of `spent`, which was one before."""
        if self.beginning is spent:
            made = in_roomy_thread(lambda: compile_grammar(self._vocabulary, self._lark), at_once=True)
            self.beginning = made.result()
        return self.beginning


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
        self._compiled: OrderedDict[tuple[bytes, Key], Future[CompiledGrammar]] = OrderedDict()
        self._characters = 0

    def prepare(self, asked: StructuredOutputsParams, root: bytes) -> bool:
        """Begins to compile a grammar that is not there. Returns whether `compiled` need not wait for it. Raises
        `SamplingParamsError` once it has turned out not to compile."""
        future = self._of(root, asked)
        if future.done() and (error := future.exception()) is not None:
            raise error
        return future.done()

    def compiled(self, asked: StructuredOutputsParams, root: bytes) -> CompiledGrammar:
        """Returns a grammar. Waits for it, and raises as `prepare` does."""
        return self._of(root, asked, at_once=True).result()

    def _of(self, root: bytes, asked: StructuredOutputsParams, at_once: bool = False) -> Future[CompiledGrammar]:
        key = root, key_of(asked)
        future = self._compiled.get(key)
        if future is None:
            future = self._compiled[key] = in_roomy_thread(lambda: self._compile(asked), at_once)
            self._characters += _characters(key[1])
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
                self._characters -= _characters(key[1])

    def _compile(self, asked: StructuredOutputsParams) -> CompiledGrammar:
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
        return CompiledGrammar(self._vocabulary, lark_of(asked))


def _characters(key: Key) -> int:
    return sum(len(part) for part in key if isinstance(part, str))
