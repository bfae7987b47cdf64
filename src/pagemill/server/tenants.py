"""`/v1/tenants`: shows tenants and changes their limits."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Body

from pagemill.engine.stats import TenantStats
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.server.errors import asked_by_client
from pagemill.tenant_limits import TenantLimits


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


def _shown(stats: TenantStats) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(stats)
    return shown
