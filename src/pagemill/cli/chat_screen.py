"""How `pagemill chat` shows answers: as Markdown in a terminal, as they are anywhere else."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from pagemill.cli.chat_conversation import Piece, text_of
from pagemill.cli.markdown_stream import MarkdownStream
from pagemill.cli.wording import one_line, printable

TURNS_SHOWN = 2
"""The last turns of a conversation that goes on."""


class Screen(ABC):
    """Shows answers on stdout; notes and errors on stderr."""

    def __init__(self) -> None:
        self._messages = Console(stderr=True, highlight=False, markup=False)

    @contextmanager
    @abstractmethod
    def answer(self) -> Iterator[Screen]:
        """Shows one answer, which `add` takes in."""

    @abstractmethod
    def add(self, piece: Piece) -> None: ...

    @abstractmethod
    def show_turns(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Shows where a conversation goes on, if a person looks."""

    def note(self, text: str) -> None:
        self._messages.print(printable(text), style="dim", soft_wrap=True)

    def error(self, text: str) -> None:
        self._messages.print(f"error: {one_line(text)}", style="red", soft_wrap=True)


class PlainScreen(Screen):
    """Writes answers as they are; reasoning goes to stderr."""

    @contextmanager
    def answer(self) -> Iterator[Screen]:
        self._reasoned = False
        try:
            yield self
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()

    def add(self, piece: Piece) -> None:
        if piece.reasoning:
            self._reasoned = True
            sys.stderr.write(piece.reasoning)
        if piece.content and self._reasoned:
            self._reasoned = False
            sys.stderr.write("\n")
        sys.stdout.write(piece.content)
        sys.stdout.flush()

    def show_turns(self, messages: Sequence[Mapping[str, Any]]) -> None:
        pass


class TerminalScreen(Screen):
    """Draws answers as Markdown while they come."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(highlight=False)
        self._stream: MarkdownStream | None = None

    @contextmanager
    def answer(self) -> Iterator[Screen]:
        with MarkdownStream(self._console) as self._stream:
            yield self

    def add(self, piece: Piece) -> None:
        assert self._stream is not None
        self._stream.add(piece.content, piece.reasoning)

    def show_turns(self, messages: Sequence[Mapping[str, Any]]) -> None:
        asked = [at for at, message in enumerate(messages) if message["role"] == "user"]
        if len(asked) > TURNS_SHOWN:
            self.note(f"({len(asked) - TURNS_SHOWN} earlier turns; /save FILE writes all)")
        for message in messages[asked[-TURNS_SHOWN] if len(asked) >= TURNS_SHOWN else 0 :]:
            text = printable(text_of(message))
            if message["role"] == "user":
                self._console.print(Text("> " + text.replace("\n", "\n  "), style="bold"))
            elif message["role"] == "system":
                self.note(f"system: {text}")
            else:
                self._console.print(Markdown(text, hyperlinks=False))
