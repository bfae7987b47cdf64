"""Keeps the keys of the terminal for the next prompt of `pagemill chat`."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keys_kept() -> Iterator[None]:
    """Keeps what is typed while there is no prompt out of what is shown. The next prompt has it, Enter as Enter, Ctrl-D
    as Ctrl-D."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = [*before]
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
