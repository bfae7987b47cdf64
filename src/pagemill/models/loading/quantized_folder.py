"""Reads folders whose linear layers are stored in integers, as GPTQ or AWQ made them.

GPTQ is Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022), in
the form of AutoGPTQ and GPTQModel; AWQ is Lin et al., "AWQ: Activation-aware Weight Quantization" (2023), in the form
that AutoAWQ calls gemm. Of a weight [rows, columns] both store scale * (value - zero), with a scale and a zero point
for each row and group of columns:

| tensor | GPTQ | AWQ |
| --- | --- | --- |
| qweight, int32 | [columns * bits / 32, rows], columns in a word | [columns, rows / 8], eight rows in a word |
| qzeros, int32 | [groups, rows * bits / 32]; one less than the zero, modulo 2^bits, but in v2 | [groups, rows / 8] |
| scales | [groups, rows] | [groups, rows] |
| g_idx, int32 | [columns], the group of each column | none: neighbouring columns make a group |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.errors import CorruptWeightsError, UnsupportedModelError
from pagemill.models.loading.checkpoint import PLAIN_DTYPES, TensorInfo, apply_overrides
from pagemill.models.loading.float8_folder import METHODS, Float8Folder, float8_block
from pagemill.models.loading.hf_folder import HuggingFaceFolder, read_json
from pagemill.ops.quantized import BLOCK

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
"""By place in a word of AWQ's, from the lowest bits on, which of its eight rows lies there."""
_SCALES = ("F16", "BF16")
"""In these, a scale times a value is exact in float32."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Says how integers are stored. method: "gptq" or "awq". group_size: columns of a group; -1 for all.

    zero_offset: what is added to a stored zero point.
    """

    method: str
    bits: int
    group_size: int
    zero_offset: int = 0

    @property
    def name(self) -> str:
        """Returns what stands for a tensor's dtype: all that decides how its integers are read."""
        return f"{self.method}-{self.bits}-{self.group_size}-{self.zero_offset}"


class QuantizedFolder(HuggingFaceFolder):
    """Shows a quantized layer as one tensor, its weight. Raises as `HuggingFaceFolder` does."""

    def __init__(self, path: Path, overrides: Mapping[str, Any], packing: Packing) -> None:
        super().__init__(path, overrides)
        self.quantization = packing.method
        self._packing = packing
        self._parts: dict[str, dict[str, TensorInfo]] = {}
        split = [name.rpartition(".") for name in self.tensors]
        layers = dict.fromkeys(layer for layer, _, part in split if part in _PARTS)
        if not layers:
            raise CorruptWeightsError(
                f"{path / 'config.json'} says that the weights are quantized by {packing.method!r}, but none is; "
                f"remove quantization_config from it, or download the model again"
            )
        for layer in layers:
            parts = {part: self.tensors.pop(name) for part in _PARTS if (name := f"{layer}.{part}") in self.tensors}
            shape = self._check(layer, parts)
            first, nbytes = parts["qweight"], sum(part.nbytes for part in parts.values())
            self._parts[f"{layer}.weight"] = parts
            self.tensors[f"{layer}.weight"] = TensorInfo(shape, packing.name, nbytes, first.file, first.begin)

    def adds_nothing(self, name: str) -> bool:
        """Returns True for a bias of zeros beside integers: old tools gave one to every layer."""
        layer, _, part = name.rpartition(".")
        return part == "bias" and f"{layer}.weight" in self._parts and not self._plain(self.tensors[name]).any()

    def stored_bits(self, name: str) -> int | None:
        return (self.affine_bits(name) or 8) if name in self._parts else None

    def affine_bits(self, name: str) -> int | None:
        """Returns the bits of the integers, unless groups are too narrow or their columns lie apart (act-order)."""
        if name not in self._parts:
            return None
        groups = self._groups(name)
        neighbours = groups.reshape(-1, BLOCK) if len(groups) % BLOCK == 0 else None
        return self._packing.bits if neighbours is not None and (neighbours == neighbours[:, :1]).all() else None

    def read_affine(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        values, scale, low = self._read(name)
        groups = self._groups(name)[::BLOCK]
        return values, scale[:, groups].contiguous(), low[:, groups].contiguous()

    def read_into(self, name: str, out: Tensor) -> None:
        if name not in self._parts:
            return super().read_into(name, out)
        values, scale, low = self._read(name)
        groups = self._groups(name)
        out.copy_(values.float().mul_(scale[:, groups]).add_(low[:, groups]))

    def _check(self, layer: str, parts: Mapping[str, TensorInfo]) -> tuple[int, int]:
        """Returns rows and columns. Raises CorruptWeightsError unless all parts are there and have such shapes."""
        packing, in_word = self._packing, 32 // self._packing.bits
        if f"{layer}.weight" in self.tensors:
            raise CorruptWeightsError(
                f"layer {layer!r} in {self.path} is stored both in integers and as a weight; keep one of them"
            )
        if missing := [part for part in _PARTS[:3] if part not in parts]:
            raise CorruptWeightsError(f"layer {layer!r} in {self.path} has no {missing[0]}; download the model again")
        shapes = {part: info.shape for part, info in parts.items()}
        words = shapes["qweight"] if len(shapes["qweight"]) == 2 else (0, 0)
        columns, rows = (words[0] * in_word, words[1]) if packing.method == "gptq" else (words[0], words[1] * in_word)
        groups = 1 if packing.group_size == -1 else -(-columns // packing.group_size)
        expected = {"scales": (groups, rows), "qzeros": (groups, rows // in_word), "g_idx": (columns,)}
        for part, shape in expected.items():
            if not rows or not columns or rows % in_word or (part in parts and shapes[part] != shape):
                raise CorruptWeightsError(
                    f"{layer}.{part} in {self.path} has shape {list(shapes.get(part, ()))}, but with qweight of "
                    f"{list(shapes['qweight'])} and {packing.bits} bits in groups of {packing.group_size} it must be "
                    f"{list(shape)}; download the model again"
                )
        for part, info in parts.items():
            if info.dtype not in (_SCALES if part == "scales" else ("I32",)):
                raise UnsupportedModelError(
                    f"{layer}.{part} in {self.path} is stored as {info.dtype}; it must be "
                    f"{' or '.join(_SCALES) if part == 'scales' else 'I32'}",
                    param="quantization_config",
                )
            if part != "scales" and info.nbytes != 4 * math.prod(info.shape):
                raise CorruptWeightsError(
                    f"{layer}.{part} in {self.path} has shape {list(info.shape)}, but {info.nbytes} bytes; download "
                    f"the model again"
                )
        return rows, columns

    def _groups(self, name: str) -> NDArray[np.int64]:
        """Returns the group of each column. Raises CorruptWeightsError for one that there is not."""
        columns = self.tensors[name].shape[1]
        parts, size = self._parts[name], self._packing.group_size
        if "g_idx" not in parts:
            return np.arange(columns) // (columns if size == -1 else size)
        groups = self._bytes(parts["g_idx"]).view("<i4").astype(np.int64)
        if groups.min() < 0 or groups.max() >= parts["scales"].shape[0]:
            raise CorruptWeightsError(
                f"g_idx of {name!r} in {self.path} names groups {groups.min()} to {groups.max()} of "
                f"{parts['scales'].shape[0]}; download the model again"
            )
        return groups

    def _read(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Returns values uint8 [rows, columns], and scale and low, float32 [rows, groups]."""
        parts, packing = self._parts[name], self._packing
        words, zeros = (self._bytes(parts[part]).reshape(*parts[part].shape, 4) for part in ("qweight", "qzeros"))
        if packing.method == "gptq":
            values = _unpacked(words.transpose(1, 0, 2), packing.bits)
            zero = _unpacked(zeros, packing.bits)
        else:
            values, zero = (_awq_rows(_unpacked(each, packing.bits)) for each in (words, zeros))
            values = np.ascontiguousarray(values.T)
        scale = self._plain(parts["scales"])
        zero = (zero + np.uint8(packing.zero_offset)) & np.uint8(2**packing.bits - 1)
        low = -scale * torch.from_numpy(zero).float()
        return torch.from_numpy(values), scale.T.contiguous(), low.T.contiguous()

    def _plain(self, info: TensorInfo) -> Tensor:
        """Returns a tensor of plain numbers in float32."""
        stored = torch.from_numpy(self._bytes(info)).view(PLAIN_DTYPES[info.dtype])
        return stored.float().view(info.shape)

    def _bytes(self, info: TensorInfo) -> NDArray[np.uint8]:
        """Returns a tensor's bytes."""
        content = np.empty(info.nbytes, np.uint8)
        info.file.read(info.begin, content)
        return content


def open_folder(path: Path, overrides: Mapping[str, Any]) -> HuggingFaceFolder:
    """Opens a folder, whatever its weights are stored in. Raises as `HuggingFaceFolder` does."""
    stored = apply_overrides(read_json(path / "config.json"), overrides).get("quantization_config")
    if not stored:
        return HuggingFaceFolder(path, overrides)
    config = path / "config.json"
    if isinstance(stored, dict) and stored.get("quant_method") in METHODS:
        return Float8Folder(path, overrides, float8_block(config, stored))
    return QuantizedFolder(path, overrides, _packing(config, stored))


def _packing(path: Path, stored: Any) -> Packing:
    """Returns what config.json says of the integers. Raises UnsupportedModelError for what is not read here."""
    stored = stored if isinstance(stored, dict) else {}
    method, bits, group_size = (stored.get(name) for name in ("quant_method", "bits", "group_size"))
    form = stored.get("version") or "gemm" if method == "awq" else stored.get("checkpoint_format") or "gptq"
    form = str(form).lower()
    supported = {"gptq": ((4, 8), ("gptq", "gptq_v2")), "awq": ((4,), ("gemm",))}
    widths, forms = supported.get(str(method), ((), ()))
    sound = isinstance(group_size, int) and (group_size == -1 or group_size > 0)
    unlike = [name for name in ("dynamic", "is_marlin_format") if stored.get(name)]
    unlike += ["zero_point"] if stored.get("zero_point") is False else []
    if bits not in widths or form not in forms or not sound or unlike:
        raise UnsupportedModelError(
            f"{path} says that the weights are quantized by {method!r} in {bits} bits, groups of {group_size}, form "
            f"{form!r}{''.join(f', {name} {stored[name]}' for name in unlike)}; supported are gptq (4 or 8 bits, gptq "
            f"or gptq_v2, all layers alike), awq (4 bits, gemm, with zero points), fp8 and compressed-tensors (fp8 "
            f"weights); use one of these, the original weights, or a GGUF file",
            param="quantization_config",
        )
    return Packing(str(method), bits, group_size, zero_offset=int(method == "gptq" and form == "gptq"))


def _unpacked(words: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Returns the numbers of words, the lowest bits first, [rows, numbers]. words: [rows, words, 4]."""
    if bits == 8:
        return np.ascontiguousarray(words).reshape(len(words), -1)
    numbers = np.empty((*words.shape, 2), dtype=np.uint8)
    np.bitwise_and(words, 15, out=numbers[..., 0])
    np.right_shift(words, 4, out=numbers[..., 1])
    return numbers.reshape(len(words), -1)


def _awq_rows(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns numbers [groups or columns, rows] of AWQ's words in the order of rows."""
    ordered: NDArray[np.uint8] = numbers.reshape(len(numbers), -1, 8)[..., np.argsort(_AWQ_ROWS)]
    return ordered.reshape(numbers.shape)
