"""Writes folders in fp8 as the tools do: linear layers of a model as e4m3 numbers with scales."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from small_llama import edit_config
from torch import Tensor

STRATEGIES = ("tensor", "channel", "block")
BLOCK = (32, 64)


def described(method: str, strategy: str) -> dict[str, object]:
    """Returns the quantization_config of a folder."""
    if method == "fp8":
        block = {"weight_block_size": [*BLOCK]} if strategy == "block" else {}
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **block}
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    weights |= {"block_structure": [*BLOCK]} if strategy == "block" else {}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": method, "format": "float-quantized", "config_groups": groups, "ignore": ["lm_head"]}


def quantize_folder(folder: Path, method: str, strategy: str) -> dict[str, Tensor]:
    """Stores the folder's linear layers in fp8. Returns the weights that these stand for, by name."""
    stored, dense = load_file(folder / "model.safetensors"), {}
    for name in [name for name in stored if name.endswith(("_proj.weight", "_with_mqa.weight"))]:
        weight = stored[name]
        sizes = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": BLOCK}[strategy]
        counts = [-(-size // block) for size, block in zip(weight.shape, sizes, strict=True)]
        scale = torch.empty(counts)
        for row in range(counts[0]):
            for column in range(counts[1]):
                block = weight[row * sizes[0] :, column * sizes[1] :][: sizes[0], : sizes[1]]
                scale[row, column] = block.abs().max() / 448
        wide = scale.repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)[: len(weight), : weight.shape[1]]
        values = (weight / wide).to(torch.float8_e4m3fn)
        dense[name] = values.float() * wide
        layer = name.removesuffix(".weight")
        stored[name] = values
        stored[f"{layer}.weight_scale" + "_inv" * (method == "fp8")] = scale[0, 0] if strategy == "tensor" else scale
        stored[f"{layer}.input_scale"] = torch.tensor(0.5)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=described(method, strategy))
    return dense
