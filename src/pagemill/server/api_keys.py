"""Decides whose a request is, by its API key."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers

from pagemill.errors import AuthenticationError, PermissionDeniedError
from pagemill.tenant_limits import DEFAULT_TENANT, TenantsFile, key_digest

WITH_KEY = ("/v1/", "/tokenize", "/detokenize")
"""How paths begin that need a key, where the server has keys."""


class ApiKeys:
    """Finds whose a request is, by the keys of a tenants file.

    Without keys every request is the default tenant's, and nobody needs to be an admin.
    """

    def __init__(self, file: TenantsFile | None) -> None:
        self._tenants = {} if file is None else file.keys
        self._admins = dict.fromkeys([] if file is None else file.admin_keys, "")

    def tenant(self, method: str, path: str, headers: Headers) -> str:
        """Returns the request's tenant.

        Raises AuthenticationError for a path of `WITH_KEY` without a known key, PermissionDeniedError for a path that
        concerns all tenants without an admin's key.
        """
        if not (self._tenants or self._admins) or not path.startswith(WITH_KEY):
            return DEFAULT_TENANT
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = key_digest(key.strip() if scheme.lower() == "bearer" else "")
        tenant, admin = _find(digest, self._tenants.items()), _find(digest, self._admins.items())
        concerns_all = path.startswith("/v1/tenants") or (path == "/v1/kv_memory" and method != "GET")
        if tenant is None and admin is None and (self._tenants or concerns_all):
            raise AuthenticationError("no known API key; send one as 'Authorization: Bearer KEY'")
        if concerns_all and admin is None:
            raise PermissionDeniedError(f"{method} {path} needs one of the admin keys")
        return tenant or DEFAULT_TENANT


def _find(digest: bytes, known: Iterable[tuple[bytes, str]]) -> str | None:
    """Returns what stands beside a digest. Takes equally long wherever it stands, and if it is not there."""
    found = None
    for each, name in known:
        if hmac.compare_digest(digest, each):
            found = name
    return found
