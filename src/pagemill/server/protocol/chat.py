"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, model_validator

from pagemill.errors import InvalidRequestError
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.server.protocol.body import FIRST_ERROR, Body, Name
from pagemill.server.protocol.generation import MAX_MESSAGES, MAX_PARTS, Answer, GenerationRequest, PromptLogprobs


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One turn. `developer` is OpenAI's newer name for `system` and is given to the template as `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], FIRST_ERROR]
    name: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, message: Any) -> Any:
        """Drops what is empty (clients send answers back with all their fields) and refuses what is not text."""
        if not isinstance(message, dict):
            return message
        kept = {name: value for name, value in message.items() if value not in (None, [])}
        unknown = next((name for name in kept if name not in cls.model_fields), None)
        if unknown is not None or kept.get("role") in ("tool", "function"):
            what = repr(unknown) if unknown is not None else f"the role {kept['role']!r}"
            raise InvalidRequestError(f"this server does not serve {what} in a message; leave it out", param="messages")
        content = kept.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") != "text":
                raise InvalidRequestError(
                    f"this server takes text only, not a content part of type {part.get('type')!r}; leave it out",
                    param="messages",
                )
        return kept

    def for_template(self) -> dict[str, str]:
        """Returns the turn as chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`. Without a maximum, an answer may fill what is left of `max_model_len`."""

    _BEGINNING = "messages"

    messages: Annotated[list[ChatMessage], FIRST_ERROR] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_parts(cls, body: Any) -> Any:
        messages = body.get("messages") if isinstance(body, dict) else None
        if isinstance(messages, list) and len(messages) <= MAX_MESSAGES:
            contents = [message.get("content") for message in messages if isinstance(message, dict)]
            parts = sum(len(content) for content in contents if isinstance(content, list))
            if parts > MAX_PARTS:
                raise InvalidRequestError(
                    f"messages have {parts} content parts; give at most {MAX_PARTS}", param="messages"
                )
        return body

    def for_template(self) -> list[dict[str, str]]:
        """Returns the conversation as chat templates take it."""
        return [message.for_template() for message in self.messages or ()]

    def params(self) -> SamplingParams | BeamSearchParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; "
                f"they mean the same, give one",
                param="max_tokens",
            )
        longest = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if longest == 0 and self.prompt_logprobs is None:
            raise InvalidRequestError(
                "max_tokens is 0, so there would be no answer; set prompt_logprobs to get the prompt's log "
                "probabilities, or ask for one token at least",
                param="max_tokens",
            )
        return self._params(
            max_tokens=longest,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def _own_names(self) -> dict[str, str]:
        names = {**super()._own_names(), "logprobs": "top_logprobs"}
        if self.max_tokens is None and self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None
    """The token's UTF-8; None for a token that is not whole UTF-8 by itself."""


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletion(Answer[ChatChoice]):
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | None = None


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletionChunk(Answer[ChunkChoice]):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
