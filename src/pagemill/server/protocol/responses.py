"""Bodies of `/v1/responses`: OpenAI's names for what a chat completion is asked and says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from pagemill.errors import InvalidRequestError
from pagemill.server.protocol.body import FIRST_ERROR, Body, Name, Salt, Timeout, check_length
from pagemill.server.protocol.chat_in_other_words import ChatInOtherWords
from pagemill.server.protocol.generation import CACHE_HINTS, parameters_but, screened
from pagemill.server.protocol.response_items import Items, OutputItem, messages_of
from pagemill.server.protocol.tools import FunctionName, check_for_template

WITHOUT_EFFECT = CACHE_HINTS | {"safety_identifier"}
"""Accepted and dropped."""

NEUTRAL_ONLY: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "logprobs": (False,),
    "max_tool_calls": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "request_id": (),
    "service_tier": ("auto", "default", "flex", "priority", "scale"),
    "return_token_ids": (False,),
}
"""Fields that this server does not serve: only these values (and null), which ask for nothing, are accepted."""

INSTEAD = {
    "background": "leave it out, and set stream to true to see the answer as it comes",
    "conversation": "name the response before in previous_response_id, or send the whole conversation as input",
    "prompt": "send its text as instructions or input",
}
"""What to do without fields that this server does not serve."""

OF_CHAT = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}
"""Names of chat for fields that have another one here."""

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log probabilities."""

MAX_METADATA = 16
"""Entries of `metadata`."""

if TYPE_CHECKING:
    Parameters = Body
else:
    Parameters = parameters_but(("n", "best_of", "length_penalty", "early_stopping"))

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class FunctionTool(Body):
    """A function that the model may call. parameters: a JSON schema of its arguments."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """Makes the model call this function."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(Body):
    """What the answer must be. name, description, schema, strict: with json_schema only."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            what = "no schema; give one, or" if self.schema_ is None else "a schema; leave it out, or"
            other = "json_object for any JSON object" if self.schema_ is None else "json_schema"
            raise InvalidRequestError(
                f"text.format has the type {self.type} and {what} make the type {other}", param="text"
            )
        return self

    def for_chat(self) -> dict[str, Any]:
        """Returns the same as chat's `response_format`."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = self.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": self.type, "json_schema": {"name": "schema", **schema}}


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Body):
    """How much the model thinks. summary: there are none, for what it thinks is given whole."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ChatOfResponse(ChatInOtherWords):
    """Holds a response's request as one of chat."""

    OTHER_NAMES = OF_CHAT


class ResponseInput(Body):
    """Holds what a response answers, which is all that `POST /v1/responses/input_tokens` takes."""

    model: Name | None = None
    input: Items
    instructions: str | None = None
    previous_response_id: Name | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[FunctionTool], FIRST_ERROR] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    cache_salt: Salt | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    _chat: ChatOfResponse = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name, own in OF_CHAT.items():
                if name in body:
                    raise InvalidRequestError(
                        f"{name} is a field of chat; this endpoint calls it {own!r}; rename it", param=name
                    )
            for name, way_out in INSTEAD.items():
                if body.get(name) not in (None, False):
                    raise InvalidRequestError(f"this server does not serve {name!r}; {way_out}", param=name)
        body = screened(cls, body, WITHOUT_EFFECT, NEUTRAL_ONLY)
        if isinstance(body, dict):
            for name, most in (("metadata", MAX_METADATA), ("include", 16)):
                check_length(name, body.get(name), most)
            check_for_template(body)
            _check_tool_types(body.get("tools"))
            _check_tool_choice(body.get("tool_choice"))
        return body

    @model_validator(mode="after")
    def _make_chat(self) -> ResponseInput:
        self._chat = ChatOfResponse.of(self._fields_of_chat())
        return self

    @property
    def chat(self) -> ChatOfResponse:
        """The same as a request of chat; its messages are the input's."""
        return self._chat

    def _fields_of_chat(self) -> dict[str, Any]:
        form = None if self.text is None else self.text.format
        choice: Any = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        return {
            "model": self.model,
            "messages": messages_of(self.input),
            "tools": None if self.tools is None else [_tool_of_chat(tool) for tool in self.tools],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "response_format": None if form is None else form.for_chat(),
            "cache_salt": self.cache_salt,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class ResponsesRequest(ResponseInput, Parameters):
    """`POST /v1/responses`. Without a maximum, an answer may fill what is left of `max_model_len`."""

    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    metadata: dict[Key, Value] | None = None
    user: Value | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = None
    priority: int = 0
    timeout: Timeout | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ResponsesRequest:
        if self.top_logprobs and not self.with_logprobs:
            raise InvalidRequestError(
                f'top_logprobs needs include to have "{LOGPROBS}"; add it, or leave top_logprobs out',
                param="top_logprobs",
            )
        return self

    def _fields_of_chat(self) -> dict[str, Any]:
        same = (*Parameters.model_fields, "priority", "timeout")
        return {
            **super()._fields_of_chat(),
            **{name: getattr(self, name) for name in same},
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.with_logprobs,
            "top_logprobs": self.top_logprobs if self.with_logprobs else None,
        }

    @property
    def with_logprobs(self) -> bool:
        """Whether the answer's text comes with the log probabilities of its tokens."""
        return LOGPROBS in (self.include or ())

    @property
    def keep(self) -> bool:
        """Whether the response can be gone on from, and read later; OpenAI's default."""
        return self.store is not False

    def repeated(self) -> dict[str, Any]:
        """Returns what a response repeats of its request."""
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("instructions", "max_output_tokens", "previous_response_id", "user", "metadata")
        }
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            given[name] = 1.0 if value is None else value
        return {
            **given,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": self.reasoning or ReasoningConfig(),
            "store": self.keep,
            "text": TextConfig(format=(self.text and self.text.format) or TextFormat.model_validate({"type": "text"})),
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
        }


def _tool_of_chat(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _check_tool_types(tools: Any) -> None:
    for tool in tools if isinstance(tools, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else "function"
        if kind != "function":
            raise InvalidRequestError(
                f"this server does not serve tools of type {kind!r:.128}; offer functions, or leave it out",
                param="tools",
            )


def _check_tool_choice(choice: Any) -> None:
    kind = choice.get("type") if isinstance(choice, dict) else "function"
    if kind != "function":
        raise InvalidRequestError(
            f"this server does not serve a tool_choice of type {kind!r:.128}; name a function, or give 'auto', "
            f"'required' or 'none'",
            param="tool_choice",
        )


class InputTokenCount(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseFailure(BaseModel):
    code: str
    message: str


class ResponseObject(BaseModel):
    """An answer, with what was asked."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str] | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningConfig
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class ResponseDeleted(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
