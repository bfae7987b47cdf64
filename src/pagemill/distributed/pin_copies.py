"""PinCopies: the requests that make a pin in replicas other than the one that computed it first."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from pagemill.engine.messages import EngineRequest, SequenceOutput

if TYPE_CHECKING:
    from pagemill.distributed.replica_link import ReplicaLink

LOGGER = logging.getLogger(__name__)

PREFIX = "pin-copy-"
"""Begins the ids of copies. Those of other requests end in "#" and a number."""


class PinCopies:
    """Sends copies under ids of their own, and logs those that are refused: nobody waits for them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._under_way: dict[str, tuple[str, EngineRequest]] = {}

    def send(self, link: ReplicaLink, pin: EngineRequest) -> None:
        """Makes a replica compute a pin that another has."""
        copy = msgspec.structs.replace(
            pin, request_id=f"{PREFIX}{next(self._numbers)}", fork_of=None, served_elsewhere={}, guaranteed_here={}
        )
        self._under_way[copy.request_id] = link.name, copy
        link.send(copy)

    def take(self, outputs: Iterable[SequenceOutput]) -> list[EngineRequest]:
        """Notes which copies have ended; other outputs are ignored. Returns those that have been made."""
        made = []
        for output in outputs:
            if output.finish_reason is None:
                continue
            name, pin = self._under_way.pop(output.request_id, ("", None))
            if pin is None:
                continue
            if output.error is None:
                made.append(pin)
            else:
                LOGGER.error(
                    "pin %r of tenant %r could not be made in replica %s: %s",
                    *(pin.pin, pin.tenant, name, output.error.message),
                )
        return made

    def forget(self, name: str) -> None:
        """Forgets the copies of a replica that is gone."""
        self._under_way = {each: copy for each, copy in self._under_way.items() if copy[0] != name}
