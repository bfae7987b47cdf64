"""A lower bound of a text's tokens that needs no tokenizing: a text that is far too long can be refused at once.

It is known for byte-pair encodings of bytes (GPT-2, Llama 3, Qwen), and for those of characters that fall back to bytes
(Llama 2, Gemma), where no step on the way drops characters in any number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tokenizers

from pagemill.text.byte_characters import CHARACTER_OF

_COMPOSED = 4
"""The most characters that canonical composition makes one."""
_KEEPING_NORMALIZERS = {"NFC": _COMPOSED, "Prepend": 1, "Replace": 1}
_KEEPING_SPLITTERS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}


class FewestTokens:
    """The lower bound for one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._longest = 0
        """The most characters that one token stands for; 0 if that is not known."""
        self._silent = ""
        """Characters that give no token."""
        model, vocabulary = backend.model, backend.get_vocab()
        stripping = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        if not isinstance(model, tokenizers.models.BPE) or stripping or backend.truncation is not None:
            return
        shrinking = 1
        for step in _steps(backend.normalizer, "normalizers"):
            if step["type"] == "Replace" and (step["pattern"], step["content"]) != ({"String": " "}, "▁"):
                return
            shrinking *= _KEEPING_NORMALIZERS.get(step["type"], 0)
        splitters = list(_steps(backend.pre_tokenizer, "pretokenizers"))
        if any(step["type"] not in _KEEPING_SPLITTERS or step.get("behavior") == "Removed" for step in splitters):
            return
        if any(step["type"] == "ByteLevel" for step in splitters):
            if any(CHARACTER_OF[byte] not in vocabulary for byte in range(0x80, 0xC0)) or model.fuse_unk:
                return
            self._silent = "".join(chr(byte) for byte in range(0x80) if CHARACTER_OF[byte] not in vocabulary)
        elif not (model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))):
            return
        self._longest = shrinking * max(map(len, vocabulary))

    def of(self, text: str) -> int:
        """Returns a number of tokens that the text has at least."""
        if not self._longest:
            return 0
        heard = len(text) - sum(
            text.count(character) for character in self._silent
        )  # not `map`: others may run between
        return -(-heard // self._longest)


def _steps(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """Returns the steps of a part of a tokenizer, one after another, as its file writes them."""
    if part is not None:
        step = json.loads(part.__getstate__())
        yield from step[name] if step["type"] == "Sequence" else [step]
