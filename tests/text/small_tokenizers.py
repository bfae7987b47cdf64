"""Small tokenizers of every kind that matters for turning tokens into text, made here rather than fetched."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pagemill.text.tokenizer import Tokenizer as PagemillTokenizer
from pagemill.text.tokenizer_files import TokenizerSettings

PIECES = [
    "▁",
    "▁▁",
    "▁Hello",
    "Hello",
    "▁wor",
    "ld",
    "é",
    "▁日",
    "本",
    "a",
    "b",
    "▁a",
    "!",
    "\n",
    "▁the",
    "lo",
    "H",
    "e",
]


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: SentencePiece pieces, bytes for what they lack, one leading space stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in PIECES:
        vocab[piece] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return backend


def no_strip() -> Tokenizer:
    """As Gemma: byte fallback, and no leading space is stripped."""
    backend = byte_fallback()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def metaspace() -> Tokenizer:
    """As T5 and older SentencePiece conversions: the first token loses its space."""
    backend = byte_fallback()
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return backend


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: 256 byte tokens, some longer ones, special and plain added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    for token in ("Ġa", "ðŁ", "Ġthe", "âĤ", "¬Ġ"):
        vocab[token] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<tool 日>", special=False, normalized=False)])
    return backend


def wrap(backend: Tokenizer) -> PagemillTokenizer:
    return PagemillTokenizer(backend, TokenizerSettings(fingerprint="", special_tokens={}))
