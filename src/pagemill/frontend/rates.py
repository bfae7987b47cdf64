"""Rates: requests and tokens per minute, by tenant.

Each limit is a store that fills evenly, up to what a minute allows. A request takes one of the first and its prompt's
tokens of the second, at its start; its answer's tokens are taken at its end, when they are known. So the second may
fall below nothing, and what follows waits until it has filled again. A call of several prompts takes one of the first
for each, all before its first prompt starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import NamedTuple

from pagemill.errors import InvalidRequestError, RateLimitError, TooManyWaitingError
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
        """Takes so much; below 0, it is given back."""
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

    def check(self, tenant: str, num_requests: int = 1) -> None:
        """Raises RateLimitError for requests that cannot all begin now, InvalidRequestError for more of them than a
        minute allows."""
        for name, stores, least in (
            ("requests_per_minute", self._requests, num_requests),
            ("tokens_per_minute", self._tokens, 1),
        ):
            store = stores.get(tenant)
            if store is None:
                continue
            if least > store.limit:
                raise InvalidRequestError(
                    f"this has {least} prompts, each of which counts as a request, and {name} of tenant {tenant!r} is "
                    f"{store.limit}; send at most {store.limit} at a time, or raise that limit",
                    param="prompt",
                )
            if (wait_s := store.seconds_until(least)) > 0:
                used = "used up" if least == 1 else f"{math.floor(max(store.left, 0))} left of"
                counts = "" if least == 1 else f", and this has {least} prompts"
                raise RateLimitError(
                    f"tenant {tenant!r} has {used} the {store.limit} of its {name}{counts}; send this again in "
                    f"{math.ceil(wait_s)} s",
                    retry_after_s=wait_s,
                )

    def charge(self, tenant: str, num_requests: int = 1) -> Charge:
        """Counts the requests of one call. Raises what `check` raises, and then counts nothing."""
        self.check(tenant, num_requests)
        self.spend(tenant, 0, num_requests)
        return Charge(self, tenant, num_requests)

    def spend(self, tenant: str, num_tokens: int, num_requests: int = 0) -> None:
        """Counts tokens and requests, whatever is left; those below 0 are given back."""
        for stores, amount in ((self._tokens, num_tokens), (self._requests, num_requests)):
            if tenant in stores:
                stores[tenant].take(amount)

    def status(self, tenant: str) -> dict[str, RateStatus]:
        """Returns the tenant's limits as they stand: "requests", "tokens", or neither."""
        return dict(self._status(tenant))

    def _status(self, tenant: str) -> Iterator[tuple[str, RateStatus]]:
        for name, stores in (("requests", self._requests), ("tokens", self._tokens)):
            if (store := stores.get(tenant)) is not None:
                left = max(math.floor(store.left), 0)
                yield name, RateStatus(store.limit, left, store.seconds_until(store.limit))


class Charge:
    """The requests of one call that have been counted, each of which one of its prompts uses.

    Those that no prompt has used when its context ends are given back; all, and their tokens, if too many wait.
    """

    def __init__(self, rates: Rates, tenant: str, num_requests: int) -> None:
        self._rates = rates
        self._tenant = tenant
        self._num_requests = num_requests
        self._num_used = 0
        self._num_tokens = 0

    def use(self, num_tokens: int) -> None:
        """Counts a prompt's tokens, as it begins."""
        self._num_used += 1
        self._num_tokens += num_tokens
        self._rates.spend(self._tenant, num_tokens)

    def give_back(self) -> None:
        """Takes back all that has been counted."""
        self._rates.spend(self._tenant, -self._num_tokens, -self._num_requests)
        self._num_requests = self._num_used = self._num_tokens = 0

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, TooManyWaitingError):
            self.give_back()
        self._rates.spend(self._tenant, 0, self._num_used - self._num_requests)
        self._num_requests = self._num_used
