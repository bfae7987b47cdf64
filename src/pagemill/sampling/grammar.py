"""Makes grammars of what requests demand of the form of their answers, and checks them before an engine sees them.

Every form becomes one grammar in llguidance's dialect of Lark's syntax, so that the engine knows only that. A front end
compiles it over a vocabulary of single bytes, which takes a thousandth of the memory that the model's takes.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from pagemill.errors import SamplingParamsError
from pagemill.namespace import Namespace
from pagemill.sampling.literals import check_literals
from pagemill.sampling.roomy_threads import in_roomy_thread
from pagemill.sampling.schema_formats import leave_out_unknown_formats
from pagemill.sampling.structured import StructuredOutputsParams

LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""What one grammar may cost: about 0.3 s to compile, 5 ms for a mask, 15 MB for its automaton."""
WHITESPACE = r"[ \n\r\t]{1,40}"
"""White space between the parts of JSON, where there is any: a model that has begun it must come to an end."""
ASCII_CLASSES = "dws"
"""Classes of regular expressions that stand for ASCII alone, as in JSON schemas and for vLLM: what reads a date or a
number seldom takes the digits of all scripts."""
FREE_TOKENS = '%llguidance {"no_forcing": true}'
"""Leaves it to the model how a text that must come is cut into tokens. To look for the only cut there is would take
time in proportion to that text, for every token, and an expression of a few characters may stand for a million."""
MAX_VERDICTS = 256
MAX_REASON = 300

Key: TypeAlias = "tuple[str | bool | None, ...]"


def key_of(asked: StructuredOutputsParams) -> Key:
    """Returns what two demands for the same form have in common, in little time."""
    own = asked.json, asked.json_object, asked.regex, asked.grammar, asked.disable_any_whitespace
    return *own, asked.whitespace_pattern, *(asked.choice or ())


def lark_of(asked: StructuredOutputsParams) -> str:
    """Returns the grammar. Raises `SamplingParamsError` for what cannot be turned into one."""
    if asked.json is not None or asked.json_object:
        return _of_schema(
            None if asked.json is None else str(asked.json),
            asked.disable_any_whitespace,
            asked.whitespace_pattern or WHITESPACE,
        )
    if asked.regex is not None:
        rules = f"start: /{regex_to_lark(asked.regex, ASCII_CLASSES)}/"
    elif asked.choice is not None:
        rules = f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, asked.choice))}"
    else:
        return _of_grammar(str(asked.grammar))
    return _without_forcing(rules)


def compile_grammar(vocabulary: LLTokenizer, lark: str) -> LLMatcher:
    """Returns a matcher at the beginning of an answer. Raises `SamplingParamsError` for what does not compile."""
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(lark), limits=LIMITS, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some limits are met only here
    if matcher.is_error():
        raise _refusal(why_stuck(matcher) if "NoExtension" in matcher.get_error() else matcher.get_error())
    return matcher


def why_stuck(matcher: LLMatcher) -> str:
    """Returns in words why a matcher that has failed finds no next token."""
    reason = matcher.get_error().splitlines()[0]
    if "NoExtension" in reason:
        return "no text ends it, or what must come next cannot be written with this model's tokens"
    return reason


class GrammarChecker:
    """Tells whether grammars compile, and remembers it. Several threads may ask.

    special_tokens: ids, by their texts, of the tokens that a grammar may name, as in `<|im_end|>` or `<[2]>`.
    missing_characters: returns the characters of a text that the model's tokens cannot write.
    """

    def __init__(self, special_tokens: Mapping[str, int], missing_characters: Callable[[str], str]) -> None:
        self._missing_characters = missing_characters
        self._numbers = {str(token_id): number for number, token_id in enumerate(special_tokens.values(), 1)}
        """Numbers that special tokens have among the few tokens here, by their ids as text."""
        self._vocabulary = LLTokenizer(TokenizerWrapper(_Bytes(special_tokens)))
        self._verdicts: OrderedDict[tuple[Namespace, Key], str | None] = OrderedDict()

    def check(self, asked: StructuredOutputsParams, space: Namespace) -> None:
        """Raises `SamplingParamsError` for what cannot be compiled within `LIMITS`. How long that takes tells a
        namespace nothing of what others asked for."""
        key = space, key_of(asked)
        try:
            verdict = self._verdicts[key]
        except KeyError:
            verdict = in_roomy_thread(lambda: self._verdict(asked)).result()
            self._verdicts[key] = verdict
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        if verdict is not None:
            raise SamplingParamsError(verdict, param="structured_outputs")

    def _verdict(self, asked: StructuredOutputsParams) -> str | None:
        try:
            compile_grammar(self._vocabulary, re.sub(r"(?<=<\[)\d+(?=\]>)", self._number, lark_of(asked)))
            check_literals(asked, self._missing_characters)
        except SamplingParamsError as error:
            return error.message
        return None

    def _number(self, token_id: re.Match[str]) -> str:
        return str(self._numbers.get(token_id[0], token_id[0]))


class _Bytes:
    """A tokenizer whose tokens are an end, the special ones and all bytes."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        special = [b"<|end of answer|>", *(text.encode() for text in special_tokens)]
        self.tokens = [*special, *(bytes([value]) for value in range(256))]
        self.special_token_ids = list(range(len(special)))
        self.eos_token_id, self.bos_token_id = 0, None

    def __call__(self, text: bytes) -> list[int]:
        return [len(self.special_token_ids) + value for value in text]


def _of_schema(text: str | None, compact: bool, whitespace: str) -> str:
    """text: the schema; None for any object. compact: whether there is no white space, else it is `whitespace`."""
    try:
        schema: Any = {"type": "object"} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"the schema is not JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refusal(f"a JSON schema is an object, not {schema!r:.100}")
    leave_out_unknown_formats(schema)
    options = {"whitespace_flexible": False} if compact else {"whitespace_pattern": whitespace}
    own = schema.get("x-guidance")
    schema["x-guidance"] = options | (own if isinstance(own, dict) else {})
    return _without_forcing(f"start: %json {json.dumps(schema)}")


def _of_grammar(text: str) -> str:
    try:
        return _without_forcing(any_to_lark(text))
    except Exception as error:  # whatever its parser of GBNF meets
        raise _refusal(str(error)) from None


def _without_forcing(rules: str) -> str:
    return f"{rules}\n{FREE_TOKENS}\n"


def _refusal(reason: str) -> SamplingParamsError:
    """Returns an error for what a compiler says, without its drawings of where."""
    lines = [line for line in reason.splitlines() if not re.match(r"\s*(\d+ *\||\^|<non-verbose)", line)]
    text = re.sub(r"^(at )?\d+\(\d+\): |failed to compile JSON schema: ", "", " ".join(" ".join(lines).split()))
    text = text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"
    return SamplingParamsError(
        f"structured_outputs cannot be compiled: {text}; correct or simplify it", param="structured_outputs"
    )
