"""Reads checkpoints in GGUF: metadata become the configuration that families read, quantized weights float32.

What llama.cpp hard-codes for an architecture instead of storing it (Gemma's window pattern and local RoPE base, which
layers of SmolLM3 rotate, that Qwen3-MoE's shares sum to 1) is filled in here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagemill import _kernels
from pagemill.errors import ModelConfigError, UnsupportedModelError
from pagemill.models.families import ModelConfig
from pagemill.models.loading.checkpoint import (
    PLAIN_DTYPES,
    Checkpoint,
    MappedFile,
    TensorInfo,
    apply_overrides,
    check_overrides,
)
from pagemill.models.loading.gguf_file import FORMATS, GGUFFile
from pagemill.models.loading.gguf_integers import integers_of
from pagemill.models.loading.pieces import PIECE_BYTES, each_piece
from pagemill.models.names import GGUF
from pagemill.models.rope import magnitude
from pagemill.ops.quantized import QuantizedWeight

ROUNDED_BYTES = 4 << 20
"""About the bytes of a file that are rounded at once, by all cores."""
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8}
"""Bits of the integers of quantized formats."""
_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "smollm3": "smollm3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
_PAIRED_ROPE = {"llama", "smollm3"}
"""Architectures whose q and k rows llama.cpp's conversion reorders."""
_MERGED_EXPERTS = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.weight")
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_USED_OTHERWISE = {
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
_WITHOUT_EFFECT = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
_NEUTRAL = {
    "attention.causal": (True,),
    "pooling_type": (0, 3),
    "expert_gating_func": (1,),
    "expert_weights_norm": (True,),
}
"""Settings that may be there if they say what is done anyway: embeddings are of the last token (3), or not spoken of;
a softmax chooses experts, whose shares sum to 1."""
_OF_GEMMA2 = {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Settings that llama.cpp takes where a file has none, as the first ones had."""
_ENDS = {
    *("<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|endofturn|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>"),
    *("<EOT>", "▁<EOT>", "<end_of_turn>", "<end_of_utterance>", "<eos>"),
}
"""Texts of tokens that end an answer wherever they are in a vocabulary, as llama.cpp takes them."""


class GGUFModel(Checkpoint):
    """Opens the container and builds the configuration; weights are read later."""

    readable = sorted(_BITS.keys() | PLAIN_DTYPES.keys())

    def __init__(self, path: Path, overrides: Mapping[str, Any]) -> None:
        self.path = path
        self.files = [MappedFile(path)]
        container = GGUFFile(self.files[0])
        self.tensors = dict(one for each in container.tensors.items() for one in _single_experts(*each))
        if any(tensor.dtype in _BITS for tensor in self.tensors.values()):
            self.quantization = "gguf"
        metadata = container.metadata
        plain = self._configure(metadata)
        check_overrides(overrides, plain)
        self.config = apply_overrides(plain, overrides)
        architecture = metadata["general.architecture"]
        self.names = replace(GGUF, paired_rope=architecture in _PAIRED_ROPE)
        if architecture == "phi3":
            self.names = replace(GGUF, qkv=("attn_qkv",), gate_up=("ffn_up",))
        self.eos_token_ids = _eos_token_ids(metadata)

    def stored_bits(self, name: str) -> int | None:
        return _BITS.get(self.tensors[name].dtype)

    def affine_bits(self, name: str) -> int | None:
        return _BITS.get(self.tensors[name].dtype)

    def read_affine(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        tensor, file = self.tensors[name], self.files[0]
        (rows, columns), form = tensor.shape, FORMATS[tensor.dtype]
        in_row = columns // form.block * form.nbytes
        values = torch.empty(rows, columns, dtype=torch.uint8, device="cpu")
        scale, low = (
            torch.empty(rows, columns // (16 if form.name == "Q6_K" else 32), dtype=torch.float32, device="cpu")
            for _ in range(2)
        )

        def fill(begin: int, end: int) -> None:
            stored = np.empty((end - begin) * in_row, np.uint8)
            file.read(tensor.begin + begin * in_row, stored)
            read = integers_of(stored.reshape(end - begin, -1, form.nbytes), form.name)
            for out, part in zip((values, scale, low), read, strict=True):
                out[begin:end] = torch.from_numpy(part).view(end - begin, -1)

        each_piece(rows, max(1, PIECE_BYTES // columns), fill)
        return values, scale, low

    def rounds(self, name: str) -> bool:
        return self.tensors[name].dtype in _BITS

    def round_into(self, name: str, out: QuantizedWeight) -> bool:
        tensor, file = self.tensors[name], self.files[0]
        (rows, columns), form = tensor.shape, FORMATS[tensor.dtype]
        in_row = columns // form.block * form.nbytes
        finite: list[bool] = []

        def fill(begin: int, end: int) -> None:
            stored = np.empty((end - begin) * in_row, np.uint8)
            file.read(tensor.begin + begin * in_row, stored)
            values, scales, *of_halves = (part[begin:end] for part in out.parts)
            if of_halves:
                slopes, offsets = of_halves
                finite.append(_kernels.keep_int4(form.number, stored, values, slopes, offsets, scales))
            else:
                finite.append(_kernels.round_stored(form.number, stored, values, scales))

        each_piece(rows, max(1, ROUNDED_BYTES // in_row), fill)
        return all(finite)

    def read_into(self, name: str, out: Tensor) -> None:
        tensor, file = self.tensors[name], self.files[0]
        if tensor.dtype not in _BITS:
            return super().read_into(name, out)
        flat, form = out.view(-1), FORMATS[tensor.dtype]
        in_place = out.is_cpu and out.dtype == torch.float32

        def widen(start: int, stop: int) -> None:
            here = flat[start:stop]
            piece = here if in_place else torch.empty(stop - start, dtype=torch.float32, device="cpu")
            first = tensor.begin + start // form.block * form.nbytes
            blocks = np.empty((stop - start) // form.block * form.nbytes, np.uint8)
            file.read(first, blocks)
            _kernels.dequantize(form.number, blocks, piece.numpy())
            if not in_place:
                here.copy_(piece)

        each_piece(flat.numel(), PIECE_BYTES // 4 // form.block * form.block, widen)

    def _configure(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the configuration in transformers' normalised form, from llama.cpp's metadata."""
        architecture = metadata.get("general.architecture")
        if architecture not in _MODEL_TYPES:
            raise UnsupportedModelError(
                f"{self.path} is of GGUF architecture {architecture!r}; supported are {', '.join(_MODEL_TYPES)}",
                param="general.architecture",
            )
        if metadata.get("split.count", 1) > 1:
            raise UnsupportedModelError(
                f"{self.path} is one of {metadata['split.count']} parts; merge them with llama.cpp's gguf-split --merge"
            )
        prefix = f"{architecture}."
        found = {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}
        for key, value in found.items():
            if key not in _KEYS and key not in _USED_OTHERWISE | _WITHOUT_EFFECT and value not in _NEUTRAL.get(key, ()):
                raise UnsupportedModelError(
                    f"{self.path} has {prefix}{key} = {value!r}, which is not supported; use the Hugging Face folder",
                    param=prefix + key,
                )
        config: dict[str, Any] = dict.fromkeys(_KEYS.values())
        config |= {_KEYS[key]: value for key, value in found.items() if key in _KEYS}
        embedding, experts = self.tensors.get("token_embd.weight"), config["num_local_experts"]
        if experts and architecture not in ("llama", "qwen3moe"):
            raise UnsupportedModelError(
                f"{self.path} has {prefix}expert_count = {experts!r}; of mixtures of experts, the architectures llama "
                f"(Mixtral) and qwen3moe are supported",
                param=prefix + "expert_count",
            )
        config |= {
            "model_type": "mixtral" if architecture == "llama" and experts else _MODEL_TYPES[architecture],
            "vocab_size": embedding.shape[0] if embedding else None,
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": architecture in _PAIRED_ROPE and "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self.tensors,
            "hidden_act": "silu",
            "sliding_window": found.get("attention.sliding_window") or None,
            "rope_parameters": self._rope(found),
        }
        heads, hidden = (ModelConfig(config).integer(key) for key in ("num_attention_heads", "hidden_size"))
        config["num_key_value_heads"] = config["num_key_value_heads"] or heads
        config["head_dim"] = config["head_dim"] or hidden // heads
        if found.get("attention.value_length", config["head_dim"]) != config["head_dim"]:
            raise UnsupportedModelError(
                f"{self.path} has keys of {config['head_dim']} and values of {found['attention.value_length']} "
                f"dimensions per head; only equal sizes are supported"
            )
        config["rope_parameters"]["partial_rotary_factor"] = (
            found.get("rope.dimension_count", config["head_dim"]) / config["head_dim"]
        )
        return self._complete(config, found)

    def _complete(self, config: dict[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the configuration with what differs by family."""
        layers, model_type = ModelConfig(config).layer_count(), config["model_type"]
        if model_type in ("qwen2", "qwen3", "smollm3"):
            config["sliding_window"] = None
            config["layer_types"] = ["full_attention"] * layers
        if model_type == "smollm3":
            config["no_rope_layers"] = [int((i + 1) % 4 != 0) for i in range(layers)]
        if model_type == "qwen3_moe":
            config |= {"decoder_sparse_step": 1, "norm_topk_prob": True}
        if model_type == "gemma2":
            config |= {key: config[key] or value for key, value in _OF_GEMMA2.items()}
        if model_type in ("gemma2", "gemma3_text"):
            period = 2 if model_type == "gemma2" else 6
            kinds = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
            # The largest of each generation scales its scores by hidden_size / heads instead of the head's size.
            largest = layers == (46 if model_type == "gemma2" else 62)
            config |= {
                "hidden_activation": "gelu_pytorch_tanh",
                "layer_types": kinds,
                "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
                if largest
                else config["head_dim"],
            }
        if model_type == "gemma3_text":
            full = config["rope_parameters"]
            local = {"rope_type": "default", "rope_theta": found.get("rope.freq_base_swa", 10000.0)}
            config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
        return config

    def _rope(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the parameters of the rotary embedding, as llama.cpp takes them: a factor without a type is linear,
        and the file's attention factor multiplies the one that yarn has of its own."""

        def number(key: str) -> float:
            return ModelConfig({key: found.get(key) or 1.0}).number(key)

        kind = found.get("rope.scaling.type", "linear" if "rope.scaling.factor" in found else "none")
        parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": found.get("rope.freq_base", 10000.0)}
        trained = found.get("rope.scaling.original_context_length")
        if "rope_factors_long.weight" in self.tensors:
            return parameters | {
                "rope_type": "longrope",
                "long_factor": self._floats("rope_factors_long.weight"),
                "short_factor": self._floats("rope_factors_short.weight"),
                "original_max_position_embeddings": trained,
                "attention_factor": found.get("rope.scaling.attn_factor") or None,
            }
        stretched, raised = number("rope.scaling.factor"), number("rope.scaling.attn_factor")
        by_frequency = "rope_freqs.weight" in self.tensors
        if kind == "yarn" and not by_frequency:
            return parameters | {
                "rope_type": kind,
                "factor": stretched,
                "original_max_position_embeddings": trained or found.get("context_length"),
                "attention_factor": raised * magnitude(stretched),
                "beta_fast": found.get("rope.scaling.yarn_beta_fast"),
                "beta_slow": found.get("rope.scaling.yarn_beta_slow"),
            }
        if raised != 1.0 or (by_frequency and kind != "none" and stretched != 1.0):
            key, value = ("factor", stretched) if raised == 1.0 else ("attn_factor", raised)
            raise UnsupportedModelError(
                f"{self.path} has rope.scaling.{key} = {value:g} beside {'rope_freqs.weight' if by_frequency else kind}"
                f", which is not supported; use the Hugging Face folder",
                param=f"rope.scaling.{key}",
            )
        if by_frequency:
            return parameters | {"rope_type": "frequency_factors", "factors": self._floats("rope_freqs.weight")}
        return parameters if kind == "none" else parameters | {"rope_type": kind, "factor": stretched}

    def _floats(self, name: str) -> list[float]:
        if name not in self.tensors:
            raise ModelConfigError(f"{self.path} has no tensor {name!r}; download it again")
        values = torch.empty(self.tensors[name].shape, dtype=torch.float32, device="cpu")
        self.read_into(name, values)
        result: list[float] = values.tolist()
        return result


def _eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the ids of the tokens that end an answer: those that the file names, then those known by their text.

    Converters name a single token, which for many models (Gemma, Phi-3, the first Llama 3) ends texts but not turns.
    """
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens")
    texts = enumerate(tokens if isinstance(tokens, list) else [])
    known = [token_id for token_id, text in texts if isinstance(text, str) and text in _ENDS]
    return tuple(dict.fromkeys(end for end in named + known if isinstance(end, int)))


def _single_experts(name: str, tensor: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """Yields a tensor as it is, and one that merges a layer's experts [experts, rows, columns] expert by expert.

    The experts get the names that they had in older files: `blk.0.ffn_up_exps` holds `blk.0.ffn_up.0` and so on.
    """
    merged = _MERGED_EXPERTS.fullmatch(name)
    if merged is None or len(tensor.shape) != 3:
        yield name, tensor
        return
    experts, *shape = tensor.shape
    nbytes = tensor.nbytes // experts
    for index in range(experts):
        begin = tensor.begin + index * nbytes
        yield f"{merged[1]}.{index}.weight", replace(tensor, shape=tuple(shape), nbytes=nbytes, begin=begin)
