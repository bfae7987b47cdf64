"""Declares the arguments that callers give, each once: type, limits, help; checks, flags and docs follow from it.

A field is declared as `name: Annotated[type, about("What it is.")]`; limits stand on the type, as `msgspec.Meta`.
Where words of its own say them better, they are the `title` of that.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
import sys
import threading
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from pagemill.errors import PagemillError, UnknownArgumentError, shown

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]

_BOUNDS: dict[Any, dict[str, Any]] = {
    int: {"ge": -(2**63), "le": 2**63 - 1},
    float: {"ge": -sys.float_info.max, "le": sys.float_info.max},
}
"""Every integer fits into 64 bits, as messages between processes need it; every number is finite."""
_BOUND_WORDS = {
    f"<= {_BOUNDS[int]['le']}": f"at most {_BOUNDS[int]['le']}",
    f">= {_BOUNDS[int]['ge']}": f"at least {_BOUNDS[int]['ge']}",
    f"<= {_BOUNDS[float]['le']}": "finite",
    f">= {_BOUNDS[float]['ge']}": "finite",
    "Number out of range": f"at most {_BOUNDS[float]['le']}",
}
"""Words for the bounds of `_BOUNDS`, by what msgspec says of a value beyond one."""
_NOUNS = {int: "integers", float: "numbers", str: "texts", dict: "dicts", list: "lists"}
_WORDS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
_UNIONS = (types.UnionType, typing.Union)
_MAKING = threading.Lock()
"""Held while a struct that checks fields is made: several may have types in common."""


def about(description: str, way_out: str = "") -> Meta:
    """Returns what is said of a field: its help text, and what to do instead of a wrong value."""
    return Meta(description=description, extra={"way_out": way_out})


class Argument(NamedTuple):
    """One declared field.

    kind: its type, without limits. limit: what its value must be, in words. max_length: entries that it may have, None
    for any number.
    """

    name: str
    kind: Any
    default: Any
    description: str
    limit: str
    way_out: str
    max_length: int | None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that it may have, where those are named one by one."""
        parts = typing.get_args(self.kind) if typing.get_origin(self.kind) in _UNIONS else (self.kind,)
        return tuple(value for part in parts if typing.get_origin(part) is Literal for value in typing.get_args(part))


@functools.cache
def arguments_of(cls: type) -> dict[str, Argument]:
    """Returns the declared fields of a dataclass, by name, in their order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {}
    for field in dataclasses.fields(cls):
        base, limits = _split(hints[field.name])
        default = field.default_factory() if callable(field.default_factory) else field.default
        description, extra = limits.get("description", ""), limits.get("extra") or {}
        limit, way_out = _limit(hints[field.name]), extra.get("way_out", "")
        most = _max_length(hints[field.name])
        found[field.name] = Argument(field.name, _bare(base), default, description, limit, way_out, most)
    return found


def check_fields(instance: Any, error: type[PagemillError]) -> None:
    """Checks all fields of a dataclass against their types and limits; integers become floats where those are declared,
    and numbers of NumPy and torch Python's own.

    Raises `error`, which names the value, the limit and the way out.
    """
    cls: Any = type(instance)
    try:
        try:
            checked = msgspec.convert(vars(instance), _checker(cls))
        except (msgspec.ValidationError, UnicodeEncodeError):
            checked = msgspec.convert(_with_own_numbers(vars(instance)), _checker(cls))
    except (msgspec.ValidationError, UnicodeEncodeError) as wrong:
        place = re.search(r"`\$\.(\w+)", str(wrong))
        name = _not_unicode(vars(instance)) if place is None else place[1]
        argument = arguments_of(cls)[name]
        bounds = [words for part, words in _BOUND_WORDS.items() if f" {part} - at" in f" {wrong}"]
        text = f"{name} is {shown(getattr(instance, name))}; it must be {', and '.join([argument.limit, *bounds])}"
        raise error(f"{text}; {argument.way_out}" if argument.way_out else text, param=name) from None
    vars(instance).update({name: getattr(checked, name) for name in checked.__struct_fields__})


def as_list(value: Any) -> Any:
    """Returns a list for a sequence, a set, an array or a tensor, and any other value as it is.

    An iterable without a length stays as it is: it may never end.
    """
    if isinstance(value, (str, bytes, list)):
        return value
    if isinstance(value, (Sequence, set, frozenset)):
        return list(itertools.islice(value, len(value)))
    if callable(getattr(value, "tolist", None)) and getattr(value, "ndim", None):
        return value.tolist()
    return value


def _with_own_numbers(value: Any) -> Any:
    """Returns a value with Python's own numbers in the place of NumPy's and torch's, in lists and dicts too."""
    if isinstance(value, dict):
        return {_with_own_numbers(key): _with_own_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_own_numbers(each) for each in value]
    return value.item() if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)) else value


def suggest_arguments(cls: type[T]) -> type[T]:
    """Makes a dataclass raise `UnknownArgumentError`, with the nearest known name, for an unknown keyword."""
    cls.__init__ = _suggesting(cls.__init__, cls.__name__)  # type: ignore[method-assign]
    return cls


def suggest_keywords(function: F) -> F:
    """Does the same for a function or method without `**kwargs`."""
    return _suggesting(function, function.__qualname__)


def _suggesting(function: F, owner: str) -> F:
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                raise UnknownArgumentError.of(owner, name, known)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@functools.cache
def _checker(cls: type) -> type[msgspec.Struct]:
    """Returns a struct that has the dataclass's fields, for msgspec checks all fields of one in a single call.

    msgspec makes out a struct's types at its first use, and crashes if another thread uses it meanwhile."""
    hints = typing.get_type_hints(cls, include_extras=True)
    with _MAKING:
        made = msgspec.defstruct(
            cls.__name__, [(field.name, _bounded(hints[field.name])) for field in dataclasses.fields(cls)]
        )
        msgspec.json.Decoder(made)
    return made


def _not_unicode(values: dict[str, Any]) -> str:
    """Returns the name of the first value with half of a surrogate pair in a text."""
    return next(
        name
        for name, value in values.items()
        for text in (value if isinstance(value, (list, dict)) else [value])
        if isinstance(text, str) and re.search("[\ud800-\udfff]", text)
    )


def _split(hint: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a type without its `Annotated`, and the limits that stood there."""
    if typing.get_origin(hint) is not Annotated:
        return hint, {}
    limits: dict[str, Any] = {}
    for meta in hint.__metadata__:
        limits |= dict(meta.__rich_repr__())
    return hint.__origin__, limits


def _bounded(hint: Any) -> Any:
    """Returns the type with `_BOUNDS` on every integer and number in it that has none of its own."""
    base, limits = _split(hint)
    if base in _BOUNDS:
        own = {name for name in ("gt", "ge", "lt", "le") if name in limits}
        low, high = bool(own & {"gt", "ge"}), bool(own & {"lt", "le"})
        limits |= {name: value for name, value in _BOUNDS[base].items() if not (low if name == "ge" else high)}
    base = _with_parts(base, _bounded)
    return Annotated[base, Meta(**limits)] if limits else base


def _bare(hint: Any) -> Any:
    """Returns the type without any limits."""
    return _with_parts(_split(hint)[0], _bare)


def _with_parts(kind: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a union, a list or a dict with each of its parts changed, and any other type as it is."""
    origin = typing.get_origin(kind)
    if origin not in (*_UNIONS, list, dict):
        return kind
    parts = tuple(change(part) for part in typing.get_args(kind))
    return typing.Union[parts] if origin in _UNIONS else origin[parts]  # noqa: UP007


def _max_length(hint: Any) -> int | None:
    """Returns how many entries a list or a dict of this type may have."""
    base, limits = _split(hint)
    parts = typing.get_args(base) if typing.get_origin(base) in _UNIONS else ()
    return limits.get("max_length") or next(filter(None, map(_max_length, parts)), None)


def _limit(hint: Any, *, many: bool = False) -> str:
    """Returns what a value must be, such as "an integer of at least 1 or None"."""
    base, limits = _split(hint)
    origin, parts = typing.get_origin(base), typing.get_args(base)
    if "title" in limits:
        return str(limits["title"])
    if origin in _UNIONS:
        return " or ".join(_limit(part, many=many) for part in parts)
    if origin is Literal:
        return f"{'' if len(parts) == 1 else 'one of '}{', '.join(map(str, parts))}"
    if base is bool:
        return "True or False"
    if base is type(None):
        return "None"
    noun = _NOUNS.get(origin or base, getattr(base, "__name__", str(base)))
    if not many:
        noun = f"{'an' if noun[0] in 'aeiou' else 'a'} {noun.removesuffix('s')}"
    if parts:
        noun += " of " + " to ".join(_limit(part, many=True) for part in parts)
    return noun + _range(limits)


def _range(limits: dict[str, Any]) -> str:
    if {"ge", "le"} <= limits.keys():
        return f" from {limits['ge']} to {limits['le']}"
    return "".join(f" {word} {limits[name]}" for name, word in _WORDS.items() if name in limits)
