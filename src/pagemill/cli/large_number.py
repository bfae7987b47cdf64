"""Reads large numbers as vLLM's command line does: `4k` is 4,000, and `4K` is 4,096. Bytes may be sizes, as `8MiB`."""

from __future__ import annotations

import re
from fractions import Fraction

import typer

NUMBERS = ("max_model_len", "max_num_batched_tokens")
"""The settings that are written as large numbers."""
BYTES = ("kv_cache_memory_bytes", "max_body_bytes", "max_bodies_bytes")
"""The settings that are written as large numbers or as sizes."""

_THOUSANDS: dict[str, int] = {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
_BINARY: dict[str, int] = {letter: 1024**power for power, letter in enumerate("KMGT", 1)}


def large_number(text: str) -> int:
    """Returns the number. Raises typer.BadParameter for what is none, and for decimals of a binary unit, as in 1.5K."""
    found = re.fullmatch(r"([+-]?\d+)(\.\d+)?([kmgtKMGT]?)", text.strip())
    if found is None or (found[2] and found[3] not in _THOUSANDS):
        raise typer.BadParameter(
            f"{text!r} is not an integer; write it as 32768, 32K (times 1,024) or 32.8k (times 1,000)"
        )
    whole, part, unit = found.groups()
    number = Fraction(whole + (part or "")) * {"": 1, **_THOUSANDS, **_BINARY}[unit]
    if number.denominator != 1:
        raise typer.BadParameter(f"{text!r} is not an integer; write it without so many decimals")
    return int(number)


def number_of_bytes(text: str) -> int:
    """Returns the bytes of a size such as 1MiB or 1.5 MB, or of a large number. Raises typer.BadParameter for neither
    of them, and for a size that is no whole number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?)(i?)b", text.strip().lower())
    if found is None or (found[3] and not found[2]):
        try:
            return large_number(text)
        except typer.BadParameter:
            raise typer.BadParameter(f"{text!r} is no number of bytes; write it as 8388608 or 8MiB") from None
    number, unit, binary = found.groups()
    size = Fraction(number) * ({"": 1, **_BINARY}[unit.upper()] if binary else {"": 1, **_THOUSANDS}[unit])
    if size.denominator != 1:
        raise typer.BadParameter(f"{text!r} is no whole number of bytes; write it without so many decimals")
    return int(size)
