"""Incremental detokenizing: whatever the tokens, the pieces make exactly the text of all of them."""

from __future__ import annotations

import functools

import pytest
import small_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_fallback, wrap

from pagemill.text.detokenizer import Detokenizer
from pagemill.text.tokenizer import Tokenizer

KINDS = ("byte_fallback", "no_strip", "metaspace", "byte_level", "real")


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "real":
        return Tokenizer.from_path("smollm2-135m")
    return wrap(getattr(small_tokenizers, kind)())


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool, prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [], skip_special_tokens=skip)
    return [*(detokenizer.add([i]) for i in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_tokens_give_the_text_of_all(kind, data, skip):
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    pieces = stream(tokenizer, ids, skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=60), cut=st.integers(0, 60))
@settings(max_examples=150, deadline=None)
def test_no_half_characters_in_text(kind, text, cut):
    """Encoded text holds no broken bytes, so no piece may show a replacement character that the text does not have."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    pieces = stream(tokenizer, ids, skip=False)
    assert "".join(pieces) == whole
    assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    cut = min(cut, len(ids))
    assert detokenizer.add(ids[:cut]) + detokenizer.add(ids[cut:]) + detokenizer.finish() == whole


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_after_a_prompt_the_text_goes_on(kind, data):
    """decode(prompt + output) is decode(prompt) + the output's text, leading space included."""
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode("Hello a", add_special_tokens=False)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    text = "".join(stream(tokenizer, ids, False, prompt))
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids)


def test_leading_space_depends_on_what_came_before():
    tokenizer, backend = tokenizer_of("byte_fallback"), byte_fallback()
    hello, start = backend.token_to_id("▁Hello"), backend.token_to_id("<s>")
    assert "".join(stream(tokenizer, [hello], True)) == "Hello"
    assert "".join(stream(tokenizer, [hello], True, [start])) == "Hello"
    assert "".join(stream(tokenizer, [hello], True, [hello])) == " Hello"


def test_a_character_appears_with_its_last_byte():
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("€🎉", add_special_tokens=False)
    pieces = stream(tokenizer, ids, skip=True)
    assert [piece for piece in pieces if piece] == ["€", "🎉"]
    assert pieces[-1] == ""


def test_bytes_that_make_no_character_show_at_the_end():
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("€", add_special_tokens=False)[:-1]
    assert stream(tokenizer, ids, skip=True)[-1] == "\ufffd"


def test_prompt_may_end_inside_a_character():
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("x🎉", add_special_tokens=False)
    assert len(ids) > 2
    assert "".join(stream(tokenizer, ids[-1:], True, ids[:-1])) == "🎉"


def test_special_tokens_are_left_out_only_when_asked():
    tokenizer = tokenizer_of("real")
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert "".join(stream(tokenizer, ids, True)) == "a"
    assert "".join(stream(tokenizer, ids, False)) == "<|im_start|>a<|im_end|>"


def test_work_per_token_does_not_grow_with_the_text():
    """Counts calls into the decoder, which is where any work that grows would be."""
    tokenizer = wrap(small_tokenizers.byte_fallback())
    texts = tokenizer.token_texts
    decoded = 0
    original = texts.decode

    def counting(ids):
        nonlocal decoded
        decoded += len(ids)
        return original(ids)

    texts.decode = counting
    ids = [300 - i % 12 if i % 3 else 20 + i % 100 for i in range(2000)]
    stream(tokenizer, ids, False)
    first, decoded = decoded, 0
    stream(tokenizer, ids * 4, False)
    assert decoded <= 4 * first + 50


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_level", "real"])
def test_tokens_that_are_parts_of_a_character_have_their_bytes(kind):
    tokenizer = tokenizer_of(kind)
    spelled = [tokenizer.token_texts.raw(i) for i in tokenizer.encode("a 🙂 ß", add_special_tokens=False)]
    assert "🙂".encode() in b"".join(spelled)
    assert any("\ufffd" in part.decode(errors="replace") for part in spelled)
