"""Prompts with a suffix have the token ids that the models' authors document, whatever stands in the two texts."""

import pytest
from small_tokenizers import byte_fallback, byte_level, wrap
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from pagemill.text.fill_in_the_middle import FORMS, FillInTheMiddle

PREFIX, SUFFIX = "def f(a):\n    return ", "\n\nprint(f(1)) é <|end|"
PLAIN = "<tool 日>"
"""An added token that is no special one: part of every text."""


def with_tokens(backend, names, *, special):
    """A tokenizer that has further tokens, and begins every prompt with <s>."""
    backend.add_special_tokens(["<s>"])
    backend.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    begin = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    return backend


def names_of(backend, token_ids):
    return [backend.id_to_token(token_id) for token_id in token_ids]


def squeezed(text):
    """A text without spaces, which SentencePiece writes as ▁."""
    return text.replace(" ", "").replace("▁", "")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    "written",
    [
        "<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>",  # Qwen2.5-Coder, CodeGemma
        "<fim_prefix>{}<fim_suffix>{}<fim_middle>",  # StarCoder
        "<fim-prefix>{}<fim-suffix>{}<fim-middle>",  # SantaCoder
        "<｜fim▁begin｜>{}<｜fim▁hole｜>{}<｜fim▁end｜>",  # DeepSeek-Coder
    ],
)
@pytest.mark.parametrize("texts", [(PREFIX, SUFFIX), ("", " a"), (PLAIN, PLAIN)])
def test_what_authors_write_with_tokens_in_a_text(special, written, texts):
    names = [name for name in written.split("{}") if name]
    backend = with_tokens(byte_level(), [*names, "<|endoftext|>"], special=special)
    assert FillInTheMiddle.of(backend).encode(*texts) == backend.encode(written.format(*texts)).ids


def spaced_by_normalizer():
    """As Llama's tokenizer was converted at first: every text gets a space."""
    return byte_fallback()


def spaced_by_pre_tokenizer():
    """As it is converted now: a text gets a space unless it begins with one."""
    backend = byte_fallback()
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


@pytest.mark.parametrize("make", [spaced_by_normalizer, spaced_by_pre_tokenizer])
@pytest.mark.parametrize(
    ("prefix", "before", "suffix", "behind"),
    [
        ("ab", ["▁", "a", "b"], "b!", ["b", "!"]),
        (" a", ["▁", "▁", "a"], " b ", ["▁", "b", "▁"]),
        ("", [], "\nb", ["\n", "b"]),
    ],
)
def test_what_authors_write_in_sentencepiece(make, prefix, before, suffix, behind):
    """A text begins with a space, and a suffix goes on a text."""
    llama = with_tokens(make(), ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], special=True)
    mistral = with_tokens(make(), ["[PREFIX]", "[MIDDLE]", "[SUFFIX]"], special=True)
    for backend, parts in (
        (llama, ["<s>", "▁<PRE>", *before, "▁<SUF>", *behind, "▁<MID>"]),
        (mistral, ["<s>", "[SUFFIX]", *behind, "[PREFIX]", *before]),
    ):
        assert names_of(backend, FillInTheMiddle.of(backend).encode(prefix, suffix)) == parts


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.prefix)
@pytest.mark.parametrize("make", [byte_level, byte_fallback, spaced_by_pre_tokenizer])
def test_no_text_ends_its_part(make, form, special):
    backend = with_tokens(make(), [*form.marks, *form.ends], special=special)
    middle = FillInTheMiddle.of(backend)
    hostile = "x".join([*form.marks, *form.ends, "<|end|>", "</s>", "<s>", *reversed(form.marks)])
    token_ids = middle.encode(hostile, hostile)
    written = names_of(backend, token_ids)
    added = [name for name in written if name in {*form.marks, *form.ends, "<|end|>", "</s>", "<s>"}]
    assert sorted(added) == sorted(["<s>", *form.marks])
    plain = [token_id for token_id, name in zip(token_ids, written, strict=True) if name not in added]
    assert squeezed(wrap(backend).decode(plain)) == squeezed(hostile * 2)
    assert middle.end_token_ids == [backend.token_to_id(name) for name in (*form.marks, *form.ends)]


def test_a_vocabulary_without_the_tokens_has_no_form():
    assert wrap(byte_level()).fill_in_the_middle is None
    backend = with_tokens(byte_level(), FORMS[0].marks[:2], special=True)
    assert wrap(backend).fill_in_the_middle is None


def test_it_changes_nothing_of_the_tokenizer():
    backend = with_tokens(byte_level(), FORMS[0].marks, special=True)
    before, text = backend.to_str(), "a<|fim_suffix|>"
    ids = backend.encode(text).ids
    FillInTheMiddle.of(backend).encode(text, text)
    assert (backend.to_str(), backend.encode(text).ids) == (before, ids)
    assert ids[-1] == backend.token_to_id("<|fim_suffix|>")
