"""Where the turns of `pagemill chat` come from: an editor in a terminal, lines anywhere else."""

from __future__ import annotations

import signal
import sys
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from pagemill.errors import InvalidRequestError

PROMPT = "> "


class Turns(Protocol):
    """Reads what the user says."""

    async def read(self) -> str | None:
        """Returns one turn, "" for none; None to leave."""


class EditedTurns:
    """Lines that are edited. Enter ends a turn; Alt-Enter and Ctrl-J begin another line, and so does what is pasted."""

    def __init__(self) -> None:
        keys = KeyBindings()

        @keys.add("enter")
        def end(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        @keys.add("c-j")
        def begin_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            PROMPT, multiline=True, key_bindings=keys, prompt_continuation=" " * len(PROMPT)
        )

    async def read(self) -> str | None:
        try:
            return await self._session.prompt_async()
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None


class LineTurns:
    """A turn per line of stdin. Nothing else happens meanwhile: it may hold up the event loop."""

    async def read(self) -> str | None:
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"the line on stdin is not UTF-8 ({error}); convert it") from error
        finally:
            signal.signal(signal.SIGINT, previous)
        return line.rstrip("\n") if line else None
