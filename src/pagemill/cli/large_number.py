"""Reads large numbers as vLLM's command line does: `4k` is 4,000, and `4K` is 4,096."""

from __future__ import annotations

import re
from fractions import Fraction

import typer

FLAGS = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes")
"""The settings that are written so."""

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
