"""Namespaces: requests of one tenant with equal `cache_salt` find the same blocks, sessions and pins."""

from __future__ import annotations

from typing import NamedTuple

from pagemill.errors import InvalidRequestError, shown
from pagemill.tenant_limits import DEFAULT_TENANT

MAX_LENGTH = 1024
"""Characters of a tenant's name or a salt: each is kept with every session and pin."""


class _Names(NamedTuple):
    tenant: str
    cache_salt: str


class Namespace(_Names):
    """Has its own names of sessions and pins, and its own digests of blocks.

    Raises `InvalidRequestError` unless `tenant` and `cache_salt` are valid Unicode texts of at most `MAX_LENGTH`.
    """

    __slots__ = ()

    def __new__(cls, tenant: str = DEFAULT_TENANT, cache_salt: str = "") -> Namespace:
        for name, value in (("tenant", tenant), ("cache_salt", cache_salt)):
            if not isinstance(value, str) or not _is_unicode(value):
                raise InvalidRequestError(f"{name} is {shown(value)}; it must be valid Unicode text", param=name)
            if len(value) > MAX_LENGTH:
                raise InvalidRequestError(
                    f"{name} has {len(value)} characters; give at most {MAX_LENGTH}, such as a digest of it", param=name
                )
        return super().__new__(cls, tenant, cache_salt)

    def __str__(self) -> str:
        """Returns a text of its own for every pair, so that no tenant can write a salt that finds another's blocks."""
        return f"{len(self.tenant)}:{self.tenant}{self.cache_salt}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
