"""Content blocks of `/v1/messages`: what goes in, what comes out, and how turns stand for messages of chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic.fields import FieldInfo

from pagemill.errors import InvalidRequestError, shown
from pagemill.server.protocol.body import FIRST_ERROR, Body, Name
from pagemill.server.protocol.tools import check_size
from pagemill.text.chat_template import BETWEEN_TEXTS
from pagemill.text.tokenizer import check_unicode

LEFT_IN = frozenset({"cache_control", "citations"})
"""Names fields of blocks that are accepted and dropped: equal beginnings are found without being marked."""

NEUTRAL = {"caller": {"type": "direct"}}
"""Values of fields that this server does not serve which ask for nothing."""

SERVED = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}
"""The types of blocks that turns of each role may have."""


class _Block(Body):
    """Refuses fields that a block does not have, unless they are empty, neutral or `LEFT_IN`."""

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, block: Any) -> Any:
        if not isinstance(block, dict):
            return block
        fields = cls.model_fields
        kept = {name: value for name, value in block.items() if _is_given(name, value, fields)}
        unknown = next((name for name in kept if name not in fields), None)
        if unknown is not None:
            raise InvalidRequestError(
                f"this server does not serve {unknown!r:.128} in a block of type {block.get('type')!r:.128}; leave it "
                f"out",
                param="messages",
            )
        return kept


def _is_given(name: str, value: Any, fields: Mapping[str, FieldInfo]) -> bool:
    """Returns whether a field asks for something, or must be there."""
    if name in fields and fields[name].is_required():
        return True
    return value not in (None, []) and name not in LEFT_IN and value != NEUTRAL.get(name)


class TextIn(_Block):
    type: Literal["text"]
    text: str


class ThinkingIn(_Block):
    """Reasoning of an earlier answer. signature: proves elsewhere who has written it, and nothing here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseIn(_Block):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _check_input(cls, block: Any) -> Any:
        if isinstance(block, dict):
            check_size("input of a tool_use", block.get("input"))
        return block

    @property
    def arguments(self) -> str:
        """The input as JSON. Raises `InvalidRequestError` for what is no Unicode."""
        text = json.dumps(self.input, ensure_ascii=False)
        check_unicode(text, "messages")
        return text


class ToolResultIn(_Block):
    """Brings what a call has come to. is_error: the model is told so in front of it."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Annotated[list[TextIn], FIRST_ERROR] | None = None
    is_error: bool = False

    @model_validator(mode="before")
    @classmethod
    def _check_parts(cls, block: Any) -> Any:
        if isinstance(block, dict):
            check_types(block.get("content"), ("text",), "a tool_result")
        return block

    @property
    def text(self) -> str:
        said = self.content if isinstance(self.content, str) else joined(self.content or ())
        return f"Error: {said}" if self.is_error else said


BlockIn = TextIn | ThinkingIn | ToolUseIn | ToolResultIn


class Turn(Body):
    """One turn of a conversation, or a part of one: turns of one role that follow each other are one."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Annotated[BlockIn, Field(discriminator="type")]], FIRST_ERROR]

    @model_validator(mode="before")
    @classmethod
    def _check_types(cls, turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        role, content = turn.get("role"), turn.get("content")
        if isinstance(role, str) and role in SERVED:
            check_types(content, SERVED[role], f"a turn of role {role!r}")
        if content == []:
            raise InvalidRequestError("a turn has no blocks; give it one, or leave it out", param="messages")
        return turn

    @property
    def blocks(self) -> Sequence[BlockIn]:
        return [TextIn(type="text", text=self.content)] if isinstance(self.content, str) else self.content


def check_types(content: Any, types: Sequence[str], where: str) -> None:
    """Raises `InvalidRequestError` for a block of another type."""
    for block in content if isinstance(content, list) else ():
        kind = block.get("type") if isinstance(block, dict) else types[0]
        if kind not in types:
            raise InvalidRequestError(
                f"this server does not serve a block of type {kind!r:.128} in {where}; it takes {', '.join(types)}: "
                f"leave it out, or say it in words",
                param="messages",
            )


def joined(blocks: Sequence[TextIn]) -> str:
    """Returns the texts of blocks as one."""
    return BETWEEN_TEXTS.join(block.text for block in blocks)


def check_results(turns: Sequence[Turn]) -> None:
    """Raises `InvalidRequestError` for the result of a call that no turn before it has made."""
    called: set[str] = set()
    for block in (block for turn in turns for block in turn.blocks):
        if isinstance(block, ToolUseIn):
            called.add(block.id)
        elif isinstance(block, ToolResultIn) and block.tool_use_id not in called:
            raise InvalidRequestError(
                f"a tool_result has the tool_use_id {shown(block.tool_use_id)}, and no tool_use before it has this id; "
                f"send the assistant's turn with that tool_use before it, or leave the result out",
                param="messages",
            )


def messages_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Returns turns as messages of chat. What tools have brought is a message each, in its place."""
    messages: list[dict[str, Any]] = []
    for role, blocks in _merged(turns):
        if role == "assistant":
            messages.append(_of_assistant(blocks))
        else:
            messages += _of_others(role, blocks)
    return messages


def _merged(turns: Sequence[Turn]) -> Iterator[tuple[str, list[BlockIn]]]:
    blocks: list[BlockIn] = []
    for number, turn in enumerate(turns):
        blocks += turn.blocks
        if number == len(turns) - 1 or turns[number + 1].role != turn.role:
            yield turn.role, blocks
            blocks = []


def _of_others(role: str, blocks: Sequence[BlockIn]) -> Iterator[dict[str, Any]]:
    texts: list[TextIn] = []
    for block in blocks:
        if isinstance(block, TextIn):
            texts.append(block)
        elif isinstance(block, ToolResultIn):
            if texts:
                yield {"role": role, "content": joined(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
    if texts:
        yield {"role": role, "content": joined(texts)}


def _of_assistant(blocks: Sequence[BlockIn]) -> dict[str, Any]:
    texts = [block for block in blocks if isinstance(block, TextIn)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingIn)]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.arguments}}
        for block in blocks
        if isinstance(block, ToolUseIn)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": joined(texts)}
    if thoughts:
        message["reasoning_content"] = BETWEEN_TEXTS.join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


class TextOut(BaseModel):
    type: Literal["text"] = "text"
    text: str = ""


class ThinkingOut(BaseModel):
    """signature: empty, for there is nothing to prove here; clients want to find it."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class ToolUseOut(BaseModel):
    """input: the arguments, as far as they came."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = {}


BlockOut = TextOut | ThinkingOut | ToolUseOut
