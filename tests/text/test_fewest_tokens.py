"""A bound that is no bound would refuse prompts that fit: it is compared with tokenizing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from pagemill.text.fewest_tokens import FewestTokens
from pagemill.text.tokenizer import Tokenizer
from text import small_tokenizers


def composing():
    backend = small_tokenizers.byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


def lacking():
    """A vocabulary without some bytes, which are left out of texts in silence."""
    backend = small_tokenizers.byte_level()
    vocab = {token: i for token, i in backend.get_vocab().items() if token not in ("Ā", "ă", "A")}
    backend.model = models.BPE({token: i for i, token in enumerate(vocab)}, [])
    return backend


KNOWN = {
    "bytes": small_tokenizers.byte_level(),
    "composed": composing(),
    "lacking": lacking(),
    "fallback": small_tokenizers.byte_fallback(),
}
BOUNDS = {name: FewestTokens(backend) for name, backend in KNOWN.items()}
TEXTS = st.text(
    st.sampled_from("\x00\x03Aa b\né日本🎉가\u1100\u1161\u11a8\u0301\u1f82\u03b1\u0313\u0300\u0345"), max_size=60
)


@pytest.mark.parametrize("name", KNOWN)
@given(
    text=st.one_of(st.text(), TEXTS, st.sampled_from([" ", "a", "Hello", "<|end|>", "▁▁"]).map(lambda word: word * 40))
)
def test_no_text_has_fewer(name, text):
    assert BOUNDS[name].of(text) <= len(KNOWN[name].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", KNOWN)
def test_long_texts_have_many(name):
    assert BOUNDS[name].of("b" * 100_000) >= 1000


def test_the_real_tokenizer():
    tokenizer = Tokenizer.from_path("smollm2-135m")
    for text in ("-" * 5000, " " * 5000, "\x04" * 5000, "word " * 1000, "\n" * 5000, "日" * 1000):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.fewest_tokens("-" * 5000) > 50


def stripping():
    backend = small_tokenizers.byte_level()
    backend.add_special_tokens([AddedToken("<strip>", special=True, rstrip=True)])
    return backend


def lowering():
    backend = small_tokenizers.byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.StripAccents()])
    return backend


def replacing():
    backend = small_tokenizers.byte_level()
    backend.normalizer = normalizers.Replace("aaaa", "b")
    return backend


def removing():
    backend = small_tokenizers.byte_fallback()
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return backend


def words():
    backend = small_tokenizers.byte_level()
    backend.model = models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")
    return backend


@pytest.mark.parametrize("make", [stripping, lowering, replacing, removing, words])
def test_where_characters_may_vanish_there_is_no_bound(make):
    assert FewestTokens(make()).of("x" * 10_000) == 0
