"""Folders' tokenizers give the tokens that their own files say, whatever class a configuration names."""

from __future__ import annotations

import json

import pytest
import sentencepiece
import tokenizers
from small_tokenizers import byte_fallback, byte_level
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from pagemill.text import tokenizer_files
from pagemill.text.tokenizer import Tokenizer

TEXTS = [
    "List:\n\n1. First\n\n2. Second  3",
    "  two  spaces",
    "I'LL say foo(bar)",
    "<s>[a] Hello</s> b",
    "日本 🎉\r\n\t x",
]
MODELS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "mistral": "MistralForCausalLM"}
CLASSES = ["LlamaTokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer", "GemmaTokenizer"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "cache_dir", lambda: tmp_path / "cache")


def digits_first():
    """As SmolLM2 and StarCoder."""
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def no_space_before():
    """As Yi and Gemma."""
    backend = byte_fallback()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def folder_of(path, backend, name="LlamaTokenizerFast", model="llama", **config):
    path.mkdir()
    if backend is not None:
        backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": model, "architectures": [MODELS[model]]}))
    return path


@pytest.mark.parametrize("backend", [byte_fallback, no_space_before, byte_level, digits_first])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CLASSES)
def test_texts_are_cut_and_decoded_as_tokenizer_json_says(tmp_path, backend, model, name):
    special = ["<unk>", "<s>", "</s>"]
    made = backend()
    made.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = Tokenizer.from_path(folder_of(tmp_path / "m", made, name, model))
    for text in TEXTS:
        ids = made.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == made.decode(ids, skip_special_tokens=False)
        assert tokenizer.hf.encode(text, add_special_tokens=False) == ids


def test_an_added_token_is_found_in_texts_as_the_files_normalizer_leaves_them(tmp_path):
    made = byte_fallback()
    made.normalizer = normalizers.Lowercase()
    made.add_tokens([tokenizers.AddedToken("HEY", normalized=True)])
    tokenizer = Tokenizer.from_path(folder_of(tmp_path / "m", made))
    assert tokenizer.encode("a hey b", False) == made.encode("a hey b", add_special_tokens=False).ids
    assert made.token_to_id("HEY") in tokenizer.hf.encode("a hey b")


@pytest.mark.parametrize(
    ("name", "flags", "stored", "expected"),
    [
        ("LlamaTokenizerFast", {}, True, True),
        ("LlamaTokenizerFast", {}, False, False),
        ("LlamaTokenizerFast", {"add_bos_token": True}, False, True),
        ("LlamaTokenizer", {"add_bos_token": False}, True, False),
        ("PreTrainedTokenizerFast", {"add_bos_token": False}, True, True),
        ("Qwen2Tokenizer", {"add_bos_token": True}, False, False),
        ("GPTNeoXTokenizer", {}, True, True),
    ],
)
def test_who_says_that_a_text_begins_with_bos(tmp_path, name, flags, stored, expected):
    """The configuration does for the classes that have always heeded it, and tokenizer.json for the others."""
    made = byte_fallback()
    if stored:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = Tokenizer.from_path(folder_of(tmp_path / "m", made, name, **flags))
    assert (tokenizer.encode("a")[0] == 1) == expected
    assert tokenizer.hf.encode("a") == tokenizer.encode("a")


def test_a_folder_with_nothing_but_a_sentencepiece_model(tmp_path):
    folder = folder_of(tmp_path / "m", None, "LlamaTokenizer", add_bos_token=True, legacy=False)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat  and  that was that", "日本語 привет 12 345"] * 9),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=3,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = Tokenizer.from_path(folder)
    for text in ("the cat", "that  was\n\n12 日本 🎉", "привет"):
        assert tokenizer.encode(text) == [1, *model.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
