"""Tells which characters the tokens of a tokenizer cannot write: byte-level vocabularies lack bytes that were not in
the texts that they were made from."""

from __future__ import annotations

import functools

import tokenizers

from pagemill.text.byte_characters import CHARACTER_OF


class Spelling:
    """Knows what the tokens of one tokenizer can write. Of one that is not byte-level it says nothing."""

    def __init__(self, backend: tokenizers.Tokenizer, byte_level: bool) -> None:
        self._backend = backend
        self._byte_level = byte_level
        self._writes = functools.lru_cache(4096)(self._is_written)

    def missing(self, text: str) -> str:
        """Returns the characters of a text that no tokens write, each once."""
        if not self._byte_level:
            return ""
        return "".join(character for character in dict.fromkeys(text) if not self._writes(character))

    def _is_written(self, character: str) -> bool:
        return self._is_cut("".join(CHARACTER_OF[byte] for byte in character.encode(errors="surrogatepass")))

    def _is_cut(self, rest: str) -> bool:
        """Returns whether the tokens that stand for bytes, one after another, are all of `rest`."""
        return not rest or any(
            self._backend.token_to_id(rest[:end]) is not None and self._is_cut(rest[end:])
            for end in range(len(rest), 0, -1)
        )
