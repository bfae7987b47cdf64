"""TenantShares: what each replica is told of its tenants, so that fairness and guarantees hold over all of them.

A replica is fair by itself and keeps what is guaranteed by itself. With each request it is told by how many tokens that
others have computed its tenants are ahead of each other, which count as service there
(`EngineRequest.served_elsewhere`), and how many of the blocks that are guaranteed to a tenant over all replicas are its
there (`EngineRequest.guaranteed_here`).

A tenant that is behind catches up wherever it has requests. If each of these replicas made up for all of it, it would
get too much, and then too little. So each makes up for a part, the smaller the more of all replicas they are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from pagemill.tenant_limits import TenantLimits

MOST_ELSEWHERE = 7
"""Tokens from elsewhere that count for each that a replica has computed for a tenant itself. So who has much elsewhere
is served at least an eighth as fast as by weight alone, and none of its requests is kept out for ever."""
MOST_OWED = 1 << 14
"""Tokens from elsewhere that are kept for later at most, where they do not count yet."""


@dataclass
class _Told:
    """Remembers what a replica was told of a tenant's service.

    here, elsewhere: tokens that it and others had computed then.
    owed: those of others that it has not been told of; allowed: how many of these count by what it has computed.
    """

    here: int
    elsewhere: int
    owed: int = 0
    allowed: int = 0

    def news(self, here: int, elsewhere: int) -> int:
        """Returns how many tokens from elsewhere count now, with so many computed here and elsewhere."""
        self.owed = min(self.owed + max(0, elsewhere - self.elsewhere), MOST_OWED)
        self.allowed = min(self.allowed + MOST_ELSEWHERE * (here - self.here), MOST_OWED)
        self.here, self.elsewhere = here, elsewhere
        count = min(self.owed, self.allowed)
        self.owed, self.allowed = self.owed - count, self.allowed - count
        return count


@dataclass
class _Served:
    """Tokens that replicas have computed for a tenant."""

    at: Counter[str] = field(default_factory=Counter)
    told: dict[str, _Told] = field(default_factory=dict)
    total: int = 0


class _Changes:
    """Knows which tenants have changed since when."""

    def __init__(self) -> None:
        self.now = 0
        """Rises with each change."""
        self._last: OrderedDict[str, int] = OrderedDict()
        """Tells when each tenant changed last, in this order."""

    def note(self, tenant: str) -> None:
        """Notes that a tenant changes now."""
        self.now += 1
        self._last[tenant] = self.now
        self._last.move_to_end(tenant)

    def since(self, then: int) -> list[str]:
        """Returns the tenants that have changed after a time."""
        return [tenant for tenant, _ in takewhile(lambda last: last[1] > then, reversed(self._last.items()))]


def part_of(guaranteed: int, here: int, elsewhere: int) -> int:
    """Returns how many of a tenant's guaranteed blocks are its in a replica, of which it has so many active there and
    elsewhere: all that it does not have elsewhere, wherever it wants them first; and where it has more than are
    guaranteed, a part by what it has. So what it has as guaranteed is never more over all."""
    used = here + elsewhere
    return guaranteed - elsewhere if used <= guaranteed else guaranteed * here // used


class TenantShares:
    """Counts tokens and blocks by tenant and replica.

    limits: of tenants, by name, as they are at each call. Whoever changes one calls `forget_guarantee`.
    """

    def __init__(self, limits: Mapping[str, TenantLimits]) -> None:
        self._limits = limits
        self._served: defaultdict[str, _Served] = defaultdict(_Served)
        self._service = _Changes()
        self._blocks: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._guarantees = _Changes()
        self._requests: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Requests that replicas have, by replica and tenant."""
        self._spread: Counter[str] = Counter()
        """Numbers of replicas that have requests of a tenant."""
        self._parts: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """Remembers what each replica was told of guarantees, by replica and tenant."""
        self._told_service: dict[str, int] = {}
        """Tells when each replica was told of service last, as `_service` counts."""
        self._told_guarantees: dict[str, int] = {}
        """Tells when each replica was told of guarantees last, as `_guarantees` counts."""

    def note_computed(self, tenant: str, replica: str, tokens: int) -> None:
        """Notes that a replica has computed tokens for a tenant."""
        served = self._served[tenant]
        served.at[replica] += tokens
        served.total += tokens
        self._service.note(tenant)

    def note_requests(self, tenant: str, replica: str, more: int) -> None:
        """Notes that a replica has so many more requests of a tenant, or fewer if `more` is negative."""
        at = self._requests[replica]
        had_some = tenant in at
        _count(at, tenant, more)
        _count(self._spread, tenant, (tenant in at) - had_some)
        if not at:
            del self._requests[replica]

    def note_blocks(self, tenant: str, replica: str, more: int) -> None:
        """Notes that a tenant has so many more active blocks at a replica, or fewer if `more` is negative."""
        _count(self._blocks[tenant], replica, more)
        self._guarantees.note(tenant)

    def forget(self, replica: str) -> None:
        """Forgets what a replica that is gone has computed, and was told."""
        for tenant, served in self._served.items():
            served.total -= served.at.pop(replica, 0)
            served.told.pop(replica, None)
            self._service.note(tenant)
        self._told_service.pop(replica, None)
        self._parts.pop(replica, None)
        self._told_guarantees.pop(replica, None)

    def forget_guarantee(self, tenant: str) -> None:
        """Forgets what replicas were told of a tenant's guarantee: with other limits each begins anew."""
        for told in self._parts.values():
            told.pop(tenant, None)
        self._guarantees.note(tenant)

    def served_elsewhere(self, replica: str) -> dict[str, int]:
        """Returns, by tenant, how many tokens it is ahead, as far as these count (`MOST_ELSEWHERE`).

        Counted are tokens that other replicas have computed since this was asked last for this one. What was before the
        first call is nobody's lead.
        """
        news = {}
        if len(self._served) > 1:
            for tenant in self._service.since(self._told_service.get(replica, 0)):
                served = self._served[tenant]
                here, elsewhere = served.at[replica], served.total - served.at[replica]
                told = served.told.setdefault(replica, _Told(here, elsewhere))
                if count := told.news(here, elsewhere):
                    news[tenant] = count
            self._told_service[replica] = self._service.now
        return self._leads(replica, news)

    def _leads(self, replica: str, news: Mapping[str, int]) -> dict[str, int]:
        """Returns what counts of tokens from elsewhere: those beyond what each tenant has had, by weight, that has
        requests here; and of these the replica's part, as of who is behind with the fewest replicas."""
        if not news:
            return {}
        service = {tenant: news.get(tenant, 0) / self._weight(tenant) for tenant in self._requests.get(replica, ())}
        least = min(service.values(), default=0.0)
        fewest = min((self._spread[tenant] for tenant, each in service.items() if each == least), default=0)
        share = self._share_of_one(fewest) if fewest else 1.0
        leads = {tenant: int((count - least * self._weight(tenant)) * share) for tenant, count in news.items()}
        return {tenant: lead for tenant, lead in leads.items() if lead > 0}

    def _share_of_one(self, parts: int) -> float:
        """Returns the share of what a tenant lacks that each of so many replicas with its requests makes up for: all if
        only one of several has some, nothing if all have, for then each is fair by itself."""
        replicas = len(self._requests)
        return (replicas - parts) / (replicas - 1) / parts if replicas > 1 else 0.0

    def _weight(self, tenant: str) -> float:
        return self._limits[tenant].weight if tenant in self._limits else 1.0

    def guaranteed_here(self, replica: str) -> dict[str, int]:
        """Returns how many of the blocks that are guaranteed over all replicas are tenants' in this one, for those
        where that is not what it was told last."""
        told, news, then = self._parts[replica], {}, self._told_guarantees.get(replica)
        for tenant in self._limits if then is None else self._guarantees.since(then):
            limits = self._limits.get(tenant)
            if limits is not None and isinstance(limits.guaranteed_blocks, int) and limits.guaranteed_blocks:
                blocks = self._blocks[tenant]
                part = part_of(limits.guaranteed_blocks, blocks[replica], blocks.total() - blocks[replica])
                if told.get(tenant) != part:
                    told[tenant] = news[tenant] = part
        self._told_guarantees[replica] = self._guarantees.now
        return news


def _count(counts: Counter[str], name: str, more: int) -> None:
    """Adds to a count; replicas and tenants' requests come and go, so none stays with nothing."""
    counts[name] += more
    if not counts[name]:
        del counts[name]
