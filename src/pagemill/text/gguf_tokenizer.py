"""Builds a tokenizer from what a GGUF file says about it, with the tokens that llama.cpp makes of a text.

There are two kinds of vocabularies. Byte-level ones (`tokenizer.ggml.model` is gpt2) have merges, and cut a text before
they apply them, in the way that `tokenizer.ggml.pre` names. SentencePiece's (llama) have a score for each token
instead: of all neighbours that are a token together, those with the best score are joined first.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pagemill.errors import TokenizerError
from pagemill.hub.gguf_header import GGUFHeader
from pagemill.text.gguf_pre_types import DIGIT, GPT2, PRE_TYPES

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""Types of tokens; unused ones (5) count as normal."""
_SPACE = "▁"
_CONTROL_TEXTS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<eos>"),
    *("<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
}
"""Tokens that are control tokens even where a file has another type for them, as older conversions did."""
_NEVER_STRIPPING = {"<unk>", "<s>", "<|endoftext|>"}
"""The tokens of Phi-3 that keep the white space behind them, unlike those of its conversations."""
_WAY_OUT = "pass --tokenizer (tokenizer=) with a folder that has the model's tokenizer.json"


class GGUFTokenizer(NamedTuple):
    """Holds a tokenizer, the ids of its special tokens by role (bos, eos, unk, pad), and its chat template."""

    backend: tokenizers.Tokenizer
    roles: dict[str, int]
    chat_template: str | None


def read_gguf_tokenizer(path: Path) -> GGUFTokenizer:
    """Returns the tokenizer of a GGUF file.

    Raises TokenizerError for one of a kind that is not known, what `GGUFHeader` does, and whatever `tokenizers` does
    for tokens and merges that make no tokenizer.
    """
    metadata = GGUFHeader.of(path).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(
            f"{os.fspath(path)!r} has a tokenizer of the kind {kind!r} (tokenizer.ggml.model); known are 'gpt2' "
            f"(byte-level) and 'llama' (SentencePiece); {_WAY_OUT}"
        )
    vocabulary = _Vocabulary(metadata)
    if kind == "llama":
        backend, begins = _sentencepiece(vocabulary), True
    else:
        name = metadata.get("tokenizer.ggml.pre", "default")
        if name not in PRE_TYPES:
            raise TokenizerError(
                f"{os.fspath(path)!r} cuts texts in a way that is not known: tokenizer.ggml.pre is {name!r}; {_WAY_OUT}"
            )
        backend, begins = _byte_level(vocabulary, name), PRE_TYPES[name].begins
    roles = vocabulary.roles({"bos": 1, "eos": 2, "unk": 0} if kind == "llama" else {})
    _add_special_tokens(backend, vocabulary, strips=kind == "llama" and vocabulary.architecture == "phi3")
    _enclose(backend, vocabulary, roles, begins)
    return GGUFTokenizer(backend, roles, metadata.get("tokenizer.chat_template"))


class _Vocabulary:
    """Holds a file's tokens: their texts and types by id, and their ids by text."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.architecture = metadata.get("general.architecture")
        texts = self.get("tokens", [])
        self.texts = [text or f"[EMPTY_{place}]" for place, text in enumerate(texts)]
        self.types = self.get("token_type", [_NORMAL] * len(texts))[: len(texts)]
        self.scores = self.get("scores", [0.0] * len(texts))[: len(texts)]
        if not texts or len(self.types) != len(texts) or len(self.scores) != len(texts):
            raise ValueError(
                f"it has {len(texts)} tokens, {len(self.types)} types and {len(self.scores)} scores of them"
            )
        self.ids = {text: token_id for token_id, text in enumerate(self.texts)}

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def roles(self, defaults: Mapping[str, int]) -> dict[str, int]:
        """Returns the ids of special tokens by role, those that there is a token for."""
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        named = {role: self.get(f"{key}_token_id", defaults.get(role)) for role, key in keys.items()}
        return {role: token_id for role, token_id in named.items() if token_id in range(len(self.texts))}


def _byte_level(vocabulary: _Vocabulary, pre: str) -> tokenizers.Tokenizer:
    patterns, whole_words, _ = PRE_TYPES[pre]
    merges = [_parts(merge) for merge in vocabulary.get("merges", [])]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=whole_words))
    gpt2 = patterns[-1] == GPT2
    cuts = [_cut(pattern) for pattern in (patterns[:-1] if gpt2 else patterns)]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)  # cuts by GPT2 itself, in less time
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _cut(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == DIGIT:
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _parts(merge: str) -> tuple[str, str]:
    """Returns a merge's two parts; a space may be the first's first character."""
    space = merge.find(" ", 1)
    if space < 0:
        raise ValueError(f"merge {merge!r} has no two parts")
    return merge[:space], merge[space + 1 :]


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    unknown = next(
        (text for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True) if kind == _UNKNOWN), None
    )
    merges = _merges_by_score(vocabulary)
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    undone = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.get("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        backend.decoder = decoders.Sequence([*undone, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = spaces
        backend.decoder = decoders.Sequence(undone)
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Returns all pairs of tokens that are a token together, the best score first."""
    joined = {
        text: token_id
        for text, token_id in vocabulary.ids.items()
        if vocabulary.types[token_id] not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    found = [
        (-vocabulary.scores[token_id], token_id, text[:cut], text[cut:])
        for text, token_id in joined.items()
        for cut in range(1, len(text))
        if text[:cut] in joined and text[cut:] in joined
    ]
    found.sort(key=operator.itemgetter(0, 1))
    return [(left, right) for _, _, left, right in found]


def _add_special_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, strips: bool) -> None:
    """Adds the tokens that a text may name. strips: white space behind them is left out."""
    bounds = [vocabulary.get(f"{role}_token_id") for role in ("bos", "eos")]
    added = []
    for token_id, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=True)):
        special = kind in (_UNKNOWN, _CONTROL) or text in _CONTROL_TEXTS or token_id in bounds
        if special or kind == _USER_DEFINED:
            rstrip = strips and text not in _NEVER_STRIPPING
            added.append(AddedToken(text, rstrip=rstrip, normalized=False, special=special))
    backend.add_tokens(added)


def _enclose(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, roles: Mapping[str, int], begins: bool) -> None:
    """Sets which tokens stand around a text. begins: BOS does, unless the file says otherwise."""
    wanted = {"bos": vocabulary.get("add_bos_token", begins), "eos": vocabulary.get("add_eos_token", False)}
    around = {role: (vocabulary.texts[roles[role]], roles[role]) for role in roles if wanted.get(role)}
    bos, eos = ([f"{around[role][0]}:0"] if role in around else [] for role in ("bos", "eos"))
    backend.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A:0", *eos],
        pair=[*bos, "$A:0", *eos, *bos, "$B:0", *eos],
        special_tokens=list(around.values()),
    )
