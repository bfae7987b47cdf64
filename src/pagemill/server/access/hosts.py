"""Refuses what a browser sends for a site that this server does not know.

A site can give its own name this machine's address (DNS rebinding), and then reads what a local server answers. And a
page can send what it may not read the answer of. Where there are keys, such a page has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from pagemill.errors import HostNotAllowedError
from pagemill.server.access.server_access import is_address

READING = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing; the browser keeps their answers from pages of other sites."""


class AllowedHosts:
    """Knows the names under which a server may be asked: these, addresses, and `localhost`."""

    def __init__(self, names: Iterable[str], origins: Iterable[str] = ()) -> None:
        """names: `*.example.com` stands for all names that end so, `*` for all. origins: those that CORS allows."""
        self._names = [name.removesuffix(".").lower() for name in names if name]
        self._origins = frozenset(origins)

    def check(self, method: str, headers: Headers) -> None:
        """Raises HostNotAllowedError for a request under another name, or from a page of another site."""
        host, origin = _name(headers.get("host", "")), headers.get("origin")
        if not self._allows(host):
            raise HostNotAllowedError(
                f"this server is not asked as {host!r:.300}; start it with --allowed-hosts {host:.256} if that is its "
                f"name, or ask for its address",
                param="Host",
            )
        if origin is None or method in READING or not self._origins.isdisjoint(("*", origin)):
            return
        site = _site(origin)
        if site != host and not any(_matches(site, name) for name in self._names):
            raise HostNotAllowedError(
                f"a page of {origin!r:.300} may not ask this server; start it with --allowed-origins {origin:.256} if "
                f"it may",
                param="Origin",
            )

    def _allows(self, host: str) -> bool:
        if host in ("", "localhost") or host.endswith(".localhost") or is_address(host):
            return True
        return any(_matches(host, name) for name in self._names)


def _site(origin: str) -> str:
    """Returns the host of an origin; "" for what is none."""
    try:
        return _name(urlsplit(origin).netloc)
    except ValueError:
        return ""


def _matches(host: str, name: str) -> bool:
    return name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:]))


def _name(host: str) -> str:
    """Returns a host without its port, in lower case."""
    if not host.endswith("]"):
        before, colon, port = host.rpartition(":")
        host = before if colon and (not port or port.isdecimal()) else host
    return host.strip("[]").removesuffix(".").lower()
