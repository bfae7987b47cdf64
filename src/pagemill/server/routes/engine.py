"""`/v1/requests`, `/v1/tenants` and `/v1/kv_memory`: what the engine is doing, for whom, and in how much memory."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Body, Request
from fastapi.responses import Response
from pydantic import BaseModel

from pagemill.frontend.async_llm import AsyncLLM
from pagemill.frontend.outputs import RunningRequest
from pagemill.server.access.api_keys import ApiKeys
from pagemill.server.bodies.reader import BodyRoute
from pagemill.server.logs.audit import audit
from pagemill.server.protocol.body import KVMemory, Listing
from pagemill.server.protocol.errors import asked_by_client
from pagemill.server.protocol.parts import written
from pagemill.server.routes.known_query import known_query
from pagemill.tenant_limits import TenantLimits


class SequenceCard(BaseModel):
    index: int
    status: Literal["running", "waiting"]
    num_tokens: int
    kv_blocks: dict[str, int]
    """Blocks by tier; a sequence that waits holds none."""


class RequestCard(BaseModel):
    id: str
    object: Literal["request"] = "request"
    num_prompt_tokens: int
    sequences: list[SequenceCard]


def engine_routes(llm: AsyncLLM, keys: ApiKeys) -> APIRouter:
    """Returns the routes. Where there are keys, those that concern all tenants need an admin's."""
    routes = APIRouter(prefix="/v1", route_class=BodyRoute, dependencies=[known_query()])

    @routes.get("/requests", response_model=Listing[RequestCard])
    async def requests(request: Request, cache_salt: str = "") -> Response:
        """Lists the requests that have not ended, of the caller's namespace, in the order in which they came."""
        found = await llm.requests(cache_salt=cache_salt, tenant=request.state.tenant)
        return await written(lambda: Listing[RequestCard](data=[*map(_card, found)]))

    @routes.get("/tenants", response_model=dict[str, Any])
    async def tenants() -> Response:
        """Shows every tenant's blocks, sequences, counters and limits."""
        return Response(msgspec.json.encode((await llm.stats()).tenants), media_type="application/json")

    @routes.put("/tenants/{name}")
    async def set_tenant(
        name: str,
        request: Request,
        limits: dict[str, Any] = Body(),  # noqa: B008
    ) -> dict[str, Any]:
        """Makes a tenant known, or gives it other limits; those that are left out are the defaults."""
        with asked_by_client():
            await llm.set_tenant(name, TenantLimits.read(name, limits, keys.tenant_defaults(name)))
        if (reload := request.app.state.tenants_reload) is not None:
            reload.note_set(name)
        audit(request, "tenant set", tenant=name, limits=limits)
        shown: dict[str, Any] = msgspec.to_builtins((await llm.stats()).tenants[name])
        return shown

    @routes.get("/kv_memory")
    async def kv_memory() -> KVMemory:
        """Shows the bytes that the KV pool has, with what streamed blocks take beside it."""
        return KVMemory(kv_memory=(await llm.ready()).kv_memory)

    @routes.post("/kv_memory")
    async def resize_kv_memory(body: KVMemory, request: Request) -> KVMemory:
        """Gives the KV pool another size, while requests go on."""
        with asked_by_client():
            size = (await llm.resize_kv_memory(body.kv_memory)).kv_memory
        audit(request, "KV pool resized", kv_bytes=size)
        return KVMemory(kv_memory=size)

    return routes


def _card(request: RunningRequest) -> RequestCard:
    sequences = [
        SequenceCard(status="running" if sequence.running else "waiting", **msgspec.structs.asdict(sequence))
        for sequence in request.sequences
    ]
    return RequestCard(id=request.request_id, num_prompt_tokens=len(request.prompt_token_ids), sequences=sequences)
