"""Loads LoRA adapters in PEFT's form: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagemill.errors import AdapterError
from pagemill.models.adapter import Adapter, AdapterLayer
from pagemill.models.loading.checkpoint import PLAIN_DTYPES, Checkpoint, MappedFile
from pagemill.models.loading.hf_folder import read_safetensors_header
from pagemill.models.names import WeightNames
from pagemill.models.spec import DecoderSpec
from pagemill.ops.interface import LowRank, Ops
from pagemill.ops.low_rank import LowRankPart

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LARGEST_CONFIG = 1 << 20
_WITHOUT_EFFECT = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
"""Settings that say nothing of the answers, or that are read here."""
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""How training may have begun: other ways change the base model's weights too."""
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class _Projection(NamedTuple):
    """A module that adapters may add to: its decoder layer, the joined projection and the outputs there, its inputs."""

    layer: int
    place: str
    begin: int
    outputs: int
    inputs: int


class AdapterLoader:
    """Loads adapters for one model. `names` are those of its family in Hugging Face's form."""

    def __init__(
        self, spec: DecoderSpec, names: WeightNames, ops: Ops, dtype: torch.dtype, device: torch.device, max_rank: int
    ) -> None:
        self._spec, self._ops, self._dtype, self._device = spec, ops, dtype, device
        self._max_rank = max_rank
        self._projections = _projections(spec, names)

    def load(self, path: str | Path, free_bytes: int) -> Adapter:
        """Returns an adapter, packed for the device, in what memory is free there. Raises `ModelLoadError` children."""
        folder = Path(os.path.expanduser(path))
        if self._spec.latent is not None:
            raise AdapterError(
                f"the adapter in {folder} is for a model with latent attention ({self._spec.family}), for which "
                f"adapters are not served; merge it into the model"
            )
        config = _read_config(folder)
        rank, scale = _scaling(folder, config, self._max_rank)
        file = _AdapterFile(folder)
        needed = 2 * file.files[0].size
        if needed > free_bytes:
            raise AdapterError(
                f"the adapter in {folder} needs {needed >> 20} MiB to be loaded, and {free_bytes >> 20} MiB are free; "
                f"lower kv_memory, or name it in lora_modules, which are loaded before the KV pool is made"
            )
        pairs = self._pairs(file, config)
        dtype = self._held(file)
        parts: dict[tuple[int, str], list[LowRankPart]] = {}
        for module, pair in pairs.items():
            at = self._projections[module]
            a, b = (self._read(file, name, dtype) for name in pair)
            if a.shape != (rank, at.inputs) or b.shape != (at.outputs, rank):
                raise AdapterError(
                    f"{folder} has {list(a.shape)} and {list(b.shape)} for {module}, but rank {rank} and this model "
                    f"ask for {[rank, at.inputs]} and {[at.outputs, rank]}; "
                    f"it was made for {config.get('base_model_name_or_path') or 'another model'}"
                )
            parts.setdefault((at.layer, at.place), []).append(LowRankPart(a, b, at.begin, scale))
        layers = tuple(
            AdapterLayer(*(self._pack(parts.get((index, place)), place) for place in ("qkv", "o", "gate_up", "down")))
            for index in range(len(self._spec.layers))
        )
        return Adapter(layers, _digest(file, rank, scale))

    def _pairs(self, file: _AdapterFile, config: dict[str, Any]) -> dict[str, tuple[str, str]]:
        """Returns the names of each module's two tensors, A first."""
        found: dict[str, dict[str, str]] = {}
        for name in file.tensors:
            match = _TENSOR.fullmatch(name)
            if match is None or match["module"] not in self._projections:
                targets = sorted({module.rpartition(".")[2] for module in self._projections})
                raise AdapterError(
                    f"{file.path} has the tensor {name!r}; adapters of this model, which has {len(self._spec.layers)} "
                    f"layers, may only add to {', '.join(targets)} in these; it was made for "
                    f"{config.get('base_model_name_or_path') or 'another model'}"
                )
            found.setdefault(match["module"], {})[match["side"]] = name
        if not found:
            raise AdapterError(f"{file.path} holds no tensors; save the adapter again")
        for module, sides in found.items():
            if len(sides) < 2:
                raise AdapterError(
                    f"{file.path} has only {next(iter(sides.values()))!r} of {module}'s two tensors; save the adapter "
                    f"again"
                )
        return {module: (sides["A"], sides["B"]) for module, sides in found.items()}

    def _held(self, file: _AdapterFile) -> torch.dtype:
        """Returns the dtype in which an adapter is held: in a float32 model the stored one, where that is one."""
        stored = {PLAIN_DTYPES.get(info.dtype) for info in file.tensors.values()}
        one = stored.pop() if len(stored) == 1 else None
        return one if one is not None and self._dtype == torch.float32 and self._ops.widens_weights else self._dtype

    def _read(self, file: _AdapterFile, name: str, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(file.tensors[name].shape, dtype=dtype, device="cpu")
        file.read_into(name, tensor)
        if tensor.dim() != 2 or not tensor.isfinite().all():
            raise AdapterError(
                f"tensor {name!r} in {file.path} must be a finite matrix in {str(dtype).removeprefix('torch.')}; save "
                f"the adapter again"
            )
        return tensor.to(self._device)

    def _pack(self, parts: Sequence[LowRankPart] | None, place: str) -> LowRank | None:
        if parts is None:
            return None
        spec = self._spec
        queries = spec.num_heads * spec.head_dim
        inputs, outputs = {
            "qkv": (spec.hidden_size, queries + 2 * spec.num_kv_heads * spec.head_dim),
            "o": (queries, spec.hidden_size),
            "gate_up": (spec.hidden_size, 2 * spec.intermediate_size),
            "down": (spec.intermediate_size, spec.hidden_size),
        }[place]
        return self._ops.pack_low_rank(parts, inputs, outputs)


class _AdapterFile(Checkpoint):
    """The tensors of an adapter."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / WEIGHTS
        if not self.path.is_file():
            raise AdapterError(f"there is no {WEIGHTS} in {folder}; save the adapter with safe_serialization=True")
        self.files = [MappedFile(self.path)]
        self.tensors = read_safetensors_header(self.files[0])


def _projections(spec: DecoderSpec, names: WeightNames) -> dict[str, _Projection]:
    """Returns what adapters may add to, by the module's name."""
    if spec.latent is not None:
        return {}
    hidden, queries, keys = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    found: dict[str, _Projection] = {}
    for index, layer in enumerate(spec.layers):
        joined = [("qkv", names.qkv, (queries, keys, keys), hidden), ("o", (names.o,), (hidden,), queries)]
        if not layer.moe:
            size = spec.intermediate_size
            joined += [("gate_up", names.gate_up, (size, size), hidden), ("down", (names.down,), (hidden,), size)]
        for place, modules, outputs, inputs in joined:
            sizes, begin = outputs if len(modules) > 1 else (sum(outputs),), 0
            for module, size in zip(modules, sizes, strict=True):
                name = names.layer.format(layer=index) + module
                found[name] = _Projection(index, place, begin, size, inputs)
                begin += size
    return found


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_CONFIG + 1)
        if len(text) > LARGEST_CONFIG:
            raise ValueError(f"it has more than {LARGEST_CONFIG} bytes")
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__} instead of a table")
    except FileNotFoundError:
        raise AdapterError(
            f"there is no {CONFIG} in {folder}; give a folder that PEFT has saved an adapter to"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}; save the adapter again") from error
    return config


def _scaling(folder: Path, config: dict[str, Any], max_rank: int) -> tuple[int, float]:
    """Returns an adapter's rank and the scale of its products. Raises AdapterError for what is not served."""
    kind, rank, alpha = (config.get(key) for key in ("peft_type", "r", "lora_alpha"))

    def refused(what: str) -> AdapterError:
        return AdapterError(f"the adapter in {folder} {what}")

    if kind != "LORA":
        raise refused(f"has peft_type {kind!r}; only LORA is served")
    if config.get("use_dora"):
        raise refused("uses DoRA, which is not served; train it with use_dora=False, or merge it into the model")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise refused("changes biases, which is not served; train it with bias='none' and lora_bias=False")
    if config.get("modules_to_save") or config.get("trainable_token_indices"):
        raise refused(
            "replaces whole modules or embeddings (modules_to_save, trainable_token_indices), which is not served; "
            "merge it into the model"
        )
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise refused("has ranks of its own for some modules (rank_pattern, alpha_pattern), which is not served")
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise refused(
            f"began from init_lora_weights={start!r}, which changes the base model too; convert it to plain LoRA "
            f"(path_initial_model_for_weight_conversion in PEFT), and set init_lora_weights to true"
        )
    for key, value in config.items():
        if value and key not in _WITHOUT_EFFECT and key not in ("bias", "init_lora_weights"):
            raise refused(f"has {key} = {value!r}, which is not served; train it without, or merge it into the model")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise refused(f"has r = {rank!r}; it must be an integer of at least 1")
    if rank > max_rank:
        raise refused(f"has rank {rank}, over max_lora_rank ({max_rank}); raise max_lora_rank")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise refused(f"has lora_alpha = {alpha!r}; it must be a number")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _digest(file: _AdapterFile, rank: int, scale: float) -> bytes:
    """Returns the SHA-256 of all that decides what an adapter adds: its scaling, and its file, byte by byte."""
    (mapped,) = file.files
    digest = hashlib.sha256(b"pagemill adapter 1\n")
    digest.update(json.dumps([rank, scale]).encode())
    digest.update(mapped.view(0, mapped.size).data)
    mapped.forget(mapped.size)
    return digest.digest()
