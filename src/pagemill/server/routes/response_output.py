"""ResponseOutput: a response's items as the model writes them, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from pagemill.server.protocol.chat import TokenLogprob
from pagemill.server.protocol.response_items import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputReasoningText,
    OutputText,
    Status,
)
from pagemill.text.answer.json_text import is_json
from pagemill.text.answer.reader import AnswerPart, CallPart

EVENT = TypeAdapter(dict[str, Any])


class ResponseOutput:
    """Takes what is read of an answer. `items` are those so far; an item is closed when the next one begins.

    Items are the same whatever pieces the answer comes in. Text behind a call is an item of its own.
    """

    def __init__(self, response_id: str, *, streaming: bool) -> None:
        """streaming: makes events, which `take_events` must be called for."""
        self.items: list[OutputItem] = []
        self._unique = response_id.partition("_")[2]
        self._streaming = streaming
        self._open = False
        """Whether the last item still grows."""
        self._events: list[str] = []
        self._num_events = 0

    def add(self, part: AnswerPart, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Takes what is new of the answer. logprobs: of the tokens that wrote its content, which then is
        one piece."""
        for piece in part.pieces:
            if isinstance(piece, CallPart):
                self._add_call(piece)
            elif piece.reasoning:
                self._add_reasoning(piece.text)
            else:
                self._add_text(piece.text, logprobs)

    def close(self, status: Status = "completed") -> None:
        """Closes the last item, if one is open. A call whose arguments are not whole is incomplete."""
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        broken = isinstance(item, OutputCall) and not is_json(item.arguments)
        item.status = "incomplete" if broken else status
        if isinstance(item, OutputCall):
            self._tell_of("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
        else:
            kind, beside = _text_event(item, item.content[0].logprobs if isinstance(item, OutputMessage) else ())
            self._tell_of(f"{kind}.done", content_index=0, text=item.content[0].text, **beside)
            self._tell_of("response.content_part.done", content_index=0, part=item.content[0])
        self.tell("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def tell(self, event_type: str, **fields: Any) -> None:
        """Adds an event."""
        if self._streaming:
            body = {"type": event_type, "sequence_number": self._num_events, **fields}
            self._num_events += 1
            self._events.append(f"event: {event_type}\ndata: {EVENT.dump_json(body, by_alias=True).decode()}\n\n")

    def take_events(self) -> list[str]:
        """Returns the events since the last call, framed as OpenAI's clients read them."""
        events, self._events = self._events, []
        return events

    def _add_reasoning(self, text: str) -> None:
        if not (self._open and isinstance(self.items[-1], OutputReasoning)):
            self._begin(OutputReasoning(id=self._new_id("rs")), OutputReasoningText())
        self._add_to_part(text)

    def _add_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        if not (self._open and isinstance(self.items[-1], OutputMessage)):
            self._begin(OutputMessage(id=self._new_id("msg")), OutputText())
        item = self.items[-1]
        assert isinstance(item, OutputMessage)
        item.content[0].logprobs += logprobs
        self._add_to_part(text, logprobs)

    def _add_call(self, part: CallPart) -> None:
        if part.id is not None:
            self._begin(OutputCall(id=self._new_id("fc"), call_id=part.id, name=part.name or ""))
        item = self.items[-1]
        if part.arguments and isinstance(item, OutputCall):
            item.arguments += part.arguments
            self._tell_of("response.function_call_arguments.delta", delta=part.arguments)

    def _new_id(self, kind: str) -> str:
        return f"{kind}_{self._unique}{len(self.items)}"

    def _begin(self, item: OutputItem, part: Any = None) -> None:
        self.close()
        self.items.append(item)
        self._open = True
        self.tell("response.output_item.added", output_index=len(self.items) - 1, item=item)
        if part is not None and not isinstance(item, OutputCall):
            item.content.append(part)
            self._tell_of("response.content_part.added", content_index=0, part=part)

    def _add_to_part(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        item = self.items[-1]
        assert not isinstance(item, OutputCall)
        item.content[0].text += text
        kind, beside = _text_event(item, logprobs)
        self._tell_of(f"{kind}.delta", content_index=0, delta=text, **beside)

    def _tell_of(self, event_type: str, **fields: Any) -> None:
        """Adds an event about the last item."""
        self.tell(event_type, item_id=self.items[-1].id, output_index=len(self.items) - 1, **fields)


def _text_event(item: OutputMessage | OutputReasoning, logprobs: Sequence[TokenLogprob]) -> tuple[str, dict[str, Any]]:
    """Returns what events about the item's text are called, and what they have beside it."""
    if isinstance(item, OutputMessage):
        return "response.output_text", {"logprobs": list(logprobs)}
    return "response.reasoning_text", {}
