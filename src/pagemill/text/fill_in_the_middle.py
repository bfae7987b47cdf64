"""Fill-in-the-middle: prompts for what stands between a prefix and a suffix, as models were trained to read them.

A model's form is known by the tokens in its tokenizer's vocabulary. The texts between these tokens are plain: special
tokens that are written out in them are text like any other, so nobody's file can end its part, or begin another.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import tokenizers

_ANCHOR = "☺"
"""A character that no token joins with others."""


class Form(NamedTuple):
    """How a family of models reads a prefix and a suffix: the tokens before each, and the one that asks for the
    middle."""

    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()
    """Tokens that end a middle, where the vocabulary has them, beside these three and those that end any answer."""
    suffix_first: bool = False
    one_text: bool = False
    """Whether the suffix goes on a text: SentencePiece then puts no space before it, as it does before others."""

    @property
    def marks(self) -> list[str]:
        return [mark for mark in (self.prefix, self.suffix, self.middle) if mark is not None]


FORMS = (
    # Qwen2.5-Coder, CodeGemma, Granite
    Form(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    # StarCoder, StarCoder2, Granite Code, Stable Code, CodeQwen1.5
    Form(
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ends=("<fim_pad>", "<file_sep>", "<filename>", "<reponame>", "<repo_name>", "<|endoftext|>"),
    ),
    # SantaCoder
    Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),
    # CodeLlama
    Form("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",), one_text=True),
    # DeepSeek-Coder
    Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<|EOT|>",)),
    # Codestral
    Form("[PREFIX]", "[SUFFIX]", None, ends=("[MIDDLE]",), suffix_first=True, one_text=True),
)


class FillInTheMiddle:
    """Writes one tokenizer's prompts. Several threads may call `encode` at once."""

    def __init__(self, backend: tokenizers.Tokenizer, form: Form) -> None:
        """form: one whose marks the vocabulary has."""
        self._form = form
        self._ids: dict[str, int] = {
            name: token_id for name in (*form.marks, *form.ends) if (token_id := backend.token_to_id(name)) is not None
        }
        self.end_token_ids = list(self._ids.values())
        """Tokens at which a middle has ended."""
        self.largest_id = max(self._ids[mark] for mark in form.marks)
        self._plain = _plain(backend, set(self._ids))
        alone = self._plain.encode(_ANCHOR, add_special_tokens=False)
        spaced = form.one_text and "".join(alone.tokens).startswith("▁")
        self._anchor_length = len(alone.ids) if spaced else 0
        """Tokens of the anchor, where the space before a text matters; else 0."""
        opened = backend.encode(_ANCHOR)
        self._opening = opened.ids[: [*opened.special_tokens_mask, 0].index(0)]
        """What the tokenizer puts before any prompt."""

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> FillInTheMiddle | None:
        """Returns the one for a tokenizer, None where the vocabulary has no form's tokens."""
        for form in FORMS:
            if all(backend.token_to_id(mark) is not None for mark in form.marks):
                return cls(backend, form)
        return None

    def encode(self, prefix: str, suffix: str) -> list[int]:
        """Returns the token ids of the whole prompt."""
        form = self._form
        if self._anchor_length:
            texts = self._encode_within(" " + prefix if prefix else ""), self._encode_within(suffix)
        else:
            texts = self._encode(prefix), self._encode(suffix)
        parts = list(zip((form.prefix, form.suffix), texts, strict=True))
        if form.suffix_first:
            parts.reverse()
        token_ids = list(self._opening)
        for mark, text in parts:
            token_ids += [self._ids[mark], *text]
        return token_ids if form.middle is None else [*token_ids, self._ids[form.middle]]

    def _encode(self, text: str) -> list[int]:
        (encoded,) = self._plain.encode_batch_fast([text], add_special_tokens=False)  # as `Tokenizer.encode` does
        ids: list[int] = encoded.ids
        return ids

    def _encode_within(self, text: str) -> list[int]:
        """Returns the token ids of a text as they are behind another one."""
        return self._encode(_ANCHOR + text)[self._anchor_length :]


def _plain(backend: tokenizers.Tokenizer, names: set[str]) -> tokenizers.Tokenizer:
    """Returns a tokenizer of the same model and ids that takes special tokens, and those of `names`, for text."""
    plain = tokenizers.Tokenizer(backend.model)
    plain.normalizer, plain.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    added = [token for _, token in sorted(backend.get_added_tokens_decoder().items())]
    for hidden, tokens in itertools.groupby(added, lambda token: token.special or token.content in names):
        (plain.add_special_tokens if hidden else plain.add_tokens)(list(tokens))
    plain.encode_special_tokens = True
    return plain
