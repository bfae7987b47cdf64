"""Checks that replicas are told of tenants what a plain formula gives, and that not all is looked at each time."""

import random
from collections import Counter

import pytest

from pagemill.distributed.tenant_shares import MOST_ELSEWHERE, MOST_OWED, TenantShares, part_of
from pagemill.tenant_limits import TenantLimits

REPLICAS = ("a", "b", "c", "d")
TENANTS = [f"t{number}" for number in range(6)]


class PlainShares:
    """Computes all anew from what each tenant has in each replica."""

    def __init__(self, limits):
        self.limits = limits
        self.computed, self.requests, self.blocks = Counter(), Counter(), Counter()
        self.served, self.service, self.parts = {}, {}, {}

    def weight(self, tenant):
        return self.limits.get(tenant, TenantLimits()).weight

    def at(self, counts, tenant):
        return {replica for replica in REPLICAS if counts[tenant, replica]}

    def forget(self, replica):
        for told in (self.service, self.parts):
            for key in [key for key in told if key[1] == replica]:
                del told[key]
        for tenant in TENANTS:
            self.computed[tenant, replica] = 0

    def forget_guarantee(self, tenant):
        for replica in REPLICAS:
            self.parts.pop((tenant, replica), None)

    def elsewhere(self, counts, tenant, replica):
        return sum(counts[tenant, other] for other in REPLICAS if other != replica)

    def news(self, tenant, replica):
        here, elsewhere = self.computed[tenant, replica], self.elsewhere(self.computed, tenant, replica)
        was_here, was_elsewhere, owed, allowed = self.service.get((tenant, replica), (here, elsewhere, 0, 0))
        owed = min(owed + max(0, elsewhere - was_elsewhere), MOST_OWED)
        allowed = min(allowed + MOST_ELSEWHERE * (here - was_here), MOST_OWED)
        count = min(owed, allowed)
        self.service[tenant, replica] = here, elsewhere, owed - count, allowed - count
        return count

    def served_elsewhere(self, replica):
        news = {tenant: self.news(tenant, replica) for tenant in self.served} if len(self.served) > 1 else {}
        service = {
            tenant: news.get(tenant, 0) / self.weight(tenant) for tenant in TENANTS if self.requests[tenant, replica]
        }
        least = min(service.values(), default=0.0)
        share = max((self.share_of_one(tenant) for tenant in service if service[tenant] == least), default=1.0)
        leads = {tenant: int((count - least * self.weight(tenant)) * share) for tenant, count in news.items()}
        return {tenant: lead for tenant, lead in leads.items() if lead > 0}

    def share_of_one(self, tenant):
        replicas = len(set().union(*(self.at(self.requests, each) for each in TENANTS)))
        parts = len(self.at(self.requests, tenant))
        return (replicas - parts) / (replicas - 1) / parts if replicas > 1 else 0.0

    def guaranteed_here(self, replica):
        news = {}
        for tenant, limits in self.limits.items():
            if isinstance(limits.guaranteed_blocks, int) and limits.guaranteed_blocks:
                here, elsewhere = self.blocks[tenant, replica], self.elsewhere(self.blocks, tenant, replica)
                part = part_of(limits.guaranteed_blocks, here, elsewhere)
                if self.parts.get((tenant, replica)) != part:
                    self.parts[tenant, replica] = news[tenant] = part
        return news


def drawn_limits(draw):
    return TenantLimits(weight=draw.choice([1e-6, 0.5, 1.0, 3.0, 1e6]), guaranteed_blocks=draw.choice([0, 7, 40, "9%"]))


@pytest.mark.parametrize("seed", range(12))
def test_replicas_are_told_what_a_plain_formula_says(seed):
    draw = random.Random(seed)
    limits = {tenant: drawn_limits(draw) for tenant in TENANTS[:4]}
    shares, plain, told = TenantShares(limits), PlainShares(limits), Counter()
    for _ in range(1500):
        tenant, replica = draw.choice(TENANTS), draw.choice(REPLICAS[: draw.randint(1, 4)])
        match draw.choices(["compute", "request", "block", "ask", "forget", "limit"], [30, 20, 20, 30, 1, 1])[0]:
            case "compute":
                tokens = draw.choice([1, 30, 4000])
                shares.note_computed(tenant, replica, tokens)
                plain.computed[tenant, replica] += tokens
                plain.served[tenant] = True
            case "request":
                more = draw.choice([1, -min(1, plain.requests[tenant, replica])])
                shares.note_requests(tenant, replica, more)
                plain.requests[tenant, replica] += more
            case "block":
                more = draw.choice([1, 5, -plain.blocks[tenant, replica]])
                shares.note_blocks(tenant, replica, more)
                plain.blocks[tenant, replica] += more
            case "forget":
                shares.forget(replica)
                plain.forget(replica)
            case "limit":
                limits[tenant] = drawn_limits(draw)
                shares.forget_guarantee(tenant)
                plain.forget_guarantee(tenant)
            case "ask":
                leads, parts = plain.served_elsewhere(replica), plain.guaranteed_here(replica)
                assert shares.served_elsewhere(replica) == leads
                assert shares.guaranteed_here(replica) == parts
                told.update(leads=len(leads), parts=len(parts))
    assert min(told["leads"], told["parts"]) > 20


class Name(str):
    """Counts how often a name is looked up."""

    __slots__ = ()
    looked_up = 0

    def __hash__(self):
        Name.looked_up += 1
        return super().__hash__()


def lookups(act):
    before = Name.looked_up
    act()
    return Name.looked_up - before


@pytest.mark.parametrize("count", [100, 1000])
def test_a_request_looks_at_each_tenant_of_its_replica_a_few_times_and_at_guarantees_that_changed(count):
    limits = {Name(number): TenantLimits(guaranteed_blocks=9) for number in range(count)}
    shares, replicas = TenantShares(limits), [Name(replica) for replica in "abc"]
    for tenant in limits:
        for replica in replicas:
            shares.note_requests(tenant, replica, 1)
            shares.note_computed(tenant, replica, 1)
            shares.note_blocks(tenant, replica, 1)
    for replica in replicas:
        shares.served_elsewhere(replica)
        shares.guaranteed_here(replica)
    few = [*limits][:3]
    for tenant in few:
        for replica in replicas:
            shares.note_computed(tenant, replica, 100)
        shares.note_blocks(tenant, "a", 1)
    assert lookups(lambda: shares.served_elsewhere("a")) < 6 * count + 100
    assert lookups(lambda: shares.guaranteed_here("a")) < 20 * len(few)
