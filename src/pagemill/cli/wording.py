"""How commands say counts and times to people."""

from __future__ import annotations

import re

STEPS = ((60, "s"), (60, "min"), (24, "h"), (365, "d"))
"""How many of each unit make one of the next."""


def counted(count: int, noun: str) -> str:
    """Returns "1 turn" or "2 turns"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ago(seconds: float) -> str:
    """Returns how long ago something was, in the largest unit of which it is at least one."""
    left = max(seconds, 0.0)
    for most, unit in STEPS:
        if left < most:
            return f"{left:.0f} {unit} ago"
        left /= most
    return f"{left:.1f} years ago"


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Returns text that a terminal shows as it is: without characters that would steer it."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Returns text as one line that a terminal shows as it is."""
    return " ".join(printable(text).split("\n"))
