"""Turns tokens into text as they come: O(1) per token, never half a character, and in the end the text of all.

There are two kinds of tokenizers. In byte-level ones a token is bytes, which a UTF-8 decoder joins. In all others a
token is a piece of text that depends on its neighbours in two ways only, as the very first one (a leading
space may be dropped) and inside a run of byte tokens (`<0xE2>`), which becomes text when the run has ended.

`tokenizers.decoders.DecodeStream` takes as long (2 to 5 microseconds per token), but over random tokens it raises an
exception in two of five streams with byte fallback, and shows no bytes at the end that make no character.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pagemill.text.byte_characters import BYTE_OF

if TYPE_CHECKING:
    import tokenizers

    from pagemill.text.tokenizer import Tokenizer

_CONTEXT = 16
"""Tokens of the prompt that are looked at: more than the 4 bytes that one character can be cut into."""


class TokenTexts:
    """Knows what single tokens of one tokenizer contribute to a text; all its detokenizers share it.

    byte_level: True if tokens are bytes; then `bytes_of` returns them, else `text_of` and `byte_tokens` apply.
    special, byte_tokens: ids of the special tokens, and of those that are written as one byte.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.byte_level = _is_byte_level(backend)
        self._backend = backend
        self.special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        spellings = (spelling for byte in range(256) for spelling in (f"<0x{byte:02X}>", f"<0x{byte:02x}>"))
        self.byte_tokens = {i for s in spellings if (i := backend.token_to_id(s)) is not None}
        self.bytes_of = functools.cache(self._bytes_of)
        self.text_of = functools.cache(self._text_of)
        self._anchor = 0 if self.byte_level else self._find_anchor()
        self._anchor_text = "" if self.byte_level else self.decode([self._anchor])

    def raw(self, token_id: int) -> bytes:
        """Returns the bytes of a token, which may be a part of a character."""
        if self.byte_level:
            return self.bytes_of(token_id)
        if token_id in self.byte_tokens:
            return bytes([int(str(self._backend.id_to_token(token_id))[3:5], 16)])
        return self.text_of(token_id).encode()

    def exists(self, token_id: int) -> bool:
        return self._backend.id_to_token(token_id) is not None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the tokens' text at the beginning of a text, special tokens included."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        mapped = [BYTE_OF.get(character, -1) for character in token]
        return token.encode() if -1 in mapped else bytes(mapped)

    def _text_of(self, token_id: int) -> str:
        return self.text_of_run([token_id])

    def text_of_run(self, token_ids: Sequence[int]) -> str:
        """Returns the tokens' text anywhere but at the beginning."""
        return self.decode([self._anchor, *token_ids])[len(self._anchor_text) :]

    def _find_anchor(self) -> int:
        """Returns a token that stands for "some text came before": it has text even as the first, and is no byte."""
        others = self.special | self.byte_tokens
        for token_id in range(self._backend.get_vocab_size()):
            if token_id not in others and self.decode([token_id]).strip():
                return token_id
        return 0


class Detokenizer:
    """Makes the text of one sequence, which begins after `prompt_token_ids`.

    Token ids that the tokenizer does not have (a model's vocabulary may be padded) give no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._texts = tokenizer.token_texts
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._beginning = True
        self._head: list[int] = []
        self._run: list[int] = []
        context = prompt_token_ids[-_CONTEXT:]
        if self._texts.byte_level:
            self._decode_bytes(context)
        elif context:
            self._beginning = not self._texts.decode([i for i in context if not self._skipped(i)])

    def add(self, token_ids: Iterable[int]) -> str:
        """Returns the text that is certain after these tokens."""
        if self._texts.byte_level:
            return self._decode_bytes(token_ids)
        return "".join(self._piece(token_id) for token_id in token_ids if not self._skipped(token_id))

    def finish(self) -> str:
        """Returns the rest of the text, when no token follows: U+FFFD for bytes that make no character."""
        if self._texts.byte_level:
            return self._decoder.decode(b"", final=True)
        return self._flush([])

    def _skipped(self, token_id: int) -> bool:
        return self._skip and token_id in self._texts.special

    def _decode_bytes(self, token_ids: Iterable[int]) -> str:
        skipped = self._texts.special if self._skip else ()
        return self._decoder.decode(b"".join([self._texts.bytes_of(i) for i in token_ids if i not in skipped]))

    def _piece(self, token_id: int) -> str:
        if token_id in self._texts.byte_tokens:
            self._run.append(token_id)
            return ""
        if self._run or self._beginning:
            return self._flush([token_id]) if self._texts.exists(token_id) else ""
        return self._texts.text_of(token_id)

    def _flush(self, token_ids: list[int]) -> str:
        """Returns the text of the run of byte tokens that ends here, and of `token_ids` after it."""
        run, self._run = self._run + token_ids, []
        if not self._beginning:
            return self._texts.text_of_run(run) if run else ""
        self._head += run
        text = self._texts.decode(self._head)
        self._beginning = not text
        return text


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Returns whether the decoder is ByteLevel, alone or in a sequence with nothing that changes text."""
    if backend.decoder is None:
        return False
    state = backend.decoder.__getstate__()
    decoder = json.loads(state)
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]
