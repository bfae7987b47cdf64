"""Reads checkpoints in Hugging Face's form: a folder with config.json and safetensors files, one or several.

The safetensors header is read here: the `safetensors` library does not say where a tensor lies, so pages could not be
given back as they are read (measured on a 403 MB file: at most 76 MB of memory this way, 452 MB with `safe_open`).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pagemill.errors import CorruptWeightsError, ModelConfigError, ModelLoadError, ModelNotFoundError
from pagemill.models.families import find_family
from pagemill.models.loading.checkpoint import (
    PLAIN_DTYPES,
    Checkpoint,
    MappedFile,
    TensorInfo,
    apply_overrides,
    check_overrides,
)
from pagemill.models.loading.normal_config import complete

_OTHER_DTYPES = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F64", "C64"}
_OTHER_FLOATS = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"}
_BASE, _EMBEDDING, _HEAD = "model.", "embed_tokens.weight", "lm_head.weight"
"""Names of a model with a head begin with the first, but for the head's; those of a base model saved by itself, as many
embedding models are, do not."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class HuggingFaceFolder(Checkpoint):
    """Opens headers and configuration; weights are read later. Raises a ModelLoadError that names the file at fault."""

    def __init__(self, path: Path, overrides: Mapping[str, Any]) -> None:
        self.path = path
        self.config = read_folder_config(path, overrides)
        self.eos_token_ids = _eos_token_ids(path, self.config)
        self.tensors: dict[str, TensorInfo] = {}
        self.files = [self._open(file) for file in self._weight_files()]
        if self._declared and (missing := sorted(set(self._declared) - set(self.tensors))):
            raise CorruptWeightsError(
                f"{path / _INDEX} lists {len(missing)} tensors that no file holds, first {missing[0]!r} in "
                f"{self._declared[missing[0]]}; download the model again"
            )
        if _EMBEDDING in self.tensors and not any(name.startswith(_BASE) for name in self.tensors):
            self.is_headless = _HEAD not in self.tensors
            self.tensors = {name if name == _HEAD else _BASE + name: info for name, info in self.tensors.items()}

    def _weight_files(self) -> list[Path]:
        self._declared: dict[str, str] = {}
        index = self.path / _INDEX
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise CorruptWeightsError(f"{index} has no weight_map from tensors to files; download it again")
            self._declared = weight_map
            files = [self.path / name for name in sorted(set(weight_map.values()))]
            if lost := [file.name for file in files if not file.is_file()]:
                raise CorruptWeightsError(
                    f"{index} names {len(lost)} files that are not there, first {lost[0]}; download the model again"
                )
            return files
        if (self.path / _SINGLE).is_file():
            return [self.path / _SINGLE]
        raise ModelNotFoundError(
            f"{self.path} holds no weights: neither {_SINGLE} nor {_INDEX} is there; other formats (pytorch_model.bin) "
            f"are not read, convert them to safetensors"
        )

    def _open(self, path: Path) -> MappedFile:
        file = MappedFile(path)
        for name, info in read_safetensors_header(file).items():
            if name in self.tensors:
                raise CorruptWeightsError(
                    f"tensor {name!r} is in {path.name} and in {self.tensors[name].file.path.name}; keep one of the "
                    f"files"
                )
            self.tensors[name] = info
        return file


def read_safetensors_header(file: MappedFile) -> dict[str, TensorInfo]:
    """Returns the tensors of a safetensors file by name.

    Raises CorruptWeightsError unless shapes, dtypes and byte ranges agree and the tensors cover the file without gaps,
    as the format demands.
    """

    def corrupt(what: str) -> CorruptWeightsError:
        return CorruptWeightsError(f"{file.path} is truncated or corrupt: {what}; download it again")

    if file.size < 8:
        raise corrupt(f"it has {file.size} bytes, fewer than the 8 that hold the header's length")
    length = int.from_bytes(file.view(0, 8).tobytes(), "little")
    if length > file.size - 8:
        raise corrupt(f"its header should have {length} bytes, but only {file.size - 8} follow")
    try:
        header = json.loads(file.view(8, 8 + length).tobytes().decode())
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ranges: list[tuple[int, int, str, str, tuple[int, ...]]] = []
        for name, entry in entries.items():
            begin, end = map(_size, entry["data_offsets"])
            if begin > end:
                raise ValueError(f"tensor {name!r} ends at {end}, before it begins at {begin}")
            ranges.append((begin, end, name, str(entry["dtype"]), tuple(map(_size, entry["shape"]))))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise corrupt(f"its header cannot be read ({error})") from error
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    for begin, end, name, dtype, shape in sorted(ranges):
        if begin != expected:
            raise corrupt(f"tensor {name!r} begins at byte {begin} of the data instead of {expected}")
        if dtype in PLAIN_DTYPES:
            if math.prod(shape) * PLAIN_DTYPES[dtype].itemsize != end - begin:
                raise corrupt(f"tensor {name!r} has shape {list(shape)} of {dtype} but {end - begin} bytes")
        elif dtype not in _OTHER_DTYPES | _OTHER_FLOATS:
            raise corrupt(f"tensor {name!r} has the unknown dtype {dtype!r}")
        expected = end
        tensors[name] = TensorInfo(shape, dtype, end - begin, file, 8 + length + begin)
    if 8 + length + expected != file.size:
        raise corrupt(f"it has {file.size} bytes, but its header describes {8 + length + expected}")
    return tensors


def _size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


def read_folder_config(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a folder's configuration, normalised, with `overrides` on top. Raises ModelNotFoundError,
    ModelConfigError, UnsupportedModelError, or UnknownArgumentError for an override of nothing."""
    raw = read_json(path / "config.json")
    config = _normalise(apply_overrides(raw, overrides), path / "config.json")
    if overrides:
        check_overrides(overrides, {**raw, **_normalise({"model_type": config["model_type"]}, path)})
    return config


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"there is no {path.name} in {path.parent}; give a folder that a model was saved to, or a .gguf file"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}; download it again") from error
    if not isinstance(content, dict):
        raise ModelConfigError(f"{path} holds a {type(content).__name__} instead of a table; download it again")
    return content


def _normalise(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns config.json as transformers completes it. Raises as `complete` and `find_family` do."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ModelConfigError(
            f"{path} has no model_type (it is {model_type!r}); download it again", param="model_type"
        )
    architectures = raw.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise ModelConfigError(
            f"{path} has architectures = {architectures!r}; it must be a list of names", param="architectures"
        )
    find_family(model_type, architectures)
    return complete(model_type, raw, path)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of generation_config.json, then of config.json and the tokenizer, each once."""
    found: list[int] = []
    with contextlib.suppress(ModelNotFoundError):
        found += _ids(read_json(path / "generation_config.json").get("eos_token_id"))
    return tuple(dict.fromkeys([*found, *_ids(config.get("eos_token_id")), *_tokenizers_end(path)]))


def _tokenizers_end(path: Path) -> list[int]:
    """Returns the id of the tokenizer's end of sequence, which fine-tuned models often set there alone; none where
    neither file tells it. Files that cannot be read are left to those that need them."""
    try:
        token = read_json(path / "tokenizer_config.json").get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        added = msgspec.json.decode((path / "tokenizer.json").read_bytes(), type=_AddedTokens).added_tokens
    except (ModelLoadError, OSError, msgspec.DecodeError):
        return []
    return [each.id for each in added if each.content == text]


def _ids(value: Any) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise ModelConfigError(
                f"eos_token_id is {token_id!r}; it must be a token id, a list of them, or absent", param="eos_token_id"
            )
    return ids
