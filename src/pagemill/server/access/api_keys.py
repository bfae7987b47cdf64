"""Decides by its API key whose a request is, and what it may do."""

from __future__ import annotations

import base64
import contextlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from starlette.datastructures import Headers

from pagemill.errors import AuthenticationError, ConfigError, PermissionDeniedError
from pagemill.server.access.server_access import ServerAccess
from pagemill.tenant_limits import DEFAULT_TENANT, TenantsFile, key_digest, key_digests

OPEN_PATHS = frozenset({"/", "/health", "/live", "/ready", "/version"})
"""Paths that never need a key: what is there says nothing of any request. All others do, also those to come."""
OPEN_FOLDER = "/page/"
"""The files of the page at `/`, which asks for the key itself."""

ANTHROPIC_KEY = "x-api-key"
"""The header in which Anthropic's clients send a key."""

HEADERS = "'Authorization: Bearer KEY' or 'x-api-key: KEY'"

METRICS = "/metrics"
BROWSER_PATHS = frozenset({METRICS, "/docs", "/openapi.json"})
"""Paths that people open in a browser, which asks for a key as for a password, with any name."""


class Caller(NamedTuple):
    """Who asks. is_admin: may see and change what concerns all tenants."""

    tenant: str
    is_admin: bool


class ApiKeys:
    """Finds who asks, by the keys of a tenants file and those given at the start.

    Without keys every request is the default tenant's, and everybody is an admin of a server that only this machine can
    reach, nobody of any other.
    """

    def __init__(
        self, file: TenantsFile | None = None, access: ServerAccess | None = None, *, on_loopback: bool = True
    ) -> None:
        """Raises ConfigError for a key of two tenants."""
        self._own = ServerAccess() if access is None else access
        self._on_loopback = on_loopback
        self._tenants: dict[bytes, str] = {}
        self._admins: dict[bytes, str] = {}
        self._revoked: dict[bytes, str] = {}
        self.take(file)

    @property
    def are_there(self) -> bool:
        """Whether requests need a key."""
        return bool(self._tenants)

    @property
    def num_tenants(self) -> int:
        """How many tenants may ask: those with a key, and "default" where there are admins."""
        return len({*self._tenants.values(), *([DEFAULT_TENANT] if self._admins else [])}) or 1

    def check(self, file: TenantsFile | None) -> None:
        """Raises ConfigError for a file with another tenant's key."""
        self._merged(file)

    def take(self, file: TenantsFile | None) -> None:
        """Replaces what is of the tenants file. Raises what `check` raises, and changes nothing."""
        self._tenants, self._admins = self._merged(file), self._admins_of(file)
        self._revoked = {}
        self._file = file

    def revoke(self, file: TenantsFile | None) -> None:
        """Refuses the keys that a file has no more, until `take`. The others stay whose they were. Raises what `check`
        raises, and changes nothing."""
        kept = self._merged(file).keys() | self._admins_of(file).keys()
        self._revoked = dict.fromkeys((self._tenants.keys() | self._admins.keys()) - kept, "")

    def tenant_defaults(self, tenant: str) -> Mapping[str, Any]:
        """Returns the limits of a tenant where none are given, as the tenants file has it."""
        return {} if self._file is None else self._file.defaults_of(tenant)

    def _admins_of(self, file: TenantsFile | None) -> dict[bytes, str]:
        admins = [*key_digests("admin_api_key", self._own.admin_api_key), *([] if file is None else file.admin_keys)]
        return dict.fromkeys(admins, "")

    def _merged(self, file: TenantsFile | None) -> dict[bytes, str]:
        """Returns the tenant by each key."""
        tenants = {} if file is None else dict(file.keys)
        for digest in key_digests("api_key", self._own.api_key):
            if tenants.setdefault(digest, DEFAULT_TENANT) != DEFAULT_TENANT:
                raise ConfigError(
                    f"a key given with --api-key is also one of tenant {tenants[digest]!r}; give each its own",
                    param="api_key",
                )
        return tenants

    def caller(self, method: str, path: str, headers: Headers) -> Caller:
        """Returns who asks.

        Raises AuthenticationError for a path that needs a known key, PermissionDeniedError for one that needs an
        admin's.
        """
        if is_open(path):
            return Caller(DEFAULT_TENANT, False)
        digest = key_digest(_sent_key(path, headers))
        tenant, is_admin = _find(digest, self._tenants.items()), _find(digest, self._admins.items()) is not None
        for_admins = _for_admins(method, path)
        if _find(digest, self._revoked.items()) is not None:
            raise AuthenticationError(f"this API key is known no more; send another as {HEADERS}")
        if tenant is None and not is_admin:
            if self._tenants or (self._admins and for_admins):
                raise AuthenticationError(f"no known API key; send one as {HEADERS}")
            is_admin = self._on_loopback and not self._admins
            if path == METRICS:
                return Caller(DEFAULT_TENANT, is_admin)
        if for_admins and not is_admin and not (path == METRICS and self._shows_one_tenant()):
            way_out = "send one of the admin keys" if self._admins else "start the server with --admin-api-key"
            raise PermissionDeniedError(f"{method} {path} concerns all tenants and needs an admin key; {way_out}")
        return Caller(tenant or DEFAULT_TENANT, is_admin)

    def _shows_one_tenant(self) -> bool:
        """Returns True where figures by tenant tell no tenant of another: one has all keys, and nobody is admin."""
        return not self._admins and len(set(self._tenants.values())) == 1


def is_open(path: str) -> bool:
    """Returns True for a path that never needs a key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def challenge(path: str) -> str:
    """Returns what a refusal for want of a key says how to send it (`WWW-Authenticate`)."""
    return 'Basic realm="pagemill: any name, an API key as the password"' if path in BROWSER_PATHS else "Bearer"


def _sent_key(path: str, headers: Headers) -> str:
    """Returns the key that came with a request, "" for none."""
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    if not scheme:
        return headers.get(ANTHROPIC_KEY, "").strip()
    if scheme.lower() == "bearer":
        return sent.strip()
    if scheme.lower() == "basic" and path in BROWSER_PATHS:
        with contextlib.suppress(ValueError):
            return base64.b64decode(sent, validate=True).decode().partition(":")[2]
    return ""


def _for_admins(method: str, path: str) -> bool:
    return path.startswith("/v1/tenants") or path == METRICS or (path == "/v1/kv_memory" and method != "GET")


def _find(digest: bytes, known: Iterable[tuple[bytes, str]]) -> str | None:
    """Returns what stands beside a digest. Takes equally long wherever it stands, and if it is not there."""
    found = None
    for each, name in known:
        if hmac.compare_digest(digest, each):
            found = name
    return found
