"""Keeps the compiled grammars of an engine, those of its requests and those last used, for each namespace apart."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLTokenizer

from pagemill.errors import SamplingParamsError
from pagemill.sampling.grammar import Key, compile_grammar, key_of, lark_of
from pagemill.sampling.roomy_threads import RoomyThread, in_roomy_thread
from pagemill.sampling.structured import StructuredOutputsParams

MAX_GRAMMARS = 64
MAX_CHARACTERS = 1 << 20
"""Grammars last used that are kept, whether or not a request holds them, and the characters that they may have
together: each takes 45 KB, about 90 bytes a character, and up to 15 MB for the automaton that answers make of it."""


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
        self._known: WeakValueDictionary[tuple[bytes, Key], Future[CompiledGrammar]] = WeakValueDictionary()
        """All that somebody holds."""
        self._kept: OrderedDict[tuple[bytes, Key], Future[CompiledGrammar]] = OrderedDict()
        """Grammars that were used last, the latest at the end."""
        self._characters = 0
        self._thread = RoomyThread()

    def prepare(self, asked: StructuredOutputsParams, root: bytes) -> Future[CompiledGrammar]:
        """Begins to compile a grammar that is not there; it stays there while this future is held. Its error is
        `SamplingParamsError` for what does not compile."""
        key = root, key_of(asked)
        future = self._known.get(key)
        if future is None:
            future = self._known[key] = self._thread.submit(lambda: self._compile(asked))
        return future

    def compiled(self, asked: StructuredOutputsParams, root: bytes) -> CompiledGrammar:
        """Returns a grammar for a row. Waits for it, and raises `SamplingParamsError` for what does not compile."""
        key = root, key_of(asked)
        future = self._known.get(key)
        if future is None:
            future = self._known[key] = in_roomy_thread(lambda: self._compile(asked), at_once=True)
        grammar = future.result()
        if key not in self._kept:
            self._kept[key] = future
            self._characters += _characters(key[1])
        self._kept.move_to_end(key)
        while len(self._kept) > MAX_GRAMMARS or self._characters > MAX_CHARACTERS:
            (_, oldest), _ = self._kept.popitem(last=False)
            self._characters -= _characters(oldest)
        return grammar

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
