"""Lists the texts that a form has answers repeat, letter by letter: choices, constants and names of properties."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pagemill.sampling.structured import StructuredOutputsParams

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values hold schemas by names, which are no keywords."""


def literals_of(asked: StructuredOutputsParams) -> Iterator[tuple[str, str]]:
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
