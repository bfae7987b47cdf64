"""AnswerReader: splits a model's answer, as it comes, into reasoning, content and tool calls.

What is given depends on the text alone, not on the pieces it comes in. No part of a mark is ever given as content, but
for the beginning of one that would begin a call, where the text ends: nobody knows that it is not content. What is
written like a call, but is none, is content. A call that goes wrong after it has begun stays as far as it came, for it
has been given already; the rest is content, but for marks, and for what the text ends within.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagemill.text.answer.calls import CallParser, Functions
from pagemill.text.answer.feed import Feed, Marks, Waiting
from pagemill.text.answer.formats import ReasoningFormat, ToolCallFormat
from pagemill.text.answer.json_text import NotACallError, is_json

_SPACE = " \t\r\n"


@dataclass(slots=True)
class CallPart:
    """What is new of one call. id, name: with its first part only. arguments: JSON, or a piece of it."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class TextPiece:
    """Holds what is new of a text: content, or reasoning."""

    text: str = ""
    reasoning: bool = False


@dataclass(slots=True)
class AnswerPart:
    """Holds what is new of an answer, or all, in the order in which it was written."""

    pieces: list[TextPiece | CallPart]

    @property
    def content(self) -> str:
        """Returns all content, without what stands between."""
        return "".join([piece.text for piece in self.pieces if isinstance(piece, TextPiece) and not piece.reasoning])

    @property
    def reasoning(self) -> str:
        return "".join([piece.text for piece in self.pieces if isinstance(piece, TextPiece) and piece.reasoning])

    @property
    def calls(self) -> list[CallPart]:
        """Returns what is new of calls: first of one that had begun, which has no id."""
        return [piece for piece in self.pieces if isinstance(piece, CallPart)]

    def __bool__(self) -> bool:
        return bool(self.pieces)


class AnswerReader:
    """Reads one answer. Without formats, all of it is content."""

    def __init__(
        self,
        tool_calls: ToolCallFormat | None,
        functions: Functions,
        reasoning: ReasoningFormat | None,
        *,
        reasons_from_start: bool,
        call_id: Callable[[int], str],
        max_calls: int | None = None,
        calls_only: bool = False,
    ) -> None:
        """reasons_from_start: the prompt ends with the mark that begins reasoning. call_id: names a call by its number.
        max_calls: leaves out all calls behind so many; None for none. calls_only: the answer is made to be a call, so
        that what is none is the beginning of one that was cut, and no content."""
        self.num_calls = 0
        self._broke_before = False
        self._arguments: list[str] | None = None
        """Texts of the last call's arguments; None before any."""
        self._functions = functions
        self._reasoning_format = reasoning
        self._reasons_from_start = reasons_from_start or (reasoning is not None and reasoning.always)
        self._call_id = call_id
        self._max_calls = max_calls
        self._calls_only = calls_only
        self._feed = Feed()
        self._format = tool_calls
        begins = (*tool_calls.begin, *tool_calls.around) if tool_calls else ()
        self._begins = self._marks = Marks(*begins)
        self._broken = Marks(*begins, tool_calls.end if tool_calls else "")
        """Marks that are left out behind a call that went wrong."""
        self._pieces: list[TextPiece | CallPart] = []
        """Pieces that are new since the last part was given."""
        self._texts: list[str] = []
        """Texts that are to be added to the last piece."""
        self._space: list[str] = []
        """White space that is content only if other content follows it."""
        self._streaming = False
        self._parsing = self._read()
        self._ended = False

    def add(self, text: str) -> AnswerPart:
        """Returns what is certain after this text."""
        self._feed.add(text)
        self._go_on()
        return self._take_news()

    def finish(self) -> AnswerPart:
        """Returns the rest, when no text follows."""
        self._feed.end()
        self._go_on()
        return self._take_news()

    def read(self, text: str) -> AnswerPart:
        """Returns all of an answer, in one step."""
        self._feed.add(text)
        return self.finish()

    def _go_on(self) -> None:
        if not self._ended:
            self._ended = next(self._parsing, self) is self
        if self._streaming:
            self.add_arguments(self._feed.take_back())

    def _take_news(self) -> AnswerPart:
        self._join()
        news, self._pieces = AnswerPart(self._pieces), []
        return news

    def _begin_piece(self, piece: TextPiece | CallPart) -> None:
        self._join()
        self._pieces.append(piece)

    def _join(self) -> None:
        """Gives the last piece what is to be added to it."""
        if not self._texts:
            return
        text, piece = "".join(self._texts), self._pieces[-1]
        self._texts.clear()
        if isinstance(piece, CallPart):
            piece.arguments += text
        else:
            piece.text += text

    def _add_text(self, *texts: str, reasoning: bool = False) -> None:
        last = self._pieces[-1] if self._pieces else None
        if not isinstance(last, TextPiece) or last.reasoning != reasoning:
            self._begin_piece(TextPiece(reasoning=reasoning))
        self._texts += texts

    # --- what is heard of calls ---

    def begin_call(self, name: str) -> None:
        self._feed.take_back()
        self._space.clear()
        index = self.num_calls
        self.num_calls += 1
        if self._wanted:
            self._broke_before, self._arguments = self.has_broken_call, []
            self._begin_piece(CallPart(index, self._call_id(index), name))

    def add_arguments(self, text: str) -> None:
        self._feed.take_back()
        if not (self._wanted and text):
            return
        if not (self._pieces and isinstance(self._pieces[-1], CallPart)):
            self._begin_piece(CallPart(self.num_calls - 1))
        self._texts.append(text)
        assert self._arguments is not None
        self._arguments.append(text)

    def stream_arguments(self, on: bool) -> None:
        if not on:
            self.add_arguments(self._feed.take_back())
        self._streaming = on

    def end_call(self) -> None:
        self._feed.take_back()

    @property
    def has_broken_call(self) -> bool:
        """Says whether the arguments of a call that is given are no JSON so far, because it was cut or went wrong."""
        return self._broke_before or not (self._arguments is None or is_json("".join(self._arguments)))

    @property
    def _wanted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls

    # --- the answer's parts, in their order ---

    def _read(self) -> Waiting[None]:
        if self._reasoning_format is not None:
            yield from self._read_reasoning(self._reasoning_format)
        if self._format is not None and self._format.bare:
            yield from self._read_bare(self._format.bare)
        yield from self._read_content()

    def _read_reasoning(self, form: ReasoningFormat) -> Waiting[None]:
        feed, space = self._feed, (yield from self._feed.space())
        if not (yield from feed.literal(form.begin)) and not self._reasons_from_start:
            self._space.append(space)
            return
        yield from feed.space()
        ends, held = Marks(form.end), list[str]()
        while True:
            text, mark = yield from feed.before(ends, drops_cut=True)
            shown = text.rstrip(_SPACE)
            if shown:
                self._add_text(*held, shown, reasoning=True)
                held.clear()
            held.append(text[len(shown) :])
            if mark or not text:
                break
        yield from feed.space()
        feed.take_back()

    def _read_bare(self, first: str) -> Waiting[None]:
        self._space.append((yield from self._feed.space()))
        self._feed.take_back()
        if (yield from self._feed.peek()) == first:
            yield from self._read_calls()

    def _read_content(self) -> Waiting[None]:
        feed = self._feed
        while True:
            feed.take_back()
            text, mark = yield from feed.before(self._marks)
            self._say(text)
            if not mark and not text:
                break
            if mark:
                self._marks = self._begins
                feed.taken[:] = [mark]
                if self._format is not None and mark in self._format.begin:
                    yield from self._read_calls()
        if any(self._space) and not self.num_calls and not self._calls_only:
            self._add_text(*self._space)

    def _read_calls(self) -> Waiting[None]:
        """Takes the calls behind a begin mark, with their end mark; gives what is no call as content."""
        assert self._format is not None
        feed, before = self._feed, self.num_calls
        try:
            yield from CallParser(self._format, self._functions, feed, self).read()
        except NotACallError:
            if self._streaming:
                self.stream_arguments(False)
            rest = feed.take_back()
            if self.num_calls > before:
                self._marks = self._broken
                rest = self._broken.pattern.sub("", rest) if (yield from feed.peek()) else ""
            self._say(rest)
        if self.num_calls > before:
            space = yield from feed.space()
            if self._format.end and ((yield from feed.literal(self._format.end)) or feed.cut(self._format.end)):
                space, self._marks = "", self._begins
            self._space.append(space)
        feed.take_back()

    def _say(self, text: str) -> None:
        """Gives text as content, but for the white space at its end, which may stand before a call."""
        shown = "" if self._calls_only else text.rstrip(_SPACE)
        if shown:
            self._add_text(*self._space, shown)
            self._space.clear()
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])
