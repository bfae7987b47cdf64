"""Defines what a request demands of the form of its answer: StructuredOutputsParams.

Plain data that msgspec sends between processes. Names and meanings are vLLM's. `grammar.py` makes a grammar of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pagemill.arguments import about, as_list, check_fields, suggest_arguments
from pagemill.errors import InvalidRequestError, SamplingParamsError
from pagemill.fixed_arguments import OF_STRUCTURED, takes_fixed

MAX_CHARACTERS = 65536
"""Characters that a schema, an expression, a grammar, or all choices together may have: compiling costs as much."""
MAX_CHOICES = 4096
HALVES = re.compile("[\ud800-\udfff]")

FORMS = ("json", "regex", "choice", "grammar", "json_object")
"""The fields of which exactly one says what the answer must be."""

OLDER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""vLLM's names of these fields before it had them in one object."""

Text = Annotated[str, Meta(min_length=1)]
Choices = Annotated[
    list[Text],
    Meta(min_length=1, max_length=MAX_CHOICES, title=f"a list of 1 to {MAX_CHOICES} texts, none of them empty"),
]
Schema = Annotated[Text | dict[str, Any], Meta(title="a JSON schema, as a dict or as text")]


@takes_fixed(OF_STRUCTURED, SamplingParamsError)
@suggest_arguments
@dataclass(kw_only=True)
class StructuredOutputsParams:
    """What an answer must be, by exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`.

    Only tokens that can lead there are sampled. The answer ends where it is complete; `max_tokens` and stop strings may
    cut it before. Raises `SamplingParamsError` for values out of range, and for none or several of these.
    """

    json: Annotated[
        Schema | None,
        about("A JSON schema that the answer follows, as a dict or as text.", "for example {'type': 'object'}"),
    ] = None
    regex: Annotated[
        Text | None, about("A regular expression that the whole answer matches.", "for example '[0-9]+'")
    ] = None
    choice: Annotated[Choices | None, about("Texts of which the answer is one.", "for example ['yes', 'no']")] = None
    grammar: Annotated[
        Text | None,
        about("A grammar, in Lark's syntax or GBNF, that the answer follows.", "for example 'start: \"yes\"'"),
    ] = None
    json_object: Annotated[bool | None, about("True: the answer is any JSON object.", "give True, or leave it out")] = (
        None
    )
    disable_any_whitespace: Annotated[
        bool, about("JSON has no white space between its parts.", "give True or False")
    ] = False
    whitespace_pattern: Annotated[
        Text | None,
        about(
            "A regular expression for the white space between JSON's parts. Default: up to 40 spaces, tabs and new "
            "lines, or none.",
            "for example ' ?'",
        ),
    ] = None
    structural_tag: Annotated[None, about("Not supported: a grammar says the same.", "write a grammar instead")] = None

    def __post_init__(self) -> None:
        self.choice = as_list(self.choice)
        if isinstance(self.json, dict):
            self.json = _text_of(self.json)
        check_fields(self, SamplingParamsError)
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise SamplingParamsError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly one of {', '.join(FORMS)}",
                param=given[0] if given else "json",
            )
        self._check_characters(given[0])
        self._check_whitespace(given[0])

    def _check_characters(self, name: str) -> None:
        value = getattr(self, name)
        texts = [] if value is True else value if isinstance(value, list) else [value]
        characters = sum(map(len, texts))
        if characters > MAX_CHARACTERS:
            raise SamplingParamsError(
                f"structured_outputs has {characters} characters in its {name}; give at most {MAX_CHARACTERS}",
                param=name,
            )
        if (half := HALVES.search("".join([*texts, self.whitespace_pattern or ""]))) is not None:
            raise SamplingParamsError(
                f"structured_outputs has {half[0]!r} in its {name}, half of a surrogate pair; give valid Unicode",
                param=name,
            )

    def _check_whitespace(self, form: str) -> None:
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, name) and form not in ("json", "json_object"):
                raise SamplingParamsError(
                    f"{name} says something of JSON, and structured_outputs has a {form}; leave it out", param=name
                )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise SamplingParamsError(
                "disable_any_whitespace and whitespace_pattern contradict each other; leave one out",
                param="whitespace_pattern",
            )


def structured_outputs_of(given: dict[str, Any]) -> StructuredOutputsParams:
    """Returns the parameters that a JSON object says. Raises `InvalidRequestError` children for the parameter
    `structured_outputs`."""
    try:
        return StructuredOutputsParams(**given)
    except InvalidRequestError as error:
        error.param = "structured_outputs"
        raise


def _text_of(schema: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(schema).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SamplingParamsError(
            f"structured_outputs has a JSON schema that cannot be written as JSON: {error}; give one that can",
            param="json",
        ) from None
