"""Holds the library that answers are held to forms by, llguidance, against xgrammar: compiling, masks, tokens taken.

    pip install xgrammar
    python -m benchmarks.grammar_libraries [--model smollm2-135m] [--running 64] [--tokens 60]

For each of four schemas: the time to compile it, and, for `running` answers along random tokens that it allows, the
times to compute all masks and to take all tokens of a step, means over the steps, in one thread.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from importlib.metadata import version
from statistics import median

import numpy as np
import xgrammar
from benchmarks.structured import INVOICE
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from pagemill.doctor import cpu_model
from pagemill.sampling.grammar import LIMITS, lark_of
from pagemill.sampling.structured import StructuredOutputsParams
from pagemill.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
}
WIDE = {
    "type": "object",
    "properties": {f"property_{i}": {"type": "string"} for i in range(100)},
    "required": [f"property_{i}" for i in range(100)],
    "additionalProperties": False,
}
SCHEMAS = {"person": PERSON, "invoice": INVOICE, "tree": TREE, "100 properties": WIDE}
COMPILATIONS = 5


class Llguidance:
    """As pagemill uses it."""

    name = f"llguidance {version('llguidance')}"

    def __init__(self, tokenizer: Tokenizer, running: int) -> None:
        self.vocabulary = LLTokenizer(
            tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=[tokenizer.eos_token_id]
        )
        self.bits = np.zeros((running, -(-tokenizer.vocab_size // 32)), np.int32)
        self.executor = LLExecutor(1)

    def compile(self, schema: dict) -> LLMatcher:
        lark = lark_of(StructuredOutputsParams(json=schema))
        return LLMatcher(self.vocabulary, LLMatcher.grammar_from_lark(lark), limits=LIMITS, log_level=0)

    def matchers(self, compiled: LLMatcher) -> list[LLMatcher]:
        return [compiled.deep_copy() for _ in self.bits]

    def fill(self, matchers: list[LLMatcher]) -> None:
        places = [(matcher, row) for row, matcher in enumerate(matchers)]
        row_bytes = self.bits.shape[1] * self.bits.itemsize
        self.executor.unsafe_compute_mask_ptr(places, self.bits.ctypes.data, row_bytes, len(self.bits))

    def take(self, matchers: list[LLMatcher], tokens: list[int]) -> None:
        for matcher, token in zip(matchers, tokens, strict=True):
            matcher.consume_token(token)

    def is_over(self, matcher: LLMatcher) -> bool:
        return bool(matcher.is_stopped())


class Xgrammar:
    name = f"xgrammar {version('xgrammar')}"

    def __init__(self, tokenizer: Tokenizer, running: int) -> None:
        size = tokenizer.vocab_size
        info = xgrammar.TokenizerInfo(
            tokenizer.names_of(range(size)),
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=size,
            stop_token_ids=[tokenizer.eos_token_id],
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.masks = xgrammar.allocate_token_bitmask(running, size)
        self.bits = self.masks.numpy()

    def compile(self, schema: dict) -> xgrammar.CompiledGrammar:
        return self.compiler.compile_json_schema(schema, any_whitespace=True)

    def matchers(self, compiled: xgrammar.CompiledGrammar) -> list[xgrammar.GrammarMatcher]:
        return [xgrammar.GrammarMatcher(compiled) for _ in self.bits]

    def fill(self, matchers: list[xgrammar.GrammarMatcher]) -> None:
        for row, matcher in enumerate(matchers):
            matcher.fill_next_token_bitmask(self.masks, row)

    def take(self, matchers: list[xgrammar.GrammarMatcher], tokens: list[int]) -> None:
        for matcher, token in zip(matchers, tokens, strict=True):
            matcher.accept_token(token)

    def is_over(self, matcher: xgrammar.GrammarMatcher) -> bool:
        return bool(matcher.is_terminated())


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(library: Llguidance | Xgrammar, schema: dict, tokens: int) -> tuple[float, float, float]:
    """Returns the milliseconds of compiling, of a step's masks and of a step's tokens."""
    compiling = median(seconds(lambda: library.compile(schema)) for _ in range(COMPILATIONS))
    compiled, rng = library.compile(schema), random.Random(1)
    matchers, filling, taking = library.matchers(compiled), [], []
    for _ in range(tokens):
        over = {row for row, matcher in enumerate(matchers) if library.is_over(matcher)}
        if over:
            new = library.matchers(compiled)
            matchers = [new[row] if row in over else matcher for row, matcher in enumerate(matchers)]
        filling.append(seconds(lambda now=matchers: library.fill(now)))
        masks = np.unpackbits(library.bits.view(np.uint8), axis=1, bitorder="little")
        chosen = [int(rng.choice(np.flatnonzero(mask))) for mask in masks]
        taking.append(seconds(lambda now=matchers, next_=chosen: library.take(now, next_)))
    return 1e3 * compiling, 1e3 * sum(filling) / tokens, 1e3 * sum(taking) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=60)
    given = parser.parse_args()
    tokenizer = Tokenizer.from_path(given.model)
    print(f"{cpu_model()}; {tokenizer.vocab_size} tokens; {given.running} answers of {given.tokens} tokens")
    print("library | schema | compile, ms | masks, ms a step | tokens, ms a step")
    for make in (Llguidance, Xgrammar):
        begin = time.perf_counter()
        library = make(tokenizer, given.running)
        print(f"{library.name} | reads the vocabulary | {1e3 * (time.perf_counter() - begin):.0f} | |")
        for name, schema in SCHEMAS.items():
            compiling, filling, taking = measure(library, schema, given.tokens)
            print(f"{library.name} | {name} | {compiling:.1f} | {filling:.2f} | {taking:.2f}")


if __name__ == "__main__":
    main()
