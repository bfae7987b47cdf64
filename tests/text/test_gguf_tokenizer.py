"""GGUF files' tokenizers give the tokens of llama.cpp and of SentencePiece, from the file's metadata alone."""

from __future__ import annotations

import json

import gguf
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from pagemill.errors import TokenizerError
from pagemill.text import tokenizer_files
from pagemill.text.gguf_tokenizer import read_gguf_tokenizer
from pagemill.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCEPIECE = [
    *("<unk>", "<s>", "</s>", *BYTES, "▁", "▁[", "▁a", "▁H", "▁He", "▁Hel", "▁Hell", "▁Hello"),
    *("H", "e", "l", "o", "[", "a", "b", "\n"),
]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_LEVEL = [*LETTERS, "ĊĊ", "12", "123", "<|im_start|>", "<|im_end|>", "<tool>"]
FROM_LLAMA_CPP = {
    "list:\n\n1. First\n\n2. Second": [2402, 42, 1116, 33, 30, 3508, 1116, 34, 30, 5665],
    "x  5\t\t6": [104, 256, 37, 1656, 38],
    "    1\n  20\n": [289, 33, 11181, 34, 32, 198],
}
"""Texts and their tokens in llama.cpp's reading of the default model's file."""
TEXT = "Foo's naïve_x2  5\n\n1234 (b)\t日本"
CUTS = {
    "gpt-2": ["Foo", "'s", " naïve", "_", "x", "2", " ", " 5", "\n", "\n", "1234", " (", "b", ")", "\t", "日本"],
    "smollm": ["Foo", "'s", " naïve", "_", "x", "2", "  ", "5", "\n\n", *"1234", " (", "b", ")", "\t", "日本"],
    "llama-bpe": ["Foo", "'s", " naïve", "_x", "2", " ", " ", "5", "\n\n", "123", "4", " (", "b", ")", "\t日本"],
    "qwen2": ["Foo", "'s", " naïve", "_x", "2", " ", " ", "5", "\n\n", *"1234", " (", "b", ")", "\t日本"],
    "deepseek-coder": [
        "Foo",
        "'",
        "s",
        " naïve",
        "_",
        "x",
        "2",
        "  ",
        "5",
        "\n",
        "\n",
        *"1234",
        " (",
        "b",
        ")",
        "\t",
        "日本",
    ],
    "deepseek-v3": ["Foo", "'s", " naïve", "_x", "2", "  ", "5", "\n\n", "123", "4", " (", "b", ")", "\t", "日本"],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "cache_dir", lambda: tmp_path / "cache")


def write(path, kind, tokens, *, pre="default", types=None, merges=None, scores=None, architecture="llama", **keys):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([(types or {}).get(token, BYTE if token in BYTES else NORMAL) for token in tokens])
    if kind == "llama":
        first_is_best = [-float(place) for place in range(len(tokens))]
        writer.add_token_scores(scores or first_is_best)
    if merges is not None:
        writer.add_token_merges(merges)
    for name, value in keys.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def pieces(path, text, special=False):
    """The tokens of a text, which transformers' own tokenizer for this file must give too."""
    tokenizer = Tokenizer.from_path(path)
    ids = tokenizer.encode(text, add_special_tokens=special)
    assert tokenizer.hf.encode(text, add_special_tokens=special) == ids
    return tokenizer.names_of(ids)


def scored(path, **keys):
    return write(path, "llama", SENTENCEPIECE, types={"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}, **keys)


def byte_level(path, pre="smollm", **keys):
    types = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<tool>": USER_DEFINED}
    merges = ["Ċ Ċ", "1 2"]
    return write(path, "gpt2", BYTE_LEVEL, types=types, merges=merges, pre=pre, **keys)


@pytest.mark.parametrize("text", FROM_LLAMA_CPP)
def test_the_default_model_has_the_tokens_of_llama_cpp(text):
    """Digits are cut out first: white space before a digit stays in one piece."""
    assert Tokenizer.from_path("smollm2-135m").encode(text) == FROM_LLAMA_CPP[text]


@pytest.mark.parametrize("pre", CUTS)
def test_texts_are_cut_as_the_file_names_it(tmp_path, pre):
    cut = read_gguf_tokenizer(byte_level(tmp_path / "m.gguf", pre)).backend.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[begin:end] for _, (begin, end) in cut] == CUTS[pre]


@pytest.mark.parametrize(
    ("kind", "pre", "said"),
    [
        ("gpt2", "newest", r"cuts texts in a way that is not known: tokenizer.ggml.pre is 'newest'; pass --tokenizer"),
        ("rwkv", "default", r"a tokenizer of the kind 'rwkv' \(tokenizer.ggml.model\); known are .*; pass --tokenizer"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, kind, pre, said):
    path = write(tmp_path / "m.gguf", kind, BYTE_LEVEL, pre=pre, merges=[])
    with pytest.raises(TokenizerError, match=said) as caught:
        Tokenizer.from_path(path)
    assert "fetch the model again" not in caught.value.message


def test_metadata_that_make_no_tokenizer_are_refused(tmp_path):
    path = write(tmp_path / "m.gguf", "llama", ["a", "b"], scores=[1.0])
    with pytest.raises(TokenizerError, match=r"2 tokens, 2 types and 1 scores of them; fetch the model again"):
        Tokenizer.from_path(path)


def test_token_types_decide_which_tokens_are_special(tmp_path):
    path = byte_level(tmp_path / "m.gguf")
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer.special_tokens.keys() == {"<|im_start|>", "<|im_end|>"}
    assert pieces(path, "<|im_start|>a<tool>12") == ["<|im_start|>", "a", "<tool>", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("<|im_start|>a<tool>"), skip_special_tokens=True) == "a<tool>"


@pytest.mark.parametrize(("kind", "role"), [(NORMAL, None), (USER_DEFINED, None), (NORMAL, "eos"), (CONTROL, None)])
def test_the_end_of_sentencepiece_is_plain_text_where_the_file_says_so(tmp_path, kind, role):
    """Vocabularies with tags of HTML have one of these letters."""
    keys = {} if role is None else {f"{role}_token_id": len(BYTE_LEVEL)}
    tokens, types = [*BYTE_LEVEL, "</s>"], {"</s>": kind}
    path = write(tmp_path / "m.gguf", "gpt2", tokens, types=types, merges=[], pre="qwen2", **keys)
    tokenizer = Tokenizer.from_path(path)
    is_special = kind == CONTROL or role is not None
    assert ("</s>" in tokenizer.special_tokens) == is_special
    assert (len(pieces(path, "</s>")) == 1) == (is_special or kind == USER_DEFINED)
    assert (tokenizer.decode(tokenizer.encode("1</s>2"), skip_special_tokens=True) == "1</s>2") != is_special


def test_texts_begin_with_bos_where_llama_cpp_has_it_so(tmp_path):
    ids = {"bos_token_id": BYTE_LEVEL.index("<|im_start|>"), "eos_token_id": BYTE_LEVEL.index("<|im_end|>")}
    for number, (pre, keys, expected) in enumerate(
        [
            ("llama-bpe", ids, ["<|im_start|>", "a"]),
            ("llama-bpe", {**ids, "add_bos_token": False}, ["a"]),
            ("llama-bpe", {}, ["a"]),
            ("smollm", ids, ["a"]),
            ("smollm", {**ids, "add_bos_token": True, "add_eos_token": True}, ["<|im_start|>", "a", "<|im_end|>"]),
        ]
    ):
        assert pieces(byte_level(tmp_path / f"{number}.gguf", pre, **keys), "a", special=True) == expected
    assert pieces(scored(tmp_path / "s.gguf"), "a", special=True) == ["<s>", "▁a"]


def test_words_of_the_vocabulary_need_no_merges_where_llama_cpp_has_it_so(tmp_path):
    assert pieces(byte_level(tmp_path / "l.gguf", "llama-bpe"), "123") == ["123"]
    assert pieces(byte_level(tmp_path / "g.gguf", "gpt-2"), "123") == ["12", "3"]


def test_a_space_comes_before_each_stretch_of_text(tmp_path):
    assert pieces(scored(tmp_path / "m.gguf"), "<s>[b] Hello</s>a") == [
        *("<s>", "▁[", "b", "<0x5D>", "▁Hello", "</s>", "▁a"),
    ]
    path = scored(tmp_path / "n.gguf", add_space_prefix=False)
    assert pieces(path, "<s>[ Hello") == ["<s>", "[", "▁Hello"]
    assert Tokenizer.from_path(path).decode(Tokenizer.from_path(path).encode(" a", False)) == " a"


def test_the_best_score_is_joined_first(tmp_path):
    tokens = ["<unk>", "a", "b", "c", "ab", "bc", "▁"]
    for scores, expected in (([0, 0, 0, 0, -1, -2, -9], ["ab", "c"]), ([0, 0, 0, 0, -2, -1, -9], ["a", "bc"])):
        path = write(
            tmp_path / f"{expected[0]}.gguf",
            "llama",
            tokens,
            types={"<unk>": UNKNOWN},
            scores=[float(score) for score in scores],
            add_space_prefix=False,
        )
        assert pieces(path, "abc") == expected


def test_phi_3_leaves_out_white_space_behind_tokens_of_a_conversation(tmp_path):
    tokens = [*SENTENCEPIECE, "<|user|>", "<|end|>"]
    types = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<|user|>": CONTROL, "<|end|>": CONTROL}
    text = "<|user|>\nHello<|end|>\n<s>\n"
    phi = write(tmp_path / "p.gguf", "llama", tokens, types=types, architecture="phi3")
    assert pieces(phi, text) == ["<|user|>", "▁Hello", "<|end|>", "<s>", "▁", "\n"]
    llama = write(tmp_path / "l.gguf", "llama", tokens, types=types)
    assert pieces(llama, text) == [
        *("<|user|>", "▁", "\n", *"Hello", "<|end|>", "▁", "\n", "<s>", "▁", "\n"),
    ]


def test_files_beside_a_gguf_file_do_not_matter(tmp_path):
    alone = Tokenizer.from_path(byte_level(tmp_path / "m.gguf"))
    (tmp_path / "other").mkdir()
    beside = byte_level(tmp_path / "other" / "m.gguf")
    added = {"900": {"content": "<|user|>", "special": True}}
    (tmp_path / "other" / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    assert Tokenizer.from_path(beside).fingerprint == alone.fingerprint
    assert pieces(beside, "<|user|>") == list("<|user|>")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A SentencePiece model, and a GGUF file of it."""
    folder = tmp_path_factory.mktemp("trained")
    lines = ["the cat sat on the mat  and  that was that", "def f(x):  return  x ** 2", "日本語 привет 12 345"] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "m"),
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=3,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))
    ids = range(model.vocab_size())
    tokens = [model.id_to_piece(i) for i in ids]
    types = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    path = write(folder / "m.gguf", "llama", tokens, types=types, scores=[model.get_score(i) for i in ids])
    return model, read_gguf_tokenizer(path).backend


@given(text=st.text(alphabet=st.sampled_from("the catsm   \n12é日本語п🎉"), max_size=40))
@settings(max_examples=200, deadline=None)
def test_scores_give_the_tokens_of_sentencepiece(trained, text):
    model, backend = trained
    assert backend.encode(text, add_special_tokens=False).ids == model.encode(text)
