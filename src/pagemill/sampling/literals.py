"""Checks the texts that a form has answers repeat, letter by letter: choices, constants and names of properties."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from pagemill.errors import SamplingParamsError, shown
from pagemill.sampling.structured import StructuredOutputsParams

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values hold schemas by names, which are no keywords."""


def check_literals(asked: StructuredOutputsParams, missing_characters: Callable[[str], str]) -> None:
    """Raises `SamplingParamsError` for a text that the model's tokens cannot write. missing_characters: returns those
    of a text that they cannot."""
    for field, text in _literals_of(asked):
        if missing := missing_characters(text):
            raise SamplingParamsError(
                f"structured_outputs has {missing[:8]!a} in the {field} {shown(text)}, which this model's tokens "
                f"cannot write; leave it out",
                param="structured_outputs",
            )


def _literals_of(asked: StructuredOutputsParams) -> Iterator[tuple[str, str]]:
    """Returns each text as an answer writes it, with the field that has it."""
    if asked.choice is not None:
        for text in asked.choice:
            yield "choice", text
    elif asked.json is not None:
        for keyword, value in _in_schema(json.loads(str(asked.json))):
            yield keyword, json.dumps(value, ensure_ascii=False)


def _in_schema(schema: Any) -> Iterator[tuple[str, Any]]:
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            for keyword, value in part.items():
                if keyword == "const":
                    yield keyword, value
                elif keyword == "enum" and isinstance(value, list):
                    for one in value:
                        yield keyword, one
                elif keyword in SCHEMAS_BY_NAME and isinstance(value, dict):
                    if keyword == "properties":
                        for name in value:
                            yield keyword, name
                    left += value.values()
                else:
                    left.append(value)
