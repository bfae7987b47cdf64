"""Bodies of `/v1/messages`: Anthropic's names for what a chat completion is asked and says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from pagemill.errors import InvalidRequestError, PagemillError
from pagemill.server.protocol.body import FIRST_ERROR, Body, Name, Salt, Timeout
from pagemill.server.protocol.chat import check_conversation
from pagemill.server.protocol.chat_in_other_words import ChatInOtherWords
from pagemill.server.protocol.generation import parameters_but, screened
from pagemill.server.protocol.message_blocks import (
    BlockOut,
    TextIn,
    Turn,
    check_results,
    check_types,
    messages_of,
)
from pagemill.server.protocol.tools import FunctionName, check_for_template
from pagemill.text.chat_template import BETWEEN_TEXTS

WITHOUT_EFFECT = frozenset({"metadata", "cache_control", "diagnostics", "user_profile_id", "workspace_id"})
"""Accepted and dropped: they identify callers, or ask for what this server does anyway."""

BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""A line that agents put before their instructions, dropped as `metadata` is: it tells Anthropic's billing who asks. It
differs from request to request, so that no two prompts would begin alike."""

NEUTRAL_ONLY: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
"""Fields that this server does not serve: only these values (and null), which ask for nothing, are accepted."""

OF_CHAT = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}
"""Names of chat for fields that have another one here."""

TOOL_WITHOUT_EFFECT = frozenset({"cache_control", "eager_input_streaming"})
"""Fields of a tool that are accepted and dropped: equal beginnings are found unmarked, and arguments always stream."""
TOOL_NEUTRAL = {"defer_loading": False, "allowed_callers": ["direct"], "input_examples": []}
"""Values of a tool's fields that ask for nothing; others are refused."""

if TYPE_CHECKING:
    Parameters = Body
else:
    Parameters = parameters_but(("n", "best_of", "length_penalty", "early_stopping", "stop"))


class CustomTool(Body):
    """A function that the model may call. input_schema: a JSON schema of its arguments."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, tool: Any) -> Any:
        if not isinstance(tool, dict):
            return tool
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise InvalidRequestError(
                f"this server does not serve tools of type {kind!r:.128}; offer functions, each with an input_schema, "
                f"or leave it out",
                param="tools",
            )
        dropped = TOOL_WITHOUT_EFFECT | {name for name, value in TOOL_NEUTRAL.items() if tool.get(name) == value}
        return {name: value for name, value in tool.items() if value is not None and name not in dropped}

    def for_chat(self) -> dict[str, Any]:
        """Returns the same as a tool of chat."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {**function, "strict": self.strict}}


class ToolChoice(Body):
    """Says whether tools are called. name: the one that must be, with the type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            what = "no name; give one" if self.name is None else "a name; leave it out, or make the type 'tool'"
            raise InvalidRequestError(f"tool_choice has the type {self.type!r} and {what}", param="tool_choice")
        return self

    def check(self, tools: Sequence[CustomTool] | None) -> None:
        """Raises `InvalidRequestError` where a tool must be called and there are none."""
        if self.type == "any" and not tools:
            raise InvalidRequestError(
                "tool_choice has the type 'any', but there are no tools; add some", param="tool_choice"
            )

    @property
    def for_chat(self) -> Any:
        """The same as chat's `tool_choice`."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Body):
    """Says whether the model reasons first.

    budget_tokens: accepted, for clients must send it; how long a model reasons is its own affair, within max_tokens.
    display: "omitted" leaves the reasoning out of the answer.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """A JSON schema that the answer is held to."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    def for_chat(self) -> dict[str, Any]:
        """Returns the same as chat's `response_format`."""
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.schema_}}


class OutputConfig(Body):
    """Says what the answer is like.

    effort: how much the model reasons, where its chat template reads that and thinking is not disabled.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ChatOfMessages(ChatInOtherWords):
    """Holds a conversation of `/v1/messages` as a request of chat."""

    OTHER_NAMES = OF_CHAT
    MOST_RENAMED = 1  # values of `stop` may have that word in them

    asked_to_think: bool = False

    @property
    def thinks(self) -> bool:
        return self.asked_to_think

    def in_own_words(self, error: PagemillError) -> PagemillError:
        if error.param == "continue_final_message":
            return InvalidRequestError(
                "the last turn is the assistant's, to be gone on with, but this model's chat template leaves its end "
                "out; end with a turn of role 'user'",
                param="messages",
            )
        return super().in_own_words(error)


class Conversation(Body):
    """Holds what the model answers, which is all that `POST /v1/messages/count_tokens` takes."""

    model: Name | None = None
    messages: Annotated[list[Turn], Field(min_length=1), FIRST_ERROR]
    system: str | Annotated[list[TextIn], FIRST_ERROR] | None = None
    tools: Annotated[list[CustomTool], FIRST_ERROR] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_salt: Salt | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    _chat: ChatOfMessages = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, body: Any) -> Any:
        body = screened(cls, body, WITHOUT_EFFECT, NEUTRAL_ONLY)
        if isinstance(body, dict):
            check_conversation(body)
            check_for_template(body)
            check_types(body.get("system"), ("text",), "system")
        return body

    @model_validator(mode="after")
    def _make_chat(self) -> Conversation:
        self._chat = ChatOfMessages.of(self._fields_of_chat())
        return self

    @property
    def chat(self) -> ChatOfMessages:
        """The same as a request of chat."""
        return self._chat

    def _instructions(self) -> list[dict[str, Any]]:
        blocks = [TextIn(type="text", text=self.system)] if isinstance(self.system, str) else self.system or []
        texts = [text for block in blocks if (text := BILLING.sub("", block.text))]
        return [{"role": "system", "content": BETWEEN_TEXTS.join(texts)}] if texts else []

    def _fields_of_chat(self) -> dict[str, Any]:
        check_results(self.messages)
        messages = messages_of(self.messages)
        goes_on = messages[-1]["role"] == "assistant"
        if goes_on and messages[-1].get("tool_calls"):
            raise InvalidRequestError(
                "the last message has a tool_use that nothing answers; add a message of role 'user' with its "
                "tool_result",
                param="messages",
            )
        if self.tool_choice is not None:
            self.tool_choice.check(self.tools)
        choice, thinking, output = self.tool_choice, self.thinking, self.output_config or OutputConfig()
        disabled = thinking is not None and thinking.type == "disabled"
        return {
            "model": self.model,
            "messages": [*self._instructions(), *messages],
            "add_generation_prompt": not goes_on,
            "continue_final_message": goes_on,
            "tools": None if self.tools is None else [tool.for_chat() for tool in self.tools],
            "tool_choice": None if choice is None else choice.for_chat,
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            "reasoning_effort": "none" if disabled else output.effort,
            "asked_to_think": thinking is not None and not disabled,
            "include_reasoning": thinking is None or thinking.display != "omitted",
            "response_format": None if output.format is None else output.format.for_chat(),
            "cache_salt": self.cache_salt,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class MessagesRequest(Conversation, Parameters):
    """`POST /v1/messages`. An answer ends with the context where that holds less than `max_tokens`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], FIRST_ERROR] | None = None
    stream: bool | None = None
    priority: int = 0
    timeout: Timeout | None = None

    def _fields_of_chat(self) -> dict[str, Any]:
        same = (*Parameters.model_fields, "max_tokens", "priority", "timeout")
        return {
            **super()._fields_of_chat(),
            **{name: getattr(self, name) for name in same},
            "stop": self.stop_sequences,
        }


StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use", "pause_turn"
]


class MessageUsage(BaseModel):
    """input_tokens: of the prompt, without those that were found in the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(BaseModel):
    """An answer. stop_reason, stop_sequence: None until it has ended."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[BlockOut]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int
