"""Bodies of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, SerializeAsAny, model_validator

from pagemill.errors import InvalidRequestError, PagemillError
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.server.protocol.body import FIRST_ERROR, Body, Name
from pagemill.server.protocol.generation import (
    CACHE_MARKS,
    MAX_MESSAGES,
    MAX_PARTS,
    NEUTRAL_ONLY,
    Answer,
    GenerationRequest,
    PromptLogprobs,
)
from pagemill.server.protocol.tools import (
    NamedToolChoice,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallInMessage,
    WhatIsNew,
    check_arguments,
    check_for_template,
)
from pagemill.text.chat_template import BETWEEN_TEXTS, without_content

LEFT_IN = CACHE_MARKS | {"provider_specific_fields"}
"""Fields that clients put into messages, and that mean nothing here."""


class TextPart(Body):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, part: Any) -> Any:
        if not isinstance(part, dict) or CACHE_MARKS.isdisjoint(part):
            return part
        return {name: value for name, value in part.items() if name not in CACHE_MARKS}


class ChatMessage(Body):
    """One turn. `developer` is OpenAI's newer name for `system` and is given to the template as `system`; `reasoning`
    is vLLM's newer name for `reasoning_content`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FIRST_ERROR] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCallInMessage], FIRST_ERROR] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, message: Any) -> Any:
        """Drops what is empty (clients send answers back with all their fields) and refuses what is not text."""
        if not isinstance(message, dict):
            return message
        kept = {name: value for name, value in message.items() if value not in (None, []) and name not in LEFT_IN}
        unknown = next((name for name in kept if name not in cls.model_fields), None)
        if unknown is not None or kept.get("role") == "function":
            what = repr(unknown) if unknown is not None else "the role 'function'"
            raise InvalidRequestError(f"this server does not serve {what} in a message; leave it out", param="messages")
        content = kept.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") != "text":
                raise InvalidRequestError(
                    f"this server takes text only, not a content part of type {part.get('type')!r}; leave it out",
                    param="messages",
                )
        return kept

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        for name, role in OF_ONE_ROLE.items():
            if getattr(self, name) is not None and self.role != role:
                raise InvalidRequestError(
                    f"a message of role {self.role} has {name}; only one of role {role} may; leave it out",
                    param="messages",
                )
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidRequestError(
                "a message of role tool has no tool_call_id; give the id of the call that it answers", param="messages"
            )
        if self.content is None and not (self.tool_calls or self._reasoning):
            raise without_content(f"a message of role {self.role}")
        return self

    @property
    def _reasoning(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def for_template(self) -> dict[str, Any]:
        """Returns the turn as chat templates take it."""
        content = self.content
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": BETWEEN_TEXTS.join(part.text for part in content) if isinstance(content, list) else content,
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls] if self.tool_calls else None,
            "reasoning_content": self._reasoning,
        }
        return {name: value for name, value in message.items() if value is not None}


OF_ONE_ROLE = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}


def check_conversation(body: Mapping[str, Any]) -> None:
    """Raises `InvalidRequestError` for messages with too many parts, or with calls whose arguments are too long."""
    messages = body.get("messages")
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:  # refused where its type is checked
        return
    given = [message for message in messages if isinstance(message, dict)]
    lists = (message.get(name) for message in given for name in ("content", "tool_calls"))
    parts = sum(len(listed) for listed in lists if isinstance(listed, list))
    if parts > MAX_PARTS:
        raise InvalidRequestError(
            f"messages have {parts} content parts and tool calls; give at most {MAX_PARTS}", param="messages"
        )
    check_arguments([message.get("tool_calls") for message in given])


TEMPLATE_OPTIONS = (
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
)
NOT_IN_OPTIONS = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "cache_salt",
    "tenant",
})  # fmt: skip
"""Names that are no options of a template: the request has fields for them, or must not have them."""


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`. Without a maximum, an answer may fill what is left of `max_model_len`."""

    _NEUTRAL_ONLY = NEUTRAL_ONLY | {"add_special_tokens": (False,), "chat_template": (), "echo": (False,)}
    _BEGINNING = "messages"

    messages: Annotated[list[ChatMessage], FIRST_ERROR] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], FIRST_ERROR] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    documents: Annotated[list[dict[str, Any]], FIRST_ERROR] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_parts(cls, body: Any) -> Any:
        if isinstance(body, dict):
            check_conversation(body)
            check_for_template(body)
        return body

    @model_validator(mode="after")
    def _check_tools(self) -> ChatCompletionRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidRequestError(f"tools have {twice!r} twice; give each its own name", param="tools")
        wanted = self.tool_choice.function.name if isinstance(self.tool_choice, NamedToolChoice) else None
        if wanted is not None and wanted not in names:
            raise InvalidRequestError(
                f"tool_choice names {wanted!r}, which is not among the tools; name one of them, or add it",
                param="tool_choice",
            )
        if self.tool_choice == "required" and not names:
            raise InvalidRequestError(
                "tool_choice is 'required', but there are no tools; add some", param="tool_choice"
            )
        if self.held_to_schemas is not None:
            self._check_nothing_else_constrains("tool_choice" if self.forces_a_call else "a strict tool")
        return self

    def _check_nothing_else_constrains(self, what: str) -> None:
        others = {"fork_of": self.fork_of is not None, "use_beam_search": bool(self.use_beam_search)}
        for name, given in others.items():
            if given:
                raise InvalidRequestError(
                    f"{what} holds the answer to a grammar, which does not go with {name}; leave one of them out",
                    param=name,
                )

    @property
    def forces_a_call(self) -> bool:
        """True if the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)

    @property
    def held_to_schemas(self) -> dict[str, Mapping[str, Any]] | None:
        """The functions that may be called, with the schemas that arguments are held to; None if they are to none."""
        if isinstance(self.tool_choice, NamedToolChoice):
            wanted = [tool for tool in self.tools or () if tool.function.name == self.tool_choice.function.name]
        else:
            wanted = self.tools or []
        if self.tool_choice == "none" or not (self.forces_a_call or any(tool.function.strict for tool in wanted)):
            return None
        return {
            tool.function.name: tool.function.schema_of_arguments if self.forces_a_call or tool.function.strict else {}
            for tool in wanted
        }

    @model_validator(mode="after")
    def _check_template_options(self) -> ChatCompletionRequest:
        given = [
            name
            for name in TEMPLATE_OPTIONS
            if getattr(self, name) not in (None, type(self).model_fields[name].default)
        ]
        if given and self.fork_of is not None:
            raise InvalidRequestError(
                f"fork_of goes on from another answer, and writes no prompt; leave {given[0]} out", param=given[0]
            )
        if self.continue_final_message and self.session_id is not None:
            raise InvalidRequestError(
                "continue_final_message goes on with a message of this request, a session with its next turn; leave "
                "one of them out",
                param="continue_final_message",
            )
        options = self.chat_template_kwargs or {}
        for name in options:
            if name in NOT_IN_OPTIONS or (name == "reasoning_effort" and self.reasoning_effort is not None):
                raise InvalidRequestError(
                    f"chat_template_kwargs has {name!r}; give it as a field of the request, or not at all",
                    param="chat_template_kwargs",
                )
        return self

    def template_options(self) -> dict[str, Any]:
        """Returns what the chat template is given beside messages, tools and its own variables."""
        return {
            "documents": self.documents,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }

    @property
    def thinks(self) -> bool:
        """Returns whether it asks for reasoning without saying how much."""
        return False

    @property
    def max_tool_calls(self) -> int | None:
        """The tool calls that the answer may have; None for any number."""
        if self.tool_choice == "none":
            return 0
        return 1 if self.parallel_tool_calls is False else None

    @property
    def offers_tools(self) -> bool:
        """Returns whether there are tools that may be called."""
        return bool(self.tools) and self.tool_choice != "none"

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """Returns the tools as chat templates take them; None if there are none that may be called."""
        return [tool.for_template() for tool in self.tools or ()] if self.offers_tools else None

    def for_template(self) -> list[dict[str, Any]]:
        """Returns the conversation as chat templates take it."""
        return [message.for_template() for message in self.messages or ()]

    def params(self) -> SamplingParams | BeamSearchParams:
        if self.top_logprobs and not self.logprobs:
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

    @property
    def _has_form(self) -> bool:
        form = self.response_format
        return "structured_outputs" in self.given or (form is not None and form.type != "text")

    def in_own_words(self, error: PagemillError) -> PagemillError:
        if self._has_form and self.held_to_schemas is not None:
            error.message = error.message.replace("structured_outputs cannot", "structured_outputs or tools cannot")
        return super().in_own_words(error)

    def _own_names(self) -> dict[str, str]:
        names = {**super()._own_names(), "logprobs": "top_logprobs"}
        if self.held_to_schemas is not None and (self.forces_a_call or not self._has_form):
            names["structured_outputs"] = "tools"
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
    """content: None where there are only tool calls. Reasoning has two names: clients read either."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Answer[ChatChoice]):
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Delta(WhatIsNew):
    role: Literal["assistant"] | None = None
    content: str | None = None


class PartsDelta(Delta):
    """What is new beside content."""

    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: SerializeAsAny[Delta]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Answer[ChunkChoice]):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_token_ids: list[int] | None = None
