"""Whose an HTTP request is, by its API key; and the routes that show tenants and change their limits."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import APIRouter, Body, Request

from pagemill.engine.async_llm import AsyncLLM
from pagemill.engine.messages import TenantStats
from pagemill.errors import AuthenticationError, PermissionDeniedError
from pagemill.server.errors import asked_by_client
from pagemill.tenant_limits import DEFAULT_TENANT, TenantLimits, TenantsFile, key_digest


class ApiKeys:
    """The keys of a tenants file. Where it has none, every request is the default tenant's, and none is an admin's."""

    def __init__(self, file: TenantsFile | None) -> None:
        self._tenants = {} if file is None else file.keys
        self._admins = dict.fromkeys([] if file is None else file.admin_keys, "")

    async def __call__(self, request: Request) -> None:
        """Sets `request.state.tenant` and `.admin`. Raises AuthenticationError for a `/v1` path without a known key."""
        request.state.tenant, request.state.admin = DEFAULT_TENANT, False
        if not (self._tenants or self._admins) or not request.url.path.startswith("/v1/"):
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = key_digest(key.strip() if scheme.lower() == "bearer" else "")
        tenant, admin = _find(digest, self._tenants.items()), _find(digest, self._admins.items())
        if tenant is None and admin is None and (self._tenants or _is_admins(request)):
            raise AuthenticationError("no known API key; send one as 'Authorization: Bearer KEY'")
        request.state.tenant, request.state.admin = tenant or DEFAULT_TENANT, admin is not None
        if _is_admins(request) and admin is None:
            raise PermissionDeniedError(f"{request.method} {request.url.path} needs one of the admin keys")


def tenant_routes(llm: AsyncLLM) -> APIRouter:
    """Limits and figures by tenant. Where there are keys, they need an admin's."""
    routes = APIRouter(prefix="/v1/tenants")

    @routes.get("")
    async def tenants() -> dict[str, Any]:
        return {name: _shown(stats) for name, stats in (await llm.stats()).tenants.items()}

    @routes.put("/{name}")
    async def set_tenant(name: str, limits: dict[str, Any] = Body()) -> dict[str, Any]:  # noqa: B008
        with asked_by_client():
            await llm.set_tenant(name, TenantLimits.read(name, limits))
        return _shown((await llm.stats()).tenants[name])

    return routes


def _is_admins(request: Request) -> bool:
    """Whether a path concerns all tenants."""
    path = request.url.path
    return path.startswith("/v1/tenants") or (path == "/v1/kv_memory" and request.method != "GET")


def _shown(stats: TenantStats) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(stats)
    return shown


def _find(digest: bytes, known: Iterable[tuple[bytes, str]]) -> str | None:
    """What stands beside a digest. Takes equally long wherever it stands, and if it is not there."""
    found = None
    for each, name in known:
        if hmac.compare_digest(digest, each):
            found = name
    return found
