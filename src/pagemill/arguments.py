"""Turns Python's bare TypeError for an unknown keyword into one that suggests the nearest argument."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from pagemill.errors import UnknownArgumentError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def suggest_arguments(cls: type[T]) -> type[T]:
    """Class decorator for dataclasses: an unknown keyword raises `UnknownArgumentError` with the nearest known one."""
    original = cls.__init__
    known = frozenset(f.name for f in dataclasses.fields(cls) if f.init)  # type: ignore[arg-type]

    @functools.wraps(original)
    def init(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise UnknownArgumentError.of(cls.__name__, name, known)
        original(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[assignment, method-assign]
    return cls


def suggest_keywords(function: F) -> F:
    """The same for a function or method without `**kwargs`."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                raise UnknownArgumentError.of(function.__qualname__, name, known)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
