"""FleetPins: in which replicas pins are, and what they take of a limit that holds over all of them.

A pin is in every replica, so that a request finds it wherever it goes. A tenant whose `max_blocks` is a number would
pay for it in each. So its pins are in one replica, its home, and count once; what finds no room beside them goes there
too. Where the home is gone, another takes its part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pagemill.distributed.fleet_tenancy import FleetTenancy, Pinned
from pagemill.distributed.pin_copies import PinCopies
from pagemill.engine.messages import EngineReady, EngineRequest, SequenceOutput
from pagemill.engine.queries import Unpin
from pagemill.frontend.made_pins import MadePins
from pagemill.namespace import Namespace

if TYPE_CHECKING:
    from pagemill.distributed.replica_link import ReplicaLink


class FleetPins:
    """Knows all pins of a fleet. tenancy: knows whose `max_blocks` holds over all replicas."""

    def __init__(self, tenancy: FleetTenancy) -> None:
        self._tenancy = tenancy
        self._copies = PinCopies()
        self._made = MadePins()
        self._homes: dict[str, str] = {}

    def pinned(self, tenant: str, facts: EngineReady) -> Pinned:
        """Returns the blocks that a tenant's pins take of its limit, in engines of such facts, and where they are. A
        block of several pins counts for each."""
        if not self._tenancy.limits_blocks(tenant):
            return Pinned()
        entries = sum(len(pin.prompt_token_ids) // facts.block_size for pin in self._of(tenant))
        return Pinned(self._homes.get(tenant, ""), entries * facts.num_groups)

    def note_sent(self, asked: EngineRequest, replica: str) -> None:
        """Notes where a request goes: the first pin of a tenant with one home makes it."""
        if asked.pin is not None and self._tenancy.limits_blocks(asked.tenant):
            self._homes.setdefault(asked.tenant, replica)

    def note_made(self, pin: EngineRequest, by: ReplicaLink, serving: Iterable[ReplicaLink]) -> None:
        """Notes that a replica has made a pin, and makes it in all others if it is one of all."""
        self._made.add(pin)
        if not self._tenancy.limits_blocks(pin.tenant):
            for link in serving:
                if link is not by:
                    self._copies.send(link, pin)

    def note_outputs(self, outputs: Iterable[SequenceOutput]) -> list[Unpin]:
        """Notes which copies have been made; other outputs are ignored. Returns what is to be ended there, since its
        pin has been unpinned meanwhile."""
        copies = self._copies.take(outputs)
        made = [_end_of(pin) for pin in self._made.requests()] if copies else []
        return [end for end in map(_end_of, copies) if end not in made]

    def remove(self, name: str, space: Namespace) -> None:
        """Forgets a pin that has been unpinned."""
        self._made.remove(name, space)
        if not self._of(space.tenant):
            self._homes.pop(space.tenant, None)

    def bring(self, link: ReplicaLink) -> None:
        """Makes the pins in a replica that has come: those of all, and those that have no home."""
        for pin in self._made.requests():
            if not self._tenancy.limits_blocks(pin.tenant) or self._home(pin.tenant, [link]) is link:
                self._copies.send(link, pin)

    def leave(self, replica: str, serving: list[ReplicaLink]) -> None:
        """Makes the pins whose home is gone in another replica, if there is one."""
        self._copies.forget(replica)
        for tenant in [tenant for tenant, home in self._homes.items() if home == replica]:
            del self._homes[tenant]
            if (home := self._home(tenant, serving)) is not None:
                for pin in self._of(tenant):
                    self._copies.send(home, pin)

    def note_limits(self, tenant: str, serving: list[ReplicaLink]) -> list[tuple[ReplicaLink, Unpin]]:
        """Brings a tenant's pins to where they are to be by its limits, which have changed. Returns what is to be ended
        where."""
        pins, had_home = self._of(tenant), tenant in self._homes
        if not pins:
            self._homes.pop(tenant, None)
            return []
        if self._tenancy.limits_blocks(tenant) == had_home:
            return []
        if had_home:
            home = self._homes.pop(tenant)
            for link in serving:
                for pin in pins if link.name != home else ():
                    self._copies.send(link, pin)
            return []
        home_link = self._home(tenant, serving)
        return [(link, _end_of(pin)) for link in serving if link is not home_link for pin in pins]

    def _of(self, tenant: str) -> list[EngineRequest]:
        return [pin for pin in self._made.requests() if pin.tenant == tenant]

    def _home(self, tenant: str, links: list[ReplicaLink]) -> ReplicaLink | None:
        """Returns a tenant's home if it is among these; the first of them becomes it if there is none yet."""
        if links:
            self._homes.setdefault(tenant, links[0].name)
        return next((link for link in links if link.name == self._homes.get(tenant)), None)


def _end_of(pin: EngineRequest) -> Unpin:
    """Returns what ends a pin."""
    return Unpin(str(pin.pin), pin.tenant, pin.cache_salt)
