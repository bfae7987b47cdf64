"""Defines how byte-level vocabularies in GGUF files cut a text before their merges apply.

A GGUF file has only a name for it (`tokenizer.ggml.pre`). The patterns are those of the models' own tokenizer.json, in
the order in which they cut: what one leaves whole, the next cuts further, and what none matches stays as it is.
"""

from __future__ import annotations

from typing import NamedTuple

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GAPS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
_UP_TO_3_DIGITS = r"\p{N}{1,3}"
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*",
)
"""Words that a capital begins."""
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷ"
    "ᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉ"
    "ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


def _any(*patterns: str) -> str:
    return "|".join(patterns)


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _any(_ENGLISH, _WORD, _UP_TO_3_DIGITS, _SIGNS, _GAPS)
_QWEN2 = _any(_ENGLISH, _WORD, DIGIT, _SIGNS, _GAPS)
_QWEN35 = _any(_ENGLISH, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _GAPS)
_TEKKEN = _any(*_CASED, DIGIT, _SIGNS_AND_SLASHES, _GAPS)
_GPT4O = _any(*(f"{word}{_ENGLISH}?" for word in _CASED), _UP_TO_3_DIGITS, _SIGNS_AND_SLASHES, _GAPS)
_DEEPSEEK3 = _any(
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    _GAPS,
)
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_BAILING = _any(
    r"'(?i:[sdmt]|ll|ve|re)",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    DIGIT,
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r"\s*[\r\n]|\s+(?!\S)|\s+",
)
_SEED = _any(_ENGLISH, _WORD, DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _GAPS)
_EXAONE_MOE = _any(
    _ENGLISH,
    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
    DIGIT,
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
    r"\s*[\r\n]|\s+(?!\S)|\s+",
)


class PreType(NamedTuple):
    """Says how a vocabulary cuts texts, and what its files need not state.

    whole_words: a word that the vocabulary has is taken as it is, whatever the merges say. begins: a text begins with
    the BOS token, unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False


def _named(names: str, *patterns: str, whole_words: bool = False, begins: bool = False) -> dict[str, PreType]:
    return dict.fromkeys(names.split(), PreType(patterns, whole_words, begins))


PRE_TYPES: dict[str, PreType] = {
    **_named("default", r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **_named(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3,
        whole_words=True,
        begins=True,
    ),
    **_named("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    **_named("glm4 glm5", _LLAMA3, whole_words=True),
    **_named(
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert exaone4 mpt olmo jais "
        "trillion granite-docling",
        GPT2,
    ),
    **_named("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", DIGIT, GPT2),
    **_named(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        _QWEN2,
    ),
    **_named("qwen35", _QWEN35),
    **_named("tekken", _TEKKEN, whole_words=True, begins=True),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    **_named("minicpm5", _UP_TO_3_DIGITS, _any(_ENGLISH, _WORD, r"\p{N}+", _SIGNS, _GAPS), whole_words=True),
    **_named(
        "deepseek-llm",
        "[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        DIGIT,
    ),
    **_named("deepseek-coder", "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT),
    **_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _UP_TO_3_DIGITS, _CJK, _DEEPSEEK3),
    **_named("falcon", r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    **_named("bloom gpt3-finnish poro-chat", _BLOOM),
    **_named("viking", _BLOOM, DIGIT),
    **_named("bailingmoe bailingmoe2 llada-moe", _BAILING),
    **_named("seed-coder", _SEED),
    **_named("exaone-moe", _EXAONE_MOE),
}
"""The known ways to cut a text, by the name that files give."""
