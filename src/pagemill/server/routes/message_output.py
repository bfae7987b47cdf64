"""MessageOutput: a message's content blocks as the model writes them, and the events that tell of it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from pydantic import TypeAdapter

from pagemill.server.protocol.message_blocks import BlockOut, TextOut, ThinkingOut, ToolUseOut
from pagemill.server.protocol.messages import Message
from pagemill.text.answer.reader import AnswerPart, CallPart

OBJECT = TypeAdapter(dict[str, Any])

B = TypeVar("B", TextOut, ThinkingOut)


class MessageOutput:
    """Takes what is read of an answer. `blocks` are those so far; a block is closed when the next one begins."""

    def __init__(self, *, streaming: bool, shows_reasoning: bool = True) -> None:
        """streaming: makes events, which `take_events` must be called for. shows_reasoning: leaves none of it out."""
        self._streaming = streaming
        self._shows_reasoning = shows_reasoning
        self.blocks: list[BlockOut] = []
        self.has_broken_call = False
        """Says whether a call's arguments are no JSON, because it was cut or went wrong."""
        self._open = False
        """Says whether the last block still grows."""
        self._arguments: list[str] = []
        """Holds those of the call that is open, as they came."""
        self._events: list[str] = []

    def start(self, message: Message) -> None:
        """Tells that the message begins."""
        self.tell("message_start", message=message.model_dump())

    def add(self, part: AnswerPart) -> None:
        """Takes what is new of the answer."""
        for piece in part.pieces:
            if isinstance(piece, CallPart):
                self._add_call(piece)
            elif not piece.reasoning:
                self._growing(TextOut).text += piece.text
                self._tell_delta("text_delta", text=piece.text)
            elif self._shows_reasoning:
                self._growing(ThinkingOut).thinking += piece.text
                self._tell_delta("thinking_delta", thinking=piece.text)

    def close(self) -> None:
        """Closes the last block, if one is open."""
        if not self._open:
            return
        self._open = False
        block = self.blocks[-1]
        if isinstance(block, ToolUseOut):
            block.input, whole = _object_of("".join(self._arguments))
            self.has_broken_call = self.has_broken_call or not whole
            self._arguments.clear()
        self.tell("content_block_stop", index=len(self.blocks) - 1)

    def tell(self, event_type: str, **fields: Any) -> None:
        """Adds an event, framed as Anthropic's clients read it."""
        if self._streaming:
            body = msgspec.json.encode({"type": event_type, **fields}).decode()
            self._events.append(f"event: {event_type}\ndata: {body}\n\n")

    def take_events(self) -> list[str]:
        """Returns the events since the last call."""
        events, self._events = self._events, []
        return events

    def _add_call(self, part: CallPart) -> None:
        if part.id is not None:
            self._begin(ToolUseOut(id=part.id, name=part.name or ""))
        if part.arguments and isinstance(self.blocks[-1], ToolUseOut):
            self._arguments.append(part.arguments)
            self._tell_delta("input_json_delta", partial_json=part.arguments)

    def _growing(self, kind: type[B]) -> B:
        """Returns the open block if it is of this kind, else a new one."""
        block = self.blocks[-1] if self._open else None
        if not isinstance(block, kind):
            block = kind()
            self._begin(block)
        return block

    def _begin(self, block: BlockOut) -> None:
        self.close()
        self.blocks.append(block)
        self._open = True
        self.tell("content_block_start", index=len(self.blocks) - 1, content_block=block.model_dump())

    def _tell_delta(self, kind: str, **fields: str) -> None:
        self.tell("content_block_delta", index=len(self.blocks) - 1, delta={"type": kind, **fields})


def _object_of(arguments: str) -> tuple[dict[str, Any], bool]:
    """Returns a call's arguments, and whether they are whole. Of those that are not, returns what is."""
    for partial in (False, True):
        with suppress(ValueError):
            return OBJECT.validate_json(arguments, experimental_allow_partial=partial), not partial
    return {}, False
