"""`/v1/sessions`: the conversations that requests with a `session_id` have made."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from pagemill.frontend.async_llm import AsyncLLM
from pagemill.server.bodies.reader import BodyRoute
from pagemill.server.protocol.body import Body, Listing
from pagemill.server.protocol.parts import written
from pagemill.server.routes.known_query import known_query
from pagemill.server.routes.namespaces import All, Tenant, named, removed, require_all
from pagemill.sessions.record import SessionInfo


class SessionCard(BaseModel):
    """A session without what was said in it. Times are seconds since 1970."""

    id: str
    object: Literal["session"] = "session"
    created: int
    last_used: int
    model: str
    num_turns: int
    num_messages: int | None
    """Messages so far; None for a session of plain prompts."""
    num_tokens: int
    damaged: bool
    """True if what stands here is lost, so that it can only be deleted. What was said is checked where it is used."""


class OwnedSessionCard(SessionCard):
    """A session as admins see it, with its namespace."""

    tenant: str
    cache_salt: str


class SessionContent(SessionCard):
    messages: list[dict[str, Any]] | None
    instructions: str | None
    """The system message before them, of a response."""
    kv_blocks: dict[str, int]
    """The blocks that the next turn would find, by tier."""


class SessionDeleted(BaseModel):
    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True


class ForkRequest(Body):
    """`session_id` is the new session's."""

    session_id: str


def session_routes(llm: AsyncLLM) -> APIRouter:
    """Returns the routes. A session has its name in the namespace of the tenant and `cache_salt`."""
    routes = APIRouter(prefix="/v1/sessions", route_class=BodyRoute, dependencies=[known_query()])

    @routes.get("", response_model=Listing[OwnedSessionCard | SessionCard])
    async def sessions(request: Request, cache_salt: str = "", tenant: Tenant = None, every: All = False) -> Response:
        """Lists the sessions of the caller's namespace, the last used first; for admins, also those of others."""
        if every:
            require_all(request, cache_salt)
            every_one = [one for one in await llm.sessions(all_namespaces=True) if tenant in (None, one.space.tenant)]
            return await written(lambda: Listing[OwnedSessionCard](data=[*map(_owned, every_one)]))
        space = named(request, tenant, cache_salt)
        found = await llm.sessions(cache_salt=space.cache_salt, tenant=space.tenant)
        return await written(lambda: Listing[SessionCard](data=[*map(_card, found)]))

    @routes.get("/{session_id}", response_model=SessionContent)
    async def describe(session_id: str, request: Request, cache_salt: str = "") -> Response:
        """Shows a session with its messages, and its KV blocks by tier."""
        session = llm.session(session_id, cache_salt=cache_salt, tenant=request.state.tenant)
        record, kv_blocks = await session.record(), await session.kv_blocks()
        card = _card(record.info).model_dump()
        said: dict[str, Any] = {"messages": record.messages, "instructions": record.instructions}
        return await written(lambda: SessionContent(**card, **said, kv_blocks=kv_blocks))

    @routes.delete("/{session_id}")
    async def delete(session_id: str, request: Request, cache_salt: str = "", tenant: Tenant = None) -> SessionDeleted:
        """Forgets a session."""
        space = named(request, tenant, cache_salt)
        await llm.session(session_id, cache_salt=space.cache_salt, tenant=space.tenant).delete()
        removed(request, "session", session_id, space)
        return SessionDeleted(id=session_id)

    @routes.post("/{session_id}/fork")
    async def fork(session_id: str, body: ForkRequest, request: Request, cache_salt: str = "") -> SessionCard:
        """Begins another session as this one is now."""
        child = await llm.session(session_id, cache_salt=cache_salt, tenant=request.state.tenant).fork(body.session_id)
        return _card((await child.record()).info)

    return routes


def _owned(info: SessionInfo) -> OwnedSessionCard:
    return OwnedSessionCard(**_card(info).model_dump(), tenant=info.space.tenant, cache_salt=info.space.cache_salt)


def _card(info: SessionInfo) -> SessionCard:
    return SessionCard(
        id=info.name,
        created=int(info.created_s),
        last_used=int(info.used_s),
        model=info.model,
        num_turns=info.num_turns,
        num_messages=info.num_messages,
        num_tokens=info.num_tokens,
        damaged=info.damaged,
    )
