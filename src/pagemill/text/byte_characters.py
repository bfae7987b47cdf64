"""Defines how GPT-2's byte-level vocabularies write bytes: each by one printable character."""

from __future__ import annotations

_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _SHOWN]

BYTE_OF = {chr(byte): byte for byte in _SHOWN} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}
"""The byte that a character stands for: its own in Latin-1 if that is printable, U+0100 and on for the others."""
CHARACTER_OF = sorted(BYTE_OF, key=BYTE_OF.__getitem__)
"""The character that stands for each byte."""
