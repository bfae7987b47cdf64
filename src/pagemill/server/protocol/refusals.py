"""Says in words what is wrong with a body: what pydantic finds, without its names for the branches of a union."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from pagemill.errors import InvalidRequestError, PagemillError, UnknownArgumentError, shown

MUST_BE = "Input should be "
_NOUNS = {
    "string_type": "a text",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "too_short": "a list of {min_length} or more entries",
    "too_long": "a list of at most {max_length} entries",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""Names what a value must be, by the type of pydantic's finding; findings of other types say it themselves."""

Place = tuple[Any, ...]


def refusal_of(findings: Sequence[Any], body: Any, kind: Any, whole: str = "the body") -> PagemillError:
    """Returns the first of pydantic's findings as an error; those raised by our own checks are typed already.

    Of a union, the branch that took most of the value says what is wrong. body: what was checked. kind: its type.
    whole: the body's name.
    """
    first = findings[0]
    typed = first.get("ctx", {}).get("error")
    if isinstance(typed, PagemillError):
        return typed
    if first["type"] == "json_invalid":
        return not_json(first["ctx"]["error"])
    if isinstance(first.get("input"), (bytes, bytearray)):
        return InvalidRequestError("the body must be a JSON object, sent with Content-Type: application/json")
    place, alike = _furthest(findings, body)
    finding = alike[0]
    typed = finding.get("ctx", {}).get("error")
    if isinstance(typed, PagemillError):
        return typed
    if finding["type"] == "missing" and (written := _unknown_beside(finding, findings)):
        place, finding = (*place[:-1], written["loc"][-1]), written
    param = str(place[0]) if place else None
    if finding["type"] == "extra_forbidden":
        return _unknown(place, _fields_at(kind, _parts(finding)[:-1]), whole)
    where = _name(place, whole)
    if finding["type"] == "missing":
        return InvalidRequestError(f"{where} is missing; give it", param=param)
    value = finding.get("input")
    given = json.dumps(value) if value is None or isinstance(value, bool) else f"{shown(value):.100}"
    if not all(_can_be(one) for one in alike):
        return InvalidRequestError(f"{where} is {given}: {finding['msg']}", param=param)
    must = " or ".join(dict.fromkeys(map(_must_be, alike)))
    return InvalidRequestError(f"{where} is {given}; it must be {must}", param=param)


def not_json(why: object) -> InvalidRequestError:
    """Returns the refusal of a body that is no JSON. why: the parser's error, or its words."""
    if isinstance(why, RecursionError):
        why = "its lists and objects lie too deep in one another"
    elif "set_int_max_str_digits" in str(why):
        why = f"a number in it has over {sys.get_int_max_str_digits()} digits"
    return InvalidRequestError(f"the body is not JSON: {why}; send a JSON object")


def _furthest(findings: Sequence[Any], body: Any) -> tuple[Place, list[Any]]:
    """Returns the place of the finding to tell, and all findings at it: the first of each branch of the first one's
    union, at the place that is the furthest within the value."""
    begin = _place(findings[0], body)[0]
    branches: dict[Place, tuple[Place, Any]] = {}
    for finding in findings:
        place, labels = _place(finding, body)
        if place[: len(begin)] == begin:
            branches.setdefault(labels, (place, finding))
    places = [place for place, _ in branches.values()]
    furthest = max(places, key=lambda place: [part if isinstance(part, int) else 0 for part in place])
    return furthest, [finding for place, finding in branches.values() if place == furthest]


def _place(finding: Any, body: Any) -> tuple[Place, Place]:
    """Returns where a finding is, and what pydantic names there beside that: branches of unions."""
    parts = _parts(finding)
    if finding["loc"][:1] == ("query",):
        return parts, ()
    place: list[Any] = []
    labels: list[Any] = []
    value = body
    for index, part in enumerate(parts):
        if _has(value, part):
            value = value[part]
        elif finding["type"] != "missing" or index < len(parts) - 1:
            labels.append((len(place), part))
            continue
        place.append(part)
    return tuple(place), tuple(labels)


def _has(value: Any, part: Any) -> bool:
    """Returns whether an object has this field, or a list this entry."""
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def _parts(finding: Any) -> Place:
    """Returns a finding's place within the body, or among the parameters, as pydantic has it."""
    loc = finding["loc"]
    return tuple(loc[1:] if loc[:1] in (("body",), ("query",)) else loc)


def _unknown_beside(missing: Any, findings: Sequence[Any]) -> Any:
    """Returns the finding of a field that the same object has and does not know: it may be the one that is missing."""
    beside = [one for one in findings if one["loc"][:-1] == missing["loc"][:-1]]
    return next((one for one in beside if one["type"] == "extra_forbidden"), None)


def _name(place: Place, whole: str) -> str:
    name = ".".join(map(str, place)) or whole
    return f"entry {name}" if place and isinstance(place[0], int) else name


def _can_be(finding: Any) -> bool:
    """Returns whether a finding says what the value must be."""
    return finding["type"] in _NOUNS or finding["msg"].startswith(MUST_BE)


def _must_be(finding: Any) -> str:
    return _NOUNS.get(finding["type"], "").format(**finding.get("ctx", {})) or str(finding["msg"]).removeprefix(MUST_BE)


def _unknown(place: Place, known: Sequence[str], whole: str) -> PagemillError:
    """Returns the refusal of a field that an object does not have. known: those that it has."""
    error = UnknownArgumentError.of(_name(place[:-1], whole), str(place[-1]), known)
    error.param = str(place[0])
    return error


def _fields_at(kind: Any, parts: Place) -> list[str]:
    """Returns the fields that an object at a place may have, whose branches of unions are named."""
    models = [*_models_in(kind)]
    for part in parts:
        annotations = [field.annotation for model in models for name, field in _fields(model) if name == part]
        inner = [model for annotation in annotations for model in _models_in(annotation)]
        models = inner or [model for model in models if model.__name__ == part] or models
    return [name for model in models for name, _ in _fields(model)]


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        yield field.alias or name, field


def _models_in(kind: Any) -> Iterator[type[BaseModel]]:
    """Yields the classes of objects among the parts of a type."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from _models_in(part)
