"""Counts the large bodies of open requests, over all tenants and by tenant: each has its part of the room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pagemill.errors import ServerBusyError, TooManyWaitingError
from pagemill.server.access.limits import ServerLimits

SMALL_BODY_BYTES = 64 << 10
"""A body of at most so many bytes is always taken, so that large ones cannot shut out everybody."""


class LargeBodies:
    """Bytes of the large bodies that are being read or answered."""

    def __init__(self, limits: ServerLimits, num_tenants: Callable[[], int]) -> None:
        """num_tenants: how many share the room; it may change."""
        self._limits = limits
        self._num_tenants = num_tenants
        self._bytes: Counter[str] = Counter()

    @property
    def part(self) -> int:
        """How many bytes one tenant's bodies may have together: an equal part, but at least the largest body."""
        limits = self._limits
        return max(limits.max_bodies_bytes // max(self._num_tenants(), 1), limits.max_body_bytes)

    def grow(self, tenant: str, before: int, size: int) -> None:
        """Counts a body that has `size` bytes now, of which `before` have been counted.

        Raises ServerBusyError, and counts nothing more, where there is no room for it now, TooManyWaitingError where
        its tenant has no more.
        """
        more, limit, part = _large(size) - _large(before), self._limits.max_bodies_bytes, self.part
        others = self._bytes[tenant] - _large(before)
        if part < limit and others + _large(size) > part:
            raise TooManyWaitingError(
                f"this body has {size} bytes or more, those of other open requests of tenant {tenant!r} have {others}, "
                f"and all of a tenant together may have {part}; wait for an answer, or start the server with a higher "
                f"--max-bodies-bytes"
            )
        others = self._bytes.total() - _large(before)
        if others + _large(size) > limit:
            raise ServerBusyError(
                f"this body has {size} bytes or more, those of other open requests have {others}, and all together may "
                f"have {limit}; try again later, or start the server with a higher --max-bodies-bytes"
            )
        self._bytes[tenant] += more

    def end(self, tenant: str, size: int) -> None:
        """Gives back what a body of so many bytes was counted."""
        self._bytes[tenant] -= _large(size)
        if not self._bytes[tenant]:
            del self._bytes[tenant]


def _large(size: int) -> int:
    """Returns how many bytes of a body count."""
    return size if size > SMALL_BODY_BYTES else 0
