"""Methods of vLLM's `LLM` that this engine does not have: they say so, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from pagemill.errors import InvalidRequestError


def not_served(name: str, reason: str) -> Callable[..., NoReturn]:
    """Returns a method that raises `InvalidRequestError` with the reason."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise InvalidRequestError(f"LLM.{name} is not served: {reason}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refuses: {reason}."
    return refuse
