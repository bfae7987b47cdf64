"""Reads folders whose linear layers are stored in fp8 (e4m3) with scales: a weight is value * scale.

Two tools' forms, whose scales have a number for all, for each row, or for each block of rows and columns:

| `quant_method` | scales | settings |
| --- | --- | --- |
| fp8 (transformers, vLLM, DeepSeek) | weight_scale_inv, or weight_scale | weight_block_size |
| compressed-tensors, format float-quantized (LLM Compressor) | weight_scale | strategy tensor, channel or block |

fp8 is Micikevicius et al., "FP8 Formats for Deep Learning" (2022). What such folders say of activations (input_scale,
dynamic or static) is how others round these; here they stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagemill.errors import CorruptWeightsError, UnsupportedModelError
from pagemill.models.loading.checkpoint import PLAIN_DTYPES, TensorInfo
from pagemill.models.loading.hf_folder import HuggingFaceFolder
from pagemill.models.loading.pieces import PIECE_BYTES, each_piece
from pagemill.ops.quantized import Float8Weight

METHODS = ("fp8", "compressed-tensors")
_STORED = "F8_E4M3"
_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALE = ".input_scale"
_NAN = 127


class Float8Folder(HuggingFaceFolder):
    """Shows a layer in fp8 and its scales as one tensor, its weight. Raises as `HuggingFaceFolder` does.

    block: rows and columns of a block with a scale; None where all or each row have one.
    """

    quantization = "fp8"

    def __init__(self, path: Path, overrides: Mapping[str, Any], block: tuple[int, int] | None) -> None:
        super().__init__(path, overrides)
        self._scales: dict[str, TensorInfo] = {}
        self._block = block
        for name, info in [*self.tensors.items()]:
            if info.dtype == _STORED and name.endswith(".weight"):
                self._scales[name] = self._take_scale(name, info)
                self.tensors[name] = replace(info, dtype=f"fp8 in {block}")
        if not self._scales:
            raise CorruptWeightsError(
                f"{path / 'config.json'} says that the weights are in fp8, but none is; remove quantization_config "
                f"from it, or download the model again"
            )

    def adds_nothing(self, name: str) -> bool:
        """Returns True for the scale of a layer's activations, which are not rounded here."""
        layer = name.removesuffix(_INPUT_SCALE)
        return layer != name and f"{layer}.weight" in self._scales

    def stores_float8(self, name: str) -> bool:
        return name in self._scales

    def read_float8(self, name: str) -> Float8Weight:
        info = self.tensors[name]
        values = torch.empty(info.shape, dtype=torch.uint8, device="cpu")
        flat = values.view(-1)

        def read(begin: int, end: int) -> None:
            piece = flat[begin:end].numpy()
            info.file.read(info.begin + begin, piece)
            if (piece & 127 == _NAN).any():
                raise CorruptWeightsError(f"tensor {name!r} in {self.path} is not finite; download it again")

        each_piece(flat.numel(), PIECE_BYTES, read)
        scale, group = self._expanded(name)
        return Float8Weight(values.view(torch.float8_e4m3fn), scale, group)

    def read_into(self, name: str, out: Tensor) -> None:
        if name not in self._scales:
            return super().read_into(name, out)
        weight = self.read_float8(name)
        rows, columns = weight.values.shape

        def widen(begin: int, end: int) -> None:
            piece = Float8Weight(weight.values[begin:end], weight.scale[begin:end], weight.group)
            out[begin:end].copy_(piece.dense())

        each_piece(rows, max(1, PIECE_BYTES // 4 // columns), widen)

    def _take_scale(self, name: str, info: TensorInfo) -> TensorInfo:
        """Returns where a weight's scales lie, and takes them from the tensors. Raises CorruptWeightsError unless they
        are there and have a shape that fits."""
        names = [f"{name.removesuffix('weight')}{scale}" for scale in _SCALES]
        found = [self.tensors.pop(each) for each in names if each in self.tensors]
        if len(info.shape) != 2 or info.nbytes != math.prod(info.shape):
            raise CorruptWeightsError(
                f"tensor {name!r} in {self.path} has shape {list(info.shape)}, but {info.nbytes} bytes of fp8; "
                f"download the model again"
            )
        if len(found) != 1:
            raise CorruptWeightsError(
                f"tensor {name!r} in {self.path} is in fp8 with {len(found)} of {' and '.join(names)}; it must have "
                f"one of them: download the model again"
            )
        (scale,), (rows, columns) = found, info.shape
        if self._block is None:
            fitting = [(), (1,), (1, 1), (rows,), (rows, 1)]
        else:
            fitting = [(-(-rows // self._block[0]), -(-columns // self._block[1]))]
        if scale.dtype not in PLAIN_DTYPES or scale.shape not in fitting:
            raise CorruptWeightsError(
                f"the scale of {name!r} in {self.path} is {scale.dtype} of shape {list(scale.shape)}; with a weight of "
                f"{[rows, columns]} it must be of {', '.join(PLAIN_DTYPES)} and of shape "
                f"{' or '.join(str(list(shape)) for shape in fitting)}: download the model again"
            )
        return scale

    def _expanded(self, name: str) -> tuple[Tensor, int]:
        """Returns a weight's scales, float32 [rows, groups], and the columns of a group."""
        info, (rows, columns) = self._scales[name], self.tensors[name].shape
        stored = np.empty(info.nbytes, np.uint8)
        info.file.read(info.begin, stored)
        scale = torch.from_numpy(stored).view(PLAIN_DTYPES[info.dtype]).float()
        if not scale.isfinite().all():
            raise CorruptWeightsError(f"the scale of {name!r} in {self.path} is not finite; download it again")
        if self._block is None:
            return scale.view(-1, 1).expand(rows, 1).contiguous(), columns
        scale = scale.view(info.shape).repeat_interleave(self._block[0], dim=0)[:rows]
        return scale.contiguous(), self._block[1]


def float8_block(path: Path, stored: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the rows and columns of a block with a scale, as config.json says; None: all or each row have one.

    Raises UnsupportedModelError for what is not fp8, or not read here, by its name.
    """
    if stored["quant_method"] == "fp8":
        unlike = {"fmt": stored["fmt"]} if stored.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn") else {}
        block = stored.get("weight_block_size")
    else:
        unlike, block = _unlike(stored)
    sound = block is None or (
        isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
    )
    if not sound or (block is not None and block[1] % 64):
        unlike["block"] = block
    if unlike:
        raise UnsupportedModelError(
            f"{path} says that the weights are quantized by {stored['quant_method']!r} with "
            f"{', '.join(f'{name} {value!r}' for name, value in unlike.items())}; supported are fp8 (e4m3) weights "
            f"with a scale for all, for each row, or for blocks of a multiple of 64 columns, as fp8 and "
            f"compressed-tensors (float-quantized) store them; use one of these, the original weights, or a GGUF file",
            param="quantization_config",
        )
    return None if block is None else (block[0], block[1])


def _unlike(stored: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns the settings of compressed-tensors that are not read here, by name, and the block."""
    groups = stored.get("config_groups")
    groups = groups if isinstance(groups, dict) else {}
    unlike: dict[str, Any] = {}
    if stored.get("kv_cache_scheme"):
        unlike["kv_cache_scheme"] = stored["kv_cache_scheme"]
    if not groups:
        unlike["config_groups"] = stored.get("config_groups")
    blocks = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        form = (group.get("format") if isinstance(group, dict) else None) or stored.get("format")
        strategy = weights.get("strategy")
        expected = {"type": "float", "num_bits": 8, "symmetric": True}
        unlike |= {name: weights.get(name) for name, value in expected.items() if weights.get(name) != value}
        if form != "float-quantized":
            unlike["format"] = form
        if strategy not in ("tensor", "channel", "block"):
            unlike["strategy"] = strategy
        blocks.append(weights.get("block_structure") if strategy == "block" else None)
    if any(block != blocks[0] for block in blocks):
        unlike["block_structure"] = blocks
    return unlike, blocks[0] if blocks else None
