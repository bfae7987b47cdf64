"""Turns Python's bare TypeError for an unknown keyword into one that suggests the nearest argument."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

from pagemill.errors import UnknownArgumentError

T = TypeVar("T")


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
