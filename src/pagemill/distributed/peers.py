"""Peers: tells replicas which other one holds a request's blocks, and people where replicas cannot share any."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from pagemill.distributed.route import Route
from pagemill.engine.messages import EngineReady, EngineRequest, HeldBlocks

if TYPE_CHECKING:
    from pagemill.distributed.replica_link import ReplicaLink

LOGGER = logging.getLogger(__name__)


class Peers:
    """Compares replicas, and says who holds what another lacks. links: connections to replicas, by name, as they are at
    each call."""

    def __init__(self, links: Mapping[str, ReplicaLink]) -> None:
        self._links = links
        self._told: set[tuple[bytes, str, str]] = set()

    def with_holder(self, asked: EngineRequest, route: Route) -> EngineRequest:
        """Returns a request as it goes to its replica: with who holds more of its blocks, if that replica gives
        blocks to others."""
        link = self._links.get(route.holder or "")
        address = "" if link is None or link.facts is None else link.facts.peer_address
        return msgspec.structs.replace(asked, held=HeldBlocks(address, route.held_blocks)) if address else asked

    def compare(self, name: str, facts: EngineReady) -> None:
        """Logs, once for each kind, that a replica's blocks and answers are not those of the others, bit for bit."""
        others = [link.facts for link in self._links.values() if link.name != name and link.facts is not None]
        mine = _bits(facts)
        if any(_bits(each) != mine for each in others) and mine not in self._told:
            self._told.add(mine)
            LOGGER.warning(
                "replica %s computes other bits than others (%s in %s, weights %s…): it shares no blocks with them, "
                "and a session that moves there is computed again",
                *(name, facts.numerics, facts.kv_format_name, facts.fingerprint.hex()[:8]),
            )


def _bits(facts: EngineReady) -> tuple[bytes, str, str]:
    """Returns all that decides the bits of a replica's blocks."""
    return facts.fingerprint, facts.kv_format_name, facts.numerics
