"""Items of `/v1/responses`: what goes in, what comes out, and how both stand for messages of a conversation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from pagemill.errors import InvalidRequestError, shown
from pagemill.server.protocol.body import FIRST_ERROR, Body, Name, check_length
from pagemill.server.protocol.chat import TokenLogprob
from pagemill.server.protocol.generation import CACHE_MARKS, MAX_MESSAGES, MAX_PARTS
from pagemill.text.chat_template import BETWEEN_TEXTS

Status = Literal["in_progress", "completed", "incomplete"]


class _Item(Body):
    """What an item or a part of one has; clients send it back with fields that are empty, or `_LEFT_IN`."""

    _LEFT_IN: ClassVar[frozenset[str]] = CACHE_MARKS

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        kept = {name: value for name, value in item.items() if value not in (None, []) and name not in cls._LEFT_IN}
        unknown = next((name for name in kept if name not in cls.model_fields), None)
        if unknown is not None:
            raise InvalidRequestError(
                f"this server does not serve {unknown!r:.128} in an item of type {item.get('type')!r:.128}; leave it "
                f"out",
                param="input",
            )
        return kept


class TextPart(_Item):
    """A part of a text. logprobs: an earlier answer's, which change nothing."""

    _LEFT_IN = CACHE_MARKS | {"logprobs"}

    type: Literal["input_text", "output_text"]
    text: str


class ReasoningText(_Item):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(_Item):
    type: Literal["summary_text"]
    text: str


def _as_parts(content: Any) -> Any:
    """Returns a text as a list of parts. Raises `InvalidRequestError` for a part that is no text."""
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") not in ("input_text", "output_text"):
            way_out = "write 'input_text'" if part.get("type") == "text" else "leave it out"
            raise InvalidRequestError(
                f"this server takes text only, not a part of type {part.get('type')!r:.128}; {way_out}",
                param="input",
            )
    return content


Parts = Annotated[list[TextPart], FIRST_ERROR, BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])]


class Message(_Item):
    """A turn. `developer` is OpenAI's newer name for `system`."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    id: Name | None = None
    status: Status | None = None


class CallItem(_Item):
    """A call of an earlier answer. arguments: a JSON object, as text."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: Name | None = None
    status: Status | None = None


class CallOutput(_Item):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Parts
    id: Name | None = None
    status: Status | None = None


class Reasoning(_Item):
    """What a model thought before what follows. The summary counts only where there is no content."""

    type: Literal["reasoning"]
    id: Name | None = None
    summary: Annotated[list[SummaryText], FIRST_ERROR] | None = None
    content: Annotated[list[ReasoningText], FIRST_ERROR] | None = None
    status: Status | None = None


Item = Annotated[Message | CallItem | CallOutput | Reasoning, Field(discriminator="type")]
TYPES = ("message", "function_call", "function_call_output", "reasoning")
INSTEAD = {"item_reference": "send the item itself, or name its response in previous_response_id"}
"""What to do without items that this server does not serve."""


def _as_items(given: Any) -> Any:
    """Returns an input as a list of items that all have a type. Raises `InvalidRequestError` for too many items or
    parts, for none, and for a type that is not served."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidRequestError(f"input is {shown(given)}; it must be a text or a list of items", param="input")
    if not given:
        raise InvalidRequestError("input is empty; give a text, or one item at least", param="input")
    check_length("input", given, MAX_MESSAGES)
    parts = sum(
        len(parts)
        for item in given
        if isinstance(item, dict)
        for parts in (item.get("content"), item.get("output"), item.get("summary"))
        if isinstance(parts, list)
    )
    if parts > MAX_PARTS:
        raise InvalidRequestError(f"input has {parts} parts; give at most {MAX_PARTS}", param="input")
    return [_with_type(item) for item in given]


def _with_type(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    kind = item.get("type") or "message"
    if kind not in TYPES:
        raise InvalidRequestError(
            f"this server does not serve items of type {shown(kind)}; {INSTEAD.get(str(kind), 'leave it out')} (it "
            f"serves {', '.join(TYPES)})",
            param="input",
        )
    return {**item, "type": kind}


Items = Annotated[list[Item], FIRST_ERROR, BeforeValidator(_as_items, json_schema_input_type=str | list[Item])]


def messages_of(items: Iterable[Message | CallItem | CallOutput | Reasoning]) -> list[dict[str, Any]]:
    """Returns items as messages of chat. Reasoning, text and calls of one answer, in this order, are one message, with
    text behind the calls."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, CallOutput):
            answer = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            continue
        if isinstance(item, Message) and item.role != "assistant":
            answer = None
            messages.append({"role": item.role, "content": _text(item.content)})
            continue
        thought = _text(item.content or item.summary or ()) if isinstance(item, Reasoning) else None
        if thought == "":
            continue
        if answer is None or _is_before(item, answer):
            answer = {"role": "assistant"}
            messages.append(answer)
        if isinstance(item, Reasoning):
            answer["reasoning_content"] = thought
        elif isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            answer.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        else:
            answer["content"] = answer.get("content", "") + _text(item.content)
    return messages


def _is_before(item: Message | CallItem | Reasoning, answer: dict[str, Any]) -> bool:
    """Returns whether an answer cannot go on with this item, because that comes earlier in one."""
    if isinstance(item, CallItem) or (isinstance(item, Message) and "tool_calls" in answer):
        return False
    return "content" in answer or "tool_calls" in answer or (isinstance(item, Reasoning) and len(answer) > 1)


def _text(parts: Iterable[TextPart | ReasoningText | SummaryText]) -> str:
    return BETWEEN_TEXTS.join(part.text for part in parts)


def listed_items(items: Iterable[BaseModel], response_id: str) -> list[dict[str, Any]]:
    """Returns items of an input as they are listed later: with ids, and as OpenAI lists them."""
    unique = response_id.partition("_")[2]
    return [{"id": f"in_{unique}{at}", **_listed(item)} for at, item in enumerate(items)]


def _listed(item: BaseModel) -> dict[str, Any]:
    listed = {"status": "completed", **item.model_dump(exclude_none=True)}
    if isinstance(item, Message) and item.role == "assistant":
        listed["content"] = [OutputText(text=part.text).model_dump() for part in item.content]
    elif isinstance(item, Reasoning):
        listed.setdefault("summary", [])
    return listed


# --- what comes out ---


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[None] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = []


class OutputReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class OutputReasoning(BaseModel):
    """What the model thought, as it wrote it: there is no summary."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    summary: list[None] = []
    content: list[OutputReasoningText] = []
    status: Status = "in_progress"


class OutputCall(BaseModel):
    """A call. arguments: a JSON object, unless the answer was cut."""

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputCall
