"""Writes grammars, in llguidance's form of Lark, of answers that have a form behind reasoning, or call tools with
arguments by their schemas.

Around the arguments stands what the model's family writes. A schema stays whole, so that its references hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pagemill.errors import InvalidRequestError
from pagemill.sampling.grammar import lark_of
from pagemill.sampling.schema_formats import leave_out_unknown_formats
from pagemill.sampling.structured import StructuredOutputsParams
from pagemill.text.answer.calls import Functions
from pagemill.text.answer.formats import ReasoningFormat, ToolCallFormat

Parts = Sequence[tuple[str, int | None]]
"""A text cut into special tokens and what is between them: each part, with its id if it is one."""
Words = Callable[[str], Parts]
"""Cuts a text like that."""

_AS_MODELS_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Calls(NamedTuple):
    """Holds the calls that an answer may be instead."""

    form: ToolCallFormat
    functions: Functions
    only_one: bool


def grammar_of_call(form: ToolCallFormat, functions: Functions, words: Words, reasoning: ReasoningFormat | None) -> str:
    """Returns the grammar of an answer that is one call, of one of these functions.

    reasoning: what the answer begins with, because the prompt has begun it. Raises `InvalidRequestError` for a format
    whose arguments are no JSON, and for parameters that are no object.
    """
    rules = ["start: thinking call", *_rules_of_thinking(reasoning, words)] if reasoning else ["start: call"]
    return "\n".join([*rules, *_rules_of_calls(form, functions, words, "")])


def grammar_of_form(
    asked: StructuredOutputsParams,
    words: Words,
    reasoning: ReasoningFormat | None,
    calls: Calls | None,
    *,
    has_begun: bool,
) -> str:
    """Returns the grammar of an answer that has the form that is asked for, or is calls, behind reasoning.

    has_begun: the prompt has begun the reasoning; otherwise the answer may. Raises what `lark_of` does, and
    `InvalidRequestError` for calls that begin without a mark, and for a schema where arguments are no JSON.
    """
    start, rules = "answer", [f"answer: %lark {{\n{lark_of(asked)}}}"]
    if calls is not None:
        start = "(call | answer)" if calls.only_one else "(call (BREAK? call)* | answer)"
        rules += [r'BREAK: "\n"', *_rules_of_marked_calls(calls.form, calls.functions, words)]
    if reasoning is not None:
        thinking = "thinking" if has_begun else f"({_quoted(words(reasoning.begin))} thinking)?"
        start = f"{thinking} {start}"
        rules += _rules_of_thinking(reasoning, words)
    return "\n".join([f"start: {start}", *rules])


def grammar_of_text_and_calls(form: ToolCallFormat, functions: Functions, words: Words) -> str:
    """Returns the grammar of an answer of text and calls, in which each call is one of these functions. Raises what
    `grammar_of_call` does, and `InvalidRequestError` for a format in which calls begin without a mark."""
    before = _written(form)[0]
    mark = next((word for word in (*form.around, *form.begin) if before.startswith(word)), None)
    if mark is None:
        raise InvalidRequestError(
            f"this model's tool calls ({form.name}) begin without a mark, so that strict needs tool_choice 'required'; "
            f"set that, or leave strict out",
            param="tools",
        )
    marked = words(mark)
    text = _up_to("before", marked)
    starts_special = marked[0][1] is not None
    rest = "REST: /(?s:.*)/" + ("" if starts_special else f" & ~/(?s:.*){_regex(mark)}(?s:.*)/")
    return "\n".join(["start: (before call)* REST", text, rest, *_rules_of_calls(form, functions, words, mark)])


def _rules_of_marked_calls(form: ToolCallFormat, functions: Functions, words: Words) -> list[str]:
    """Returns the rules of calls that are told from other text; of any between marks, where arguments are no JSON."""
    if form.bare:
        raise InvalidRequestError(
            f"this model's tool calls ({form.name}) begin without a mark, so that tools do not go with "
            f"structured_outputs; leave one of them out, or set tool_choice to 'none'",
            param="structured_outputs",
        )
    if form.written is None and not any(functions.values()):
        return [f"call: {_quoted(words(form.begin[0]))} called", _up_to("called", words(form.end))]
    return _rules_of_calls(form, functions, words, "")


def _rules_of_calls(form: ToolCallFormat, functions: Functions, words: Words, mark: str) -> list[str]:
    """Returns the rule `call` and those that it needs. mark: the beginning of a call that stands before it."""
    before, between, behind = _written(form)
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(functions)))]
    for number, (name, schema) in enumerate(functions.items()):
        head, tail = (_quoted(words(text)) for text in (before.removeprefix(mark) + name + between, behind))
        rules.append(f"call_{number}: {head} arguments_{number} {tail}")
        rules.append(f"arguments_{number}: %json {_schema_of(name, schema)}")
    return rules


def _rules_of_thinking(reasoning: ReasoningFormat, words: Words) -> list[str]:
    """Returns the rule `thinking`, up to the line breaks that models write behind it, and those that it needs."""
    return ["thinking: thought BREAKS?", _up_to("thought", words(reasoning.end)), r"BREAKS: /\n{1,2}/"]


def _written(form: ToolCallFormat) -> tuple[str, str, str]:
    if form.written is None:
        raise InvalidRequestError(
            f"this model's tool calls ({form.name}) have no arguments in JSON that could be held to a schema; set "
            f"tool_choice to 'auto', and leave strict out",
            param="tool_choice",
        )
    return form.written


def _up_to(rule: str, mark: Parts) -> str:
    """Returns a rule of any text up to a mark, and the mark."""
    (first, token_id), *others = mark
    if token_id is not None:
        return f"{rule}: TEXT_OF_{rule.upper()} {_quoted(mark)}\nTEXT_OF_{rule.upper()}: /(?s:.*)/"
    return f"{rule}: text_of_{rule} {_quoted(others)}\ntext_of_{rule}[lazy]: /(?s:.*){_regex(first)}/"


def _quoted(parts: Parts) -> str:
    return " ".join(json.dumps(text) if token_id is None else f"<[{token_id}]>" for text, token_id in parts)


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _schema_of(name: str, schema: Mapping[str, Any]) -> str:
    """Returns a schema of arguments, which are an object, as JSON."""
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(
            f"the parameters of {name!r} are of type {schema['type']!r:.100}; arguments are an object", param="tools"
        )
    try:
        own = json.loads(json.dumps({"type": "object", **schema, "x-guidance": _AS_MODELS_WRITE}, allow_nan=False))
    except ValueError:
        raise InvalidRequestError(
            f"the parameters of {name!r} have a number that is not finite, which JSON has not; leave it out",
            param="tools",
        ) from None
    leave_out_unknown_formats(own)
    return json.dumps(own)
