"""Loads a model from a path: `load_model` returns a decoder that is ready to run."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagemill.attention.interface import AttentionBackend
from pagemill.errors import ConfigError, ModelNotFoundError
from pagemill.machine import cpu_features
from pagemill.models.decoder import Decoder, DecoderMaker, DecoderWeights
from pagemill.models.families import ModelConfig, find_family
from pagemill.models.loading.assemble import Assembler
from pagemill.models.loading.checkpoint import Checkpoint
from pagemill.models.loading.fingerprint import fingerprint
from pagemill.models.loading.gguf_model import GGUFModel
from pagemill.models.loading.head import find_head
from pagemill.models.loading.hf_folder import read_folder_config
from pagemill.models.loading.keep import Keep, Nothing
from pagemill.models.loading.packed_store import PackedStore, packed_key
from pagemill.models.loading.pieces import piece_threads
from pagemill.models.loading.quantized_folder import open_folder
from pagemill.models.loading.tensor_reader import Progress
from pagemill.models.names import WeightNames
from pagemill.models.sharding import Sharding, check_heads
from pagemill.models.spec import DecoderSpec
from pagemill.ops.cpu_ops import CpuOps
from pagemill.ops.interface import Ops

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_X86 = {torch.bfloat16: {"avx512_bf16", "amx_bf16"}, torch.float16: {"avx512_fp16", "amx_fp16"}}
_ARM = {torch.bfloat16: {"bf16", "svebf16"}, torch.float16: {"asimdhp"}}


@dataclass(frozen=True)
class LoadedModel:
    """Holds a decoder that is ready to run, with what the engine must know of it.

    eos_token_ids: ids that end a generation, in the checkpoint's order, possibly none.
    quantization:  how linear layers are held, as `load_model` takes it; what was chosen where nothing was asked for.
    max_model_len: what was asked for, else the longest context that the checkpoint declares.
    fingerprint:   32 bytes; see `loading.fingerprint`.
    spec:          of the whole model; `decoder.spec` is of what the decoder computes.
    names:         what Hugging Face's checkpoints of its family, and adapters, call its weights.
    has_head:      False if the model makes embeddings only; its logits say nothing.
    """

    decoder: Decoder
    spec: DecoderSpec
    dtype: torch.dtype
    quantization: str | None
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    fingerprint: bytes
    names: WeightNames
    has_head: bool = True


AttentionChoice = Callable[[DecoderSpec, torch.dtype], AttentionBackend]
"""Chooses the attention for a rank's part of a model and the dtype of its weights."""


def load_model(
    path: str | Path,
    *,
    ops: Ops,
    attention: AttentionBackend | AttentionChoice,
    decoder: DecoderMaker = Decoder,
    dtype: str = "auto",
    hf_overrides: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    quantization: str | None = None,
    sharding: Sharding | None = None,
    packed: PackedStore | None = None,
) -> LoadedModel:
    """Loads a folder in Hugging Face's form or a GGUF file.

    attention:     a choice is asked before weights are read, and may raise ConfigError.
    decoder:       makes the decoder that runs the layers, on `ops` and `attention`.
    hf_overrides:  replaces settings of the model's configuration, by transformers' names.
    max_model_len: longest context to prepare for; None: all that the model declares.
    progress:      called with (done, total) bytes as tensors are read.
    quantization:  how linear layers are held: "int8", or in the checkpoint's own integers ("gguf", "gptq", "awq") or
                   "fp8". None: in dtype, but as the checkpoint has them where the operators keep what is narrow, and
                   with dtype "auto", where they multiply integers faster.
    sharding:      what the decoder holds of the model; None for all of it.
    packed:        where weights that were packed for the CPU lie, or are laid; None: they are packed anew.
    Raises ModelNotFoundError, ModelConfigError, UnsupportedModelError, CorruptWeightsError, ConfigError (dtype,
    max_model_len, quantization) or UnknownArgumentError (a key of hf_overrides).
    """
    device = torch.device(device)
    checkpoint = open_checkpoint(Path(os.path.expanduser(path)), hf_overrides or {})
    config = checkpoint.config
    own = checkpoint.quantization
    if quantization is None and (ops.keeps_narrow or (dtype == "auto" and ops.multiplies_integers and own != "fp8")):
        quantization = own
    if quantization == "fp8" == own and not ops.keeps_narrow:
        raise ConfigError(
            "quantization is 'fp8', but weights stay in fp8 on NVIDIA GPUs only; leave it out: they are widened here",
            param="quantization",
        )
    if quantization not in (None, "int8", own):
        raise ConfigError(
            f"quantization is {quantization!r}, but the weights of {path} are {own or 'not quantized'}; use "
            f"quantization='int8', which rounds any weights to 8 bits, or leave it out",
            param="quantization",
        )
    family = find_family(config["model_type"], config.get("architectures"))
    described = family.describe(ModelConfig(config), max_model_len)
    spec, names, has_head = find_head(checkpoint, described, checkpoint.names or family.names)
    if sharding is not None:
        check_heads(spec, sharding.exchange.size)
    chosen = resolve_dtype(
        dtype,
        checkpoint.float_dtypes(),
        quantized=own is not None and not (own == "fp8" and device.type == "cpu"),
        on_integers=quantization is not None,
        device=device,
    )
    part = spec if sharding is None else sharding.spec(spec)
    if callable(attention):
        attention = attention(part, chosen)

    def assemble(keep: Keep) -> DecoderWeights:
        return Assembler(
            checkpoint, spec, names, ops, chosen, device, progress, quantization, sharding, keep
        ).assemble()

    if packed is not None and not isinstance(ops, CpuOps):
        logger.warning("weights_disk_memory has no effect on %s: only weights packed for the CPU are kept", device)
        packed = None
    with piece_threads():
        mark = fingerprint(checkpoint, spec, chosen)
        if packed is None:
            weights = assemble(Nothing())
        else:
            weights = packed.load(packed_key(checkpoint, mark, ops.name, chosen, quantization, sharding), assemble)
    return LoadedModel(
        decoder=decoder(part, weights, ops, attention, chosen),
        spec=spec,
        dtype=chosen,
        quantization=quantization,
        eos_token_ids=checkpoint.eos_token_ids,
        max_model_len=max_model_len or spec.max_position,
        fingerprint=mark,
        names=family.names,
        has_head=has_head,
    )


def read_config(path: Path) -> dict[str, Any]:
    """Returns a model's normalised configuration. A folder needs no weights. Raises as `open_checkpoint` does."""
    if path.is_dir():
        return read_folder_config(path, {})
    return open_checkpoint(path, {}).config


def open_checkpoint(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    """Reads a checkpoint's headers and configuration, and no weights.

    Raises ModelNotFoundError for what is neither a folder nor a .gguf file.
    """
    if path.is_dir():
        return open_folder(path, overrides)
    if not path.exists():
        raise ModelNotFoundError(
            f"there is no model at {path}; give a folder with config.json and safetensors files, or a .gguf file",
            param="model",
        )
    if path.suffix != ".gguf":
        raise ModelNotFoundError(
            f"{path} is neither a folder nor a .gguf file; give the folder that holds config.json, or a .gguf file",
            param="model",
        )
    return GGUFModel(path, overrides)


def is_native(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if `device` has instructions for matrix products in `dtype`."""
    if dtype == torch.float32:
        return True
    if device.type == "cuda":
        return dtype == torch.float16 or torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return dtype == torch.float16
    table = _ARM if platform.machine().lower() in ("aarch64", "arm64") else _X86
    return not table[dtype].isdisjoint(cpu_features())


def resolve_dtype(
    requested: str, stored: dict[torch.dtype, int], *, quantized: bool, on_integers: bool, device: torch.device
) -> torch.dtype:
    """Returns the dtype to compute in. Raises ConfigError for an unknown one, and for one that the GPU lacks.

    requested: "auto", "float32", "bfloat16" or "float16".
    stored:    bytes of the checkpoint by dtype; auto takes the most frequent if the device has instructions for it.
    quantized: True for a file of integers, and on GPUs of fp8. Their values fit no 16-bit format exactly: auto takes
               float32 on CPU, and elsewhere 16 bits, which are faster there.
    on_integers: True if weights stay integers: auto takes bfloat16 beside them if the device has instructions for it.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise ConfigError(f"dtype is {requested!r}; it must be one of auto, {', '.join(DTYPES)}", param="dtype")
        if device.type == "cuda" and not is_native(DTYPES[requested], device):
            raise ConfigError(
                f"dtype is {requested!r}, for which a GPU needs compute capability 8.0; this one has "
                f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}; use 'float16' or 'float32'",
                param="dtype",
            )
        return DTYPES[requested]
    if quantized:
        if device.type == "cpu" and not on_integers:
            return torch.float32
        if device.type == "cpu":
            return torch.bfloat16 if is_native(torch.bfloat16, device) else torch.float32
        return torch.bfloat16 if is_native(torch.bfloat16, device) else torch.float16
    dtype = max(stored, key=lambda kind: stored[kind], default=torch.float32)
    return dtype if is_native(dtype, device) else torch.float32
