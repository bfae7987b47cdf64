"""Tenants: who is charged for blocks, how many each may have, and whose cached blocks make room.

A block is charged once, to the owner of the namespace in which it can be found, from when it begins until it ends. All
tables that share it are of that tenant, so an account is a sum, and needs no column of blocks.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from pagemill.errors import ConfigError, UnknownTenantError
from pagemill.memory.eviction import EvictionPolicy
from pagemill.tenant_limits import DEFAULT_TENANT

NO_QUOTA = sys.maxsize

Owner = TypeVar("Owner")


class Quota(NamedTuple):
    """Says how many blocks are kept for a tenant, and the most it may have (NO_QUOTA: as many as the pool has)."""

    guaranteed: int = 0
    most: int = NO_QUOTA


@dataclass(slots=True, eq=False)
class Tenant:
    """The account of one tenant.

    number:            its place among `Tenants.accounts`.
    policy:            its cached blocks, in the order in which they make room.
    pinned:            blocks that its pins hold, or will.
    charged:           its blocks, active and cached.
    guaranteed_blocks: blocks that are kept for it; others may borrow them, and give them back first.
    part_blocks:       the most of them that are its here, where they are guaranteed over several pools; else NO_QUOTA.
    max_blocks:        the most that it may have; NO_QUOTA if only the pool's size limits it.
    idle_timeout_s:    how long its cached blocks stay when nobody uses them; None: as long as there is room.
    look_s:            when to look for such blocks next.
    """

    name: str
    number: int
    policy: EvictionPolicy
    guaranteed_blocks: int = 0
    part_blocks: int = NO_QUOTA
    max_blocks: int = NO_QUOTA
    pinned: int = 0
    charged: int = 0
    evictions: int = 0
    idle_timeout_s: float | None = None
    look_s: float = math.inf

    def set_idle_timeout(self, idle_timeout_s: float | None) -> None:
        self.idle_timeout_s = idle_timeout_s
        self.look_s = math.inf if idle_timeout_s is None else -math.inf

    @property
    def cached(self) -> int:
        return len(self.policy)

    @property
    def active(self) -> int:
        return self.charged - len(self.policy)

    @property
    def promised(self) -> int:
        """Returns how many blocks are out of the others' reach: those guaranteed to it, or pinned if these are more."""
        return max(self.guaranteed_blocks, self.pinned)

    @property
    def kept_blocks(self) -> int:
        """Returns how many of its guaranteed blocks are its here now."""
        return min(self.guaranteed_blocks, self.part_blocks)

    @property
    def borrowed(self) -> int:
        """Returns how many blocks it has beyond its guarantee; below 0, how many are still kept for it."""
        return self.charged - self.kept_blocks

    @property
    def uses_more(self) -> bool:
        """Returns whether its active blocks exceed its guarantee, so that its sequences may be preempted for others.

        Cached blocks do not count: these are evicted instead.
        """
        return self.active > self.kept_blocks

    @property
    def lendable(self) -> int:
        """Returns how many of its cached blocks others may take: those beyond its guarantee."""
        return max(0, min(len(self.policy), self.borrowed))

    @property
    def room(self) -> int:
        """Returns how many blocks its quota allows beside its active ones."""
        return max(0, self.max_blocks - self.active)


class Tenants:
    """The accounts over one pool; one named "default" is always there.

    With one account every question is O(1), with more it is O(accounts).

    promised: blocks that are kept for all of them, see `Tenant.promised`.
    """

    def __init__(self, policy: Callable[[], EvictionPolicy]) -> None:
        self._policy = policy
        self.accounts = [Tenant(DEFAULT_TENANT, 0, policy())]
        self._by_name = {DEFAULT_TENANT: self.accounts[0]}
        self.promised = 0

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self.accounts)

    def __getitem__(self, name: str) -> Tenant:
        """Raises UnknownTenantError."""
        try:
            return self._by_name[name]
        except KeyError:
            raise UnknownTenantError.of(name, self._by_name) from None

    def set(self, quotas: Mapping[str, Quota], num_frames: int) -> None:
        """Opens accounts or changes their quotas. Raises ConfigError, and changes nothing, see `refusal`."""
        reason = refusal(self.quotas | dict(quotas), num_frames, {})
        if reason is not None:
            raise ConfigError(reason, param="tenants")
        for name, quota in quotas.items():
            if name not in self._by_name:
                self._by_name[name] = Tenant(name, len(self.accounts), self._policy())
                self.accounts.append(self._by_name[name])
            tenant, before = self._by_name[name], self._by_name[name].promised
            tenant.guaranteed_blocks, tenant.max_blocks = quota
            self.promised += tenant.promised - before

    def note_pinned(self, tenant: Tenant, blocks: int) -> None:
        """Takes note of how many blocks a tenant's pins hold."""
        before, tenant.pinned = tenant.promised, blocks
        self.promised += tenant.promised - before

    @property
    def quotas(self) -> dict[str, Quota]:
        """Returns the quotas of all tenants, by name."""
        return {tenant.name: Quota(tenant.guaranteed_blocks, tenant.max_blocks) for tenant in self}

    @property
    def cached(self) -> int:
        """Returns how many blocks are cached, over all tenants."""
        return sum(tenant.cached for tenant in self)

    def available(self, tenant: Tenant, num_free: int) -> int:
        """Returns how many frames a tenant can have now, whatever its quota.

        They are the free ones, those of its own cached blocks, and those that other tenants lend.
        """
        own = num_free + len(tenant.policy)
        if len(self.accounts) == 1:
            return own
        return own + sum(other.lendable for other in self if other is not tenant)

    def making_room(self, tenant: Tenant, wanted: int) -> dict[Tenant, int]:
        """Returns how many cached blocks of whom to evict so that `tenant` has room for `wanted` more.

        They go from those that have borrowed most. So many must be available to the tenant.
        """
        if len(self.accounts) == 1:
            return {tenant: wanted}
        evictable = {other: other.cached if other is tenant else other.lendable for other in self}
        return give_way(evictable, lambda other: other.borrowed, wanted)

    def shrinking(self, wanted: int) -> dict[Tenant, int]:
        """Returns how many cached blocks of whom end when the pool shrinks. Guaranteed blocks are taken too."""
        return give_way({tenant: tenant.cached for tenant in self}, lambda tenant: tenant.borrowed, wanted)


def refusal(quotas: Mapping[str, Quota], num_frames: int, pinned: Mapping[str, int]) -> str | None:
    """Returns why a pool of `num_frames` cannot keep these tenants' quotas, and the way out; None if it can.

    pinned: blocks that pins hold, by tenant.
    """
    for name, (guaranteed, most) in quotas.items():
        if guaranteed < 0:
            return f"guaranteed_blocks of tenant {name!r} would be {guaranteed}, and must be at least 0; raise it"
        if most < max(1, guaranteed):
            way = "raise it" if guaranteed <= 1 else "raise it, or lower its guaranteed_blocks"
            return f"max_blocks of tenant {name!r} would be {most}, and must be at least {max(1, guaranteed)}; {way}"
        if pinned.get(name, 0) > most:
            return (
                f"pins hold {pinned[name]} blocks of tenant {name!r}, over its max_blocks, {most}; raise it, or unpin "
                f"something"
            )
    total, held = promised(quotas, pinned), sum(pinned.values())
    if total > num_frames:
        of_pins, unpin = (f", of which pins hold {held}", ", unpin something") if held else ("", "")
        return (
            f"{total} blocks would be guaranteed, and the pool has {num_frames}{of_pins}; guarantee less{unpin}, or "
            f"raise kv_memory"
        )
    return None


def promised(quotas: Mapping[str, Quota], pinned: Mapping[str, int]) -> int:
    """Returns how many blocks are kept for all tenants: of each those guaranteed, or pinned if these are more."""
    return sum(max(quota.guaranteed, pinned.get(name, 0)) for name, quota in quotas.items())


def give_way(evictable: Mapping[Owner, int], borrowed: Callable[[Owner], int], wanted: int) -> dict[Owner, int]:
    """Returns how much each gives of `wanted`, those first that have borrowed most, and who gives nothing left out.

    evictable: the most that each can give, in all at least `wanted`. Each comes down to the same level of what it has
    borrowed, as far as it can; a remainder smaller than the number of those comes from the first of them. O(owners).
    """
    owners = sorted((each for each, count in evictable.items() if count), key=borrowed, reverse=True)
    above = [(borrowed(each), evictable[each]) for each in owners]

    def given(level: int) -> int:
        return sum(min(count, max(0, has - level)) for has, count in above)

    levels = range(min(has - count for has, count in above), above[0][0] + 1)
    level = levels[bisect_left(levels, True, key=lambda each: given(each) < wanted)]
    left, giving = wanted - given(level), dict[Owner, int]()
    for each, (has, count) in zip(owners, above, strict=True):
        amount = min(count, max(0, has - level))
        if left and has >= level and amount < count:
            amount, left = amount + 1, left - 1
        if amount:
            giving[each] = amount
    return giving
