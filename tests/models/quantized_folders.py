"""Writes folders as GPTQ and AWQ tools do: every linear layer of a model, rounded to groups, as 32-bit words."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from small_llama import edit_config
from torch import Tensor

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words_of(numbers: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Returns int32 [rows, n * bits / 32]: 32 / bits neighbours of a row in a word, the one that `order` names first in
    the lowest bits."""
    each = 32 // bits
    words = torch.zeros(len(numbers), numbers.shape[1] // each, dtype=torch.int64)
    for place, number in enumerate(order or range(each)):
        words |= numbers[:, number::each].long() << bits * place
    return (words - (words >> 31 << 32)).to(torch.int32)


def quantize_folder(
    folder: Path, method: str, bits: int = 4, group_size: int = 32, form: str | None = None, act_order: bool = False
) -> dict[str, Tensor]:
    """Stores the folder's linear layers in integers. Returns the weights that these stand for, by name."""
    torch.manual_seed(1)
    stored, dense = load_file(folder / "model.safetensors"), {}
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        layer, weight = name.removesuffix(".weight"), stored.pop(name)
        rows, columns = weight.shape
        weight[::5] = weight[::5].abs()  # their zero point is 0
        groups = torch.arange(columns) // (columns if group_size == -1 else group_size)
        if act_order:
            groups = groups[torch.randperm(columns)]
        count, most = int(groups.max()) + 1, 2**bits - 1
        scales, zeros = torch.empty(rows, count), torch.empty(rows, count)
        for group in range(count):
            part = weight[:, groups == group]
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=1e-3)
            scales[:, group] = ((high - low) / most).half().float()
            zeros[:, group] = (-low / scales[:, group]).round().clamp(0, most)
        values = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, most)
        dense[name] = scales[:, groups] * (values - zeros[:, groups])
        stored[f"{layer}.scales"] = scales.T.half().contiguous()
        if method == "gptq":
            stored[f"{layer}.qweight"] = words_of(values, bits).T.contiguous()
            stored[f"{layer}.qzeros"] = words_of((zeros.T - int(form != "gptq_v2")) % 2**bits, bits)
            stored[f"{layer}.g_idx"] = groups.to(torch.int32)
        else:
            stored[f"{layer}.qweight"] = words_of(values.T, bits, AWQ_ORDER)
            stored[f"{layer}.qzeros"] = words_of(zeros.T, bits, AWQ_ORDER)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    described = {"quant_method": method, "bits": bits, "group_size": group_size}
    described |= {"checkpoint_format" if method == "gptq" else "version": form} if form else {}
    edit_config(folder, quantization_config=described)
    return dense
