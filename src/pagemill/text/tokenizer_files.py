"""Reads a model's files into a `tokenizers` tokenizer and its settings.

Folders have tokenizers in many forms (tokenizer.json, SentencePiece, vocab and merges, and what configurations add to
them), and transformers knows them all but takes seconds to import and convert. So it is asked once for each model; what
it made is kept in pagemill's cache, and every later start reads that in a fraction of a second, without importing
transformers. A GGUF file's is built without it, and kept too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import operator
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import tokenizers

from pagemill.errors import TokenizerError
from pagemill.hub.registry import cache_dir

if TYPE_CHECKING:
    from pagemill.text.gguf_tokenizer import GGUFTokenizer

_FORM = 4
"""Raise it when what is kept, or how it is made, changes."""
_LARGEST_ID = 2**24
_SOURCES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
_ALSO_READ = (
    *("tokenizer_config.json", "config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.json", "chat_template.jinja", "additional_chat_templates"),
)
_ENCLOSING = {"CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "LlamaTokenizer"}
_WAY_OUT = "pass --tokenizer (tokenizer=) with a folder or GGUF file that has one"


class TokenizerSettings(msgspec.Struct, kw_only=True):
    """Holds what a tokenizer is, apart from its tokenizer.json."""

    fingerprint: str
    """SHA-256 of the vocabulary and the decoder, hexadecimal: with equal ones, equal token ids mean equal texts."""
    special_tokens: dict[str, str]
    """Special tokens by role, such as `eos_token`, as chat templates see them."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    chat_template: str | dict[str, str] | None = None
    """One template, or several by name."""
    split_special_tokens: bool = False
    """True if special tokens written out in a text are taken for plain text."""


def read_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    """Returns the tokenizer of a Hugging Face folder or a GGUF file. Raises TokenizerError if it cannot be read."""
    kept = cache_dir() / "tokenizers" / _identity(path)
    try:
        return _read_kept(kept)
    except (OSError, msgspec.DecodeError, ValueError):
        shutil.rmtree(kept, ignore_errors=True)  # absent, or damaged
    text, settings = _convert(path)
    _keep(kept, text, settings)
    return tokenizers.Tokenizer.from_str(text), settings


def load_with_transformers(path: Path) -> Any:
    """Returns transformers' own tokenizer for the same files, with the same tokens. Imports transformers."""
    if path.is_file():
        return _wrapped(_built(path))
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if (file := path / "tokenizer.json").is_file():
        stored = tokenizers.Tokenizer.from_file(os.fspath(file))
        _restore(made.backend_tokenizer, stored)
        _enclose(made, stored, path / "tokenizer_config.json")
    return made


def _restore(backend: tokenizers.Tokenizer, stored: tokenizers.Tokenizer) -> None:
    """Gives a tokenizer back what its tokenizer.json says about cutting texts and putting them together.

    transformers takes only the vocabulary and the merges from there if the model has a class of its own, and what that
    class has for the rest. The tokens that it adds by configurations stay.
    """
    backend.model = stored.model
    backend.normalizer, backend.pre_tokenizer = stored.normalizer, stored.pre_tokenizer
    backend.decoder = stored.decoder
    # tokenizers 0.22 does not see by itself that added tokens look different behind another normalizer.
    backend.add_tokens(list(backend.get_added_tokens_decoder().values()))


def _enclose(made: Any, stored: tokenizers.Tokenizer, file: Path) -> None:
    """Sets which tokens stand around a text: as the configuration says for a class that heeds it, else as stored.

    transformers 5 ignores `add_bos_token` and `add_eos_token` beside a tokenizer.json. Versions before heeded them in
    these classes, and DeepSeek's models depend on it: their tokenizer.json puts nothing around a text.
    """
    config = msgspec.json.decode(file.read_bytes()) if file.is_file() else {}
    flags = [config.get(name) for name in ("add_bos_token", "add_eos_token")]
    if str(config.get("tokenizer_class")).removesuffix("Fast") not in _ENCLOSING:
        made.backend_tokenizer.post_processor = stored.post_processor
        return
    if flags == [None, None]:
        return
    made.add_eos_token = bool(flags[1])
    made.add_bos_token = flags[0] is None or bool(flags[0])


def _built(path: Path) -> GGUFTokenizer:
    from pagemill.text.gguf_tokenizer import read_gguf_tokenizer  # no later start needs it

    return read_gguf_tokenizer(path)


def _wrapped(made: GGUFTokenizer) -> Any:
    import transformers

    wrapper: Any = transformers.PreTrainedTokenizerFast
    added = made.backend.get_added_tokens_decoder()
    roles = {f"{role}_token": added[token_id] for role, token_id in made.roles.items() if token_id in added}
    return wrapper(tokenizer_object=made.backend, chat_template=made.chat_template, **roles)


def _identity(path: Path) -> str:
    """Returns a digest of what the kept form was made from.

    A folder's files count by content, a GGUF file by place, size and time.
    """
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "tokenizers")]
    digest = hashlib.sha256(repr([_FORM, *versions]).encode())
    if path.is_file():
        stat = path.stat()
        digest.update(repr((os.fspath(path.resolve()), stat.st_size, stat.st_mtime_ns)).encode())
        return digest.hexdigest()
    if not path.is_dir():
        raise TokenizerError(f"there is no tokenizer at {os.fspath(path)!r}: no such file or folder; {_WAY_OUT}")
    if not any((path / name).is_file() for name in _SOURCES):
        raise TokenizerError(f"{os.fspath(path)!r} has no tokenizer (none of {', '.join(_SOURCES)}); {_WAY_OUT}")
    for name in (*_SOURCES, *_ALSO_READ):
        place = path / name
        for file in sorted(place.iterdir()) if place.is_dir() else [place]:
            if file.is_file():
                content = file.read_bytes()
                digest.update(repr((os.fspath(file.relative_to(path)), len(content))).encode())
                digest.update(content)
    return digest.hexdigest()


def _convert(path: Path) -> tuple[str, TokenizerSettings]:
    try:
        return _of_gguf(_built(path)) if path.is_file() else _of_folder(path)
    except TokenizerError:
        raise
    except Exception as error:  # transformers and its parsers raise anything at all for files that they cannot read
        raise TokenizerError(
            f"the tokenizer of {os.fspath(path)!r} cannot be read: {type(error).__name__}: {error}; "
            f"fetch the model again, or {_WAY_OUT}"
        ) from error


def _of_gguf(made: GGUFTokenizer) -> tuple[str, TokenizerSettings]:
    text = made.backend.to_str()
    settings = TokenizerSettings(
        fingerprint=_digest(text),
        special_tokens={f"{role}_token": str(made.backend.id_to_token(number)) for role, number in made.roles.items()},
        bos_token_id=made.roles.get("bos"),
        eos_token_id=made.roles.get("eos"),
        pad_token_id=made.roles.get("pad"),
        chat_template=made.chat_template,
    )
    return text, settings


def _of_folder(path: Path) -> tuple[str, TokenizerSettings]:
    _check_ids(path)
    made = load_with_transformers(path)
    backend = made.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    if not backend.get_vocab_size():
        raise ValueError("its vocabulary is empty")
    text = backend.to_str()
    settings = TokenizerSettings(
        fingerprint=_digest(text),
        special_tokens={role: str(token) for role, token in made.special_tokens_map.items() if isinstance(token, str)},
        bos_token_id=made.bos_token_id,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
        chat_template=made.chat_template,
        split_special_tokens=bool(made.split_special_tokens),
    )
    return text, settings


def _digest(text: str) -> str:
    """Returns a digest of what token ids mean, which ways to cut a text do not change."""
    whole = msgspec.json.decode(text)
    meaning = [whole["model"].get("vocab"), whole["added_tokens"], whole["decoder"]]
    return hashlib.sha256(msgspec.json.encode(meaning)).hexdigest()


def _check_ids(folder: Path) -> None:
    """Raises ValueError for a token id so large that the table of ids, which tokenizers makes, takes gigabytes."""
    if (file := folder / "tokenizer.json").is_file():
        vocabulary = tokenizers.Tokenizer.from_file(os.fspath(file)).get_vocab(with_added_tokens=False)
    elif (file := folder / "vocab.json").is_file():
        vocabulary = msgspec.json.decode(file.read_bytes(), type=dict[str, int])
    else:
        return
    token, largest = max(vocabulary.items(), key=operator.itemgetter(1), default=("", 0))
    if largest > _LARGEST_ID:
        raise ValueError(f"{file.name} gives token {token!r} the id {largest}, over {_LARGEST_ID}")


def _read_kept(folder: Path) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    settings = msgspec.json.decode((folder / "settings.json").read_bytes(), type=TokenizerSettings)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    try:
        return tokenizers.Tokenizer.from_str(text), settings
    except Exception as error:  # tokenizers raises a bare Exception for a file that it cannot parse
        raise ValueError(str(error)) from error


def _keep(folder: Path, text: str, settings: TokenizerSettings) -> None:
    """Writes a folder in one step. A cache that cannot be written only costs the next start its time."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            (made / "tokenizer.json").write_text(text, encoding="utf-8")
            (made / "settings.json").write_bytes(msgspec.json.encode(settings))
            os.replace(made, folder)
    except OSError:
        return
