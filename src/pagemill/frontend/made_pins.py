"""MadePins: what pins were made of, so that an engine that takes another's place can make them again."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from pagemill.engine.messages import EngineRequest
from pagemill.namespace import Namespace


@dataclass(frozen=True, slots=True)
class _Made:
    request: EngineRequest
    until_s: float | None


class MadePins:
    """Keeps the request of each pin until that has been unpinned or has expired."""

    def __init__(self) -> None:
        self._made: dict[tuple[Namespace, str], _Made] = {}

    def add(self, request: EngineRequest) -> None:
        """Takes the request of a pin that has just been made. It takes the place of an earlier one of its name."""
        assert request.pin is not None
        self._drop_expired()
        expires_s = request.pin_expires_s
        until_s = None if expires_s is None else time.monotonic() + expires_s
        self._made[Namespace(request.tenant, request.cache_salt), request.pin] = _Made(request, until_s)

    def remove(self, name: str, space: Namespace) -> None:
        """Forgets a pin; nothing happens for one that is not known."""
        self._made.pop((space, name), None)

    def requests(self) -> list[EngineRequest]:
        """Returns the requests that make all pins again, in the order in which they came, each for what is left of its
        time. Their ids are those of before."""
        self._drop_expired()
        now = time.monotonic()
        return [
            msgspec.structs.replace(
                made.request,
                pin_expires_s=None if made.until_s is None else made.until_s - now,
            )
            for made in self._made.values()
        ]

    def _drop_expired(self) -> None:
        now = time.monotonic()
        self._made = {key: made for key, made in self._made.items() if made.until_s is None or made.until_s > now}
