"""Loads Medusa heads: a folder with config.json and weights, under vLLM's names or those of Medusa's own training."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pagemill.errors import CorruptWeightsError, ModelNotFoundError, UnsupportedModelError
from pagemill.models.loading.checkpoint import Checkpoint, MappedFile
from pagemill.models.loading.hf_folder import read_json, read_safetensors_header
from pagemill.models.medusa import MedusaHead, MedusaHeads
from pagemill.models.spec import DecoderSpec
from pagemill.ops.interface import Linear, Ops
from pagemill.ops.quantized import quantize_int8

FILES = ("model.safetensors", "medusa_lm_head.safetensors")
TOKEN_MAP = "token_map"
_VLLM = re.compile(r"blocks\.(?P<head>\d+)\.layers\.(?P<block>\d+)\.(?P<kind>weight|bias)")
_VLLM_LAST = re.compile(r"lm_heads\.(?P<head>\d+)\.(?P<kind>weight)")
_MEDUSA = re.compile(r"(?P<head>\d+)\.(?P<block>\d+)\.linear\.(?P<kind>weight|bias)")
_MEDUSA_LAST = re.compile(r"(?P<head>\d+)\.(?P<block>\d+)\.(?P<kind>weight)")


class _Place(NamedTuple):
    """A tensor's head, its residual block there, or -1 for the layer to tokens, and "weight" or "bias"."""

    head: int
    block: int
    kind: str


class _Weights(Checkpoint):
    """The tensors of Medusa heads, by place."""

    def __init__(self, folder: Path) -> None:
        self.config = read_json(folder / "config.json")
        paths = [folder / name for name in FILES if (folder / name).is_file()]
        if not paths:
            raise ModelNotFoundError(
                f"{folder} holds no weights of Medusa heads: neither {' nor '.join(FILES)} is there; other formats "
                f"(medusa_lm_head.pt) are not read, convert them to safetensors"
            )
        self.path = paths[0]
        self.files = [MappedFile(self.path)]
        self.tensors = read_safetensors_header(self.files[0])
        self.places: dict[_Place, str] = {}
        for name in self.tensors:
            if name != TOKEN_MAP:
                self.places[self._place(name)] = name

    def _place(self, name: str) -> _Place:
        bare = name.removeprefix("medusa_heads.")
        if match := _VLLM.fullmatch(bare) or _MEDUSA.fullmatch(bare):
            return _Place(int(match["head"]), int(match["block"]), match["kind"])
        if match := _VLLM_LAST.fullmatch(bare) or _MEDUSA_LAST.fullmatch(bare):
            return _Place(int(match["head"]), -1, match["kind"])
        raise UnsupportedModelError(
            f"{self.path} has the tensor {name!r}, which Medusa heads do not have; name a folder of Medusa heads, or "
            f"use method 'draft_model' for a model"
        )

    def token_map(self) -> Tensor | None:
        """Returns the tokens that the heads' outputs stand for, int64; None: all tokens, in order."""
        info = self.tensors.get(TOKEN_MAP)
        if info is None:
            return None
        if info.dtype != "I64" or len(info.shape) != 1:
            raise CorruptWeightsError(f"{TOKEN_MAP} in {self.path} must be a list of int64; save the heads again")
        return torch.from_numpy(info.file.view(info.begin, info.begin + info.nbytes).copy()).view(torch.int64)


def load_medusa(
    path: str | Path, spec: DecoderSpec, ops: Ops, dtype: torch.dtype, device: torch.device, quantization: str | None
) -> MedusaHeads:
    """Loads heads for a model of this description.

    dtype: the model's. quantization: "int8" rounds all layers to 8 bits, as the model's; else they are held in `dtype`.
    Raises `ModelLoadError` children.
    """
    weights = _Weights(Path(os.path.expanduser(path)))
    count = 1 + max((place.head for place in weights.places), default=-1)
    if not count:
        raise CorruptWeightsError(f"{weights.path} holds no heads; save them again")

    def read(place: _Place, shape: tuple[int, ...], held: torch.dtype) -> Tensor:
        name = weights.places.pop(place, None)
        if name is None:
            layer = "the layer to tokens" if place.block < 0 else f"block {place.block}"
            raise CorruptWeightsError(f"{weights.path} has no weight of {layer} of head {place.head}; save it again")
        if weights.tensors[name].shape != shape:
            raise CorruptWeightsError(
                f"tensor {name!r} in {weights.path} is {list(weights.tensors[name].shape)}, but this model asks for "
                f"{list(shape)}; the heads were made for another model"
            )
        tensor = torch.empty(shape, dtype=held, device="cpu")
        weights.read_into(name, tensor)
        if not tensor.isfinite().all():
            raise CorruptWeightsError(f"tensor {name!r} in {weights.path} is not finite; download it again")
        return tensor

    def linear(head: int, block: int, outputs: int) -> Linear:
        bias = None
        if (place := _Place(head, block, "bias")) in weights.places:
            bias = read(place, (outputs,), torch.float32).to(device)
        place, shape = _Place(head, block, "weight"), (outputs, spec.hidden_size)
        if quantization == "int8":
            return ops.pack_quantized(quantize_int8(read(place, shape, torch.float32).to(device)), bias, dtype)
        return ops.pack_linear(read(place, shape, dtype).to(device), bias, dtype)

    tokens = weights.token_map()
    if tokens is not None and (len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= spec.vocab_size):
        raise CorruptWeightsError(
            f"{TOKEN_MAP} in {weights.path} must name some of the model's {spec.vocab_size} tokens; the heads were "
            f"made for another model"
        )
    outputs = spec.vocab_size if tokens is None else len(tokens)
    shared = bool(weights.config.get("original_lm_head"))
    heads: list[MedusaHead] = []
    for head in range(count):
        depth = 1 + max((place.block for place in weights.places if place.head == head), default=-1)
        blocks = tuple(linear(head, block, spec.hidden_size) for block in range(depth))
        heads.append(MedusaHead(blocks, heads[0].lm_head if shared and head else linear(head, -1, outputs)))
    if weights.places:
        raise UnsupportedModelError(
            f"{weights.path} has tensors that no head uses, first {next(iter(weights.places.values()))!r}"
        )
    return MedusaHeads(tuple(heads), spec.vocab_size, None if tokens is None else tokens.to(device))
