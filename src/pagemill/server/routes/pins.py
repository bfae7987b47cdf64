"""`/v1/pins`: prefixes whose blocks are never evicted; and the file of those that are pinned at the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from pagemill.engine.messages import PinInfo
from pagemill.errors import ConfigError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.frontend.input_processor import Prompt
from pagemill.server.bodies.reader import BodyRoute
from pagemill.server.protocol.body import Body, Ids, Listing, check_one_given
from pagemill.server.protocol.chat import ChatMessage, check_conversation
from pagemill.server.protocol.events import until_disconnect
from pagemill.server.protocol.generation import MAX_MESSAGES
from pagemill.server.protocol.parts import written
from pagemill.server.protocol.refusals import refusal_of
from pagemill.server.routes.known_query import known_query
from pagemill.server.routes.namespaces import All, Tenant, named, removed, require_all
from pagemill.tenant_limits import DEFAULT_TENANT
from pagemill.text.tokenizer import Tokenizer


class PinBody(Body):
    """A prefix to pin, as text or token ids, or as the messages of a chat."""

    name: str
    prompt: str | Ids | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    expires_s: float | None = None
    cache_salt: str = ""

    @model_validator(mode="before")
    @classmethod
    def _check_sizes(cls, body: Any) -> Any:
        if isinstance(body, dict):
            check_conversation(body)
        return body

    @model_validator(mode="after")
    def _check_prefix(self) -> PinBody:
        check_one_given(f"pin {self.name!r} has", self.prompt, self.messages)
        return self

    def conversation(self) -> list[dict[str, str]]:
        """Returns the messages as chat templates take them."""
        return [message.for_template() for message in self.messages or ()]

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the whole prefix. Raises `InvalidRequestError` children, `TokenizerError` without a chat template."""
        if self.prompt is None:
            text = tokenizer.apply_chat_template(self.conversation(), add_generation_prompt=False)
            return tokenizer.encode(text, add_special_tokens=False)
        return tokenizer.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt


class FilePin(PinBody):
    """A pin of a file says whose it is; over HTTP the API key does."""

    tenant: str = DEFAULT_TENANT


class PinCard(BaseModel):
    name: str
    object: Literal["pin"] = "pin"
    num_tokens: int
    num_blocks: int
    expires_in_s: float | None


class OwnedPinCard(PinCard):
    """A pin as admins see it, with its namespace."""

    tenant: str
    cache_salt: str


class PinDeleted(BaseModel):
    name: str
    object: Literal["pin.deleted"] = "pin.deleted"
    deleted: Literal[True] = True


def pin_routes(llm: AsyncLLM) -> APIRouter:
    """Returns the routes. Requests of the namespace of the tenant and `cache_salt` in which a pin has its name find
    its blocks."""
    routes = APIRouter(prefix="/v1/pins", route_class=BodyRoute, dependencies=[known_query()])

    @routes.get("", response_model=Listing[OwnedPinCard | PinCard])
    async def pins(request: Request, cache_salt: str = "", tenant: Tenant = None, every: All = False) -> Response:
        """Lists the pins of the caller's namespace; for admins, also those of others."""
        if every:
            require_all(request, cache_salt)
            every_one = [pin for pin in await llm.pins() if tenant in (None, pin.tenant)]
            return await written(lambda: Listing[OwnedPinCard](data=[*map(_owned, every_one)]))
        space = named(request, tenant, cache_salt)
        found = [pin for pin in await llm.pins() if (pin.tenant, pin.cache_salt) == space]
        return await written(lambda: Listing[PinCard](data=[*map(_card, found)]))

    @routes.post("")
    async def create(body: PinBody, request: Request) -> PinCard:
        """Pins a prefix: computes its blocks and keeps them from eviction."""
        return _card(await until_disconnect(request.receive, pin(llm, body, request.state.tenant)))

    @routes.delete("/{name}")
    async def delete(name: str, request: Request, cache_salt: str = "", tenant: Tenant = None) -> PinDeleted:
        """Ends a pin; its blocks are evicted like any others that nobody asks for."""
        space = named(request, tenant, cache_salt)
        await llm.unpin(name, cache_salt=space.cache_salt, tenant=space.tenant)
        removed(request, "pin", name, space)
        return PinDeleted(name=name)

    return routes


async def pin(llm: AsyncLLM, body: PinBody, tenant: str) -> PinInfo:
    """Pins a prefix for a tenant. Raises `InvalidRequestError` children, `TokenizerError` without a chat template."""
    prompt: Prompt | None = body.prompt
    if prompt is None:
        prompt = await llm.render_chat(body.conversation(), tenant=tenant, add_generation_prompt=False)
    return await llm.pin(prompt, name=body.name, expires_s=body.expires_s, cache_salt=body.cache_salt, tenant=tenant)


def read_pins(path: Path) -> list[FilePin]:
    """Reads a file of pins. Raises ConfigError for a file that is not a JSON list of pins."""
    try:
        content = json.loads(path.read_bytes())
        return TypeAdapter(list[FilePin]).validate_python(content)
    except (OSError, ValueError, RecursionError) as error:
        detail: Any = error
        if isinstance(error, ValidationError):
            detail = refusal_of(error.errors(), content, list[FilePin], "the file")
        raise ConfigError(
            f'{path} cannot be read as pins, [{{"name": …, "prompt" or "messages": …}}, …]: {detail}',
            param="pin_file",
        ) from error


def _owned(pin: PinInfo) -> OwnedPinCard:
    return OwnedPinCard(**_card(pin).model_dump(), tenant=pin.tenant, cache_salt=pin.cache_salt)


def _card(pin: PinInfo) -> PinCard:
    return PinCard(name=pin.name, num_tokens=pin.num_tokens, num_blocks=pin.num_blocks, expires_in_s=pin.expires_in_s)
