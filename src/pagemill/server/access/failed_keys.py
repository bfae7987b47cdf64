"""Counts wrong API keys by address, so that nobody goes on guessing."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import NamedTuple

from pagemill.errors import RateLimitError

PERIOD_S = 60.0
MAX_ADDRESSES = 8192
"""Addresses that are remembered; the one that failed first is forgotten for another."""


class _Failed(NamedTuple):
    num_keys: int
    until_s: float


class FailedKeys:
    """Refuses all requests of an address that has sent too many wrong keys in a period, until that is over.

    A right key does not help it, or guessing would go on.
    """

    def __init__(self, limit: int) -> None:
        """limit: wrong keys in a period."""
        self._limit = limit
        self._failed: OrderedDict[str, _Failed] = OrderedDict()

    def check(self, address: str) -> None:
        """Raises RateLimitError for an address that must wait."""
        found = self._failed.get(address)
        if found is None or found.num_keys < self._limit:
            return
        left_s = found.until_s - time.monotonic()
        if left_s > 0:
            raise RateLimitError(
                f"{address} has sent {found.num_keys} wrong API keys within {PERIOD_S:g} s, as many as "
                f"--max-failed-keys allows; its requests are refused for another {math.ceil(left_s)} s",
                retry_after_s=left_s,
            )

    def note(self, address: str) -> None:
        """Notes a wrong key."""
        now, found = time.monotonic(), self._failed.get(address)
        if found is None or found.until_s <= now:
            self._failed.pop(address, None)
            if len(self._failed) >= MAX_ADDRESSES:
                self._failed.popitem(last=False)
            found = _Failed(0, now + PERIOD_S)
        self._failed[address] = found._replace(num_keys=found.num_keys + 1)
