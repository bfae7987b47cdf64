"""Rates: requests and tokens per minute, by tenant.

Each limit is a store that fills evenly, up to what a minute allows. A request takes one of the first and its prompt's
tokens of the second, at its start; its answer's tokens are taken at its end, when they are known. So the second may
fall below nothing, and what follows waits until it has filled again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pagemill.errors import RateLimitError
from pagemill.tenant_limits import TenantLimits

MINUTE_S = 60.0


class RateStatus(NamedTuple):
    """One limit as it stands. reset_s: seconds until it is full again."""

    limit: int
    remaining: int
    reset_s: float


class _Store:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._left = float(limit)
        self._at_s = time.monotonic()

    @property
    def left(self) -> float:
        now = time.monotonic()
        self._left = min(self.limit, self._left + (now - self._at_s) * self.limit / MINUTE_S)
        self._at_s = now
        return self._left

    def take(self, amount: int) -> None:
        self._left = self.left - amount

    def seconds_until(self, amount: float) -> float:
        """Returns how long it takes until so much is left."""
        return max(amount - self.left, 0.0) * MINUTE_S / self.limit


class Rates:
    """Counts what tenants with such limits ask for, and refuses what is too much."""

    def __init__(self, limits: Mapping[str, TenantLimits]) -> None:
        self._requests: dict[str, _Store] = {}
        self._tokens: dict[str, _Store] = {}
        for tenant, each in limits.items():
            self.set_limits(tenant, each)

    def set_limits(self, tenant: str, limits: TenantLimits) -> None:
        """Gives a tenant other limits; one that stays keeps its count."""
        for stores, limit in (
            (self._requests, limits.requests_per_minute),
            (self._tokens, limits.tokens_per_minute),
        ):
            if limit is None:
                stores.pop(tenant, None)
            elif tenant not in stores or stores[tenant].limit != limit:
                stores[tenant] = _Store(limit)

    def check(self, tenant: str) -> None:
        """Raises RateLimitError for a request that cannot begin now."""
        for name, stores, least in (
            ("requests_per_minute", self._requests, 1.0),
            ("tokens_per_minute", self._tokens, 1.0),
        ):
            store = stores.get(tenant)
            if store is not None and (wait_s := store.seconds_until(least)) > 0:
                raise RateLimitError(
                    f"tenant {tenant!r} has used up the {store.limit} of its {name}; send this again in "
                    f"{math.ceil(wait_s)} s",
                    retry_after_s=wait_s,
                )

    def begin(self, tenant: str, num_tokens: int) -> None:
        """Counts a request and its prompt's tokens. Raises RateLimitError, and counts nothing, if it cannot begin."""
        self.check(tenant)
        if tenant in self._requests:
            self._requests[tenant].take(1)
        self.spend(tenant, num_tokens)

    def spend(self, tenant: str, num_tokens: int) -> None:
        """Counts tokens, whatever is left."""
        if tenant in self._tokens:
            self._tokens[tenant].take(num_tokens)

    def status(self, tenant: str) -> dict[str, RateStatus]:
        """Returns the tenant's limits as they stand: "requests", "tokens", or neither."""
        return dict(self._status(tenant))

    def _status(self, tenant: str) -> Iterator[tuple[str, RateStatus]]:
        for name, stores in (("requests", self._requests), ("tokens", self._tokens)):
            if (store := stores.get(tenant)) is not None:
                left = max(math.floor(store.left), 0)
                yield name, RateStatus(store.limit, left, store.seconds_until(store.limit))
