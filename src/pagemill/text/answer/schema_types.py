"""Tells which types of JSON a schema allows, as far as it names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_OF_BRACKETS_AND_WORDS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def types_of_property(name: str, schema: Mapping[str, Any]) -> set[str]:
    """Returns the types that an object's property may have by the object's schema; none where that does not say."""
    types: set[str] = set()
    properties = schema.get("properties")
    for part in _parts(properties.get(name), schema) if isinstance(properties, Mapping) else ():
        kind, values = part.get("type"), part.get("enum")
        types.update(each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str))
        values = [*(values if isinstance(values, list) else ()), *([part["const"]] if "const" in part else ())]
        types.update(TYPES.get(type(value), "null") for value in values)
    return types | {"integer"} if "number" in types else types


def type_of_json(text: str) -> str:
    """Returns the type of a JSON text, which begins without white space."""
    return _OF_BRACKETS_AND_WORDS.get(text[0]) or ("integer" if text.lstrip("-").isdecimal() else "number")


def _parts(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields a schema, what it refers to within the root, and its alternatives."""
    left, seen = [schema], set[str]()
    while left:
        part = left.pop()
        if not isinstance(part, Mapping):
            continue
        yield part
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            left.append(_found(reference, root))
        for key in ALTERNATIVES:
            alternatives = part.get(key)
            left += alternatives if isinstance(alternatives, list) else ()


def _found(reference: str, root: Any) -> Any:
    """Returns what a reference within the root leads to; None for any other."""
    first, *keys = unquote(reference).split("/")
    if first != "#":
        return None
    for key in keys:
        root = root.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root
