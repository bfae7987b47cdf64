"""Takes formats that nobody enforces out of JSON schemas.

To JSON schema a `format` is an annotation (2020-12, Validation, section 7.2.1), and Pydantic writes some that say what
a program makes of a text, such as `path` and `password`. llguidance refuses those that it does not know.
"""

from __future__ import annotations

import functools
from typing import Any

from llguidance import LLMatcher

_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords behind which schemas stand by names of their own."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords behind which values stand, not schemas."""
_UNKNOWN = "Unknown format"
MOST_FORMATS = 256
"""Formats of which it is remembered whether they are known."""


def leave_out_unknown_formats(schema: dict[str, Any]) -> None:
    """Takes the formats that are not enforced out of a schema as `json` reads it, however deep it is nested. What is no
    schema in it stays as it is."""
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            name = part.get("format")
            if isinstance(name, str) and not _is_known(name):
                del part["format"]
            for key, value in part.items():
                if key in _BY_NAME and isinstance(value, dict):
                    left += value.values()
                elif key not in _VALUES:
                    left.append(value)


@functools.lru_cache(maxsize=MOST_FORMATS)
def _is_known(name: str) -> bool:
    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
    return not str(LLMatcher.validate_grammar(grammar)).startswith(_UNKNOWN)
