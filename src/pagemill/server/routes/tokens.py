"""`/tokenize` and `/detokenize`: text to token ids and back, with vLLM's fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, model_validator

from pagemill.errors import InvalidRequestError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.frontend.input_processor import size_of
from pagemill.server.bodies.reader import BodyRoute
from pagemill.server.protocol.body import FIRST_ERROR, Body, Ids, Name, check_length, check_one_given
from pagemill.server.protocol.chat import ChatMessage, check_conversation
from pagemill.server.protocol.events import until_disconnect
from pagemill.server.protocol.generation import MAX_MESSAGES
from pagemill.server.protocol.parts import JSONInParts
from pagemill.server.protocol.tools import Tool, check_for_template
from pagemill.server.routes.models import ServedModels
from pagemill.text.tokenizer import Tokenizer

MAX_CHARACTERS = 2**20
"""Characters of a text to tokenize, a conversation's as the chat template writes it: texts wait for one another."""
MAX_TOKENS = 2**19
"""Token ids to turn into text."""
FOR_MESSAGES = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


class TokenizeRequest(Body):
    """A text, or the messages of a chat. Neither needs to fit `max_model_len`."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Default: true for a prompt, false for messages, whose chat template writes them."
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[list[Tool], FIRST_ERROR] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="before")
    @classmethod
    def _check_sizes(cls, body: Any) -> Any:
        if isinstance(body, dict):
            check_conversation(body)
            check_for_template(body)
        return body

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        check_one_given("there is", self.prompt, self.messages)
        for name in FOR_MESSAGES if self.messages is None else ():
            if name in self.model_fields_set:
                raise InvalidRequestError(f"{name} is for messages, not for a prompt; leave it out", param=name)
        return self

    @property
    def size(self) -> int:
        """Returns how many characters there are to tokenize."""
        return size_of(self.prompt if self.messages is None else [turn.for_template() for turn in self.messages])

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the tokens. Raises `InvalidRequestError` children, `TokenizerError` without a chat template."""
        text, special = self.prompt, self.add_special_tokens
        if text is None:
            turns = [message.for_template() for message in self.messages or ()]
            text = tokenizer.apply_chat_template(
                turns,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                tools=[tool.for_template() for tool in self.tools or ()] or None,
                chat_template_kwargs=self.chat_template_kwargs,
            )
        if len(text) > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"the text has {len(text)} characters; give at most {MAX_CHARACTERS}, the rest in another request",
                param="messages" if self.prompt is None else "prompt",
            )
        return tokenizer.encode(text, add_special_tokens=self.prompt is not None if special is None else special)


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """The tokens as the vocabulary has them; null unless `return_token_strs`."""


class DetokenizeRequest(Body):
    model: Name | None = None
    tokens: Ids

    @model_validator(mode="before")
    @classmethod
    def _check_length(cls, body: Any) -> Any:
        if isinstance(body, dict):
            check_length("tokens", body.get("tokens"), MAX_TOKENS, ", the rest in another request")
        return body


class Text(BaseModel):
    prompt: str


def token_routes(llm: AsyncLLM, served: ServedModels) -> APIRouter:
    """Returns the routes. Long texts and lists are worked on in the tokenizer's threads, as are answers to them, while
    their clients wait."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/tokenize", response_model=Tokens)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Returns the token ids of a text, or of the messages of a chat."""
        served.name_for(body.model)
        longest, tokenizer = (await llm.ready()).max_model_len, await llm.tokenizer()
        how = {"size": body.size, "tenant": request.state.tenant}
        work = llm.in_tokenizer_thread(_tokenize, tokenizer, body, longest, **how)
        return _json(await until_disconnect(request.receive, work))

    @routes.post("/detokenize", response_model=Text)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Returns the text of token ids, special tokens included."""
        served.name_for(body.model)
        vocab_size, tokenizer = (await llm.ready()).vocab_size, await llm.tokenizer()
        how = {"size": len(body.tokens), "tenant": request.state.tenant}
        work = llm.in_tokenizer_thread(_detokenize, tokenizer, body.tokens, vocab_size, **how)
        return _json(await until_disconnect(request.receive, work))

    return routes


def encode_conversation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the tokens of a conversation as the chat template has written it. Raises `InvalidRequestError` for one of
    over `MAX_CHARACTERS`."""
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"the conversation has {len(text)} characters; give at most {MAX_CHARACTERS}", param="messages"
        )
    return tokenizer.encode(text, add_special_tokens=False)


def _tokenize(tokenizer: Tokenizer, body: TokenizeRequest, max_model_len: int) -> bytes:
    ids = body.token_ids(tokenizer)
    names = tokenizer.names_of(ids) if body.return_token_strs else None
    return msgspec.json.encode({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": names})


def _detokenize(tokenizer: Tokenizer, token_ids: Sequence[int], vocab_size: int) -> bytes:
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"tokens has the token id {wrong}; this model's are 0 to {vocab_size - 1}; take them from /tokenize",
            param="tokens",
        )
    return msgspec.json.encode({"prompt": tokenizer.decode(token_ids)})


def _json(content: bytes) -> Response:
    return JSONInParts([content])
