"""Writes a GGUF of random weights, in a larger Llama's shape and llama.cpp's usual mixture of formats.

    python -m benchmarks.random_gguf FILE [--shape 1b|3b|8b] [--kind Q4_K_M|Q4_0|Q8_0]

What such a model writes means nothing, but its steps take as long as those of trained weights: give the file to
`benchmarks.peers.run --model FILE` or `benchmarks.roofline --model FILE`. Q4_K_M has Q4_K, and Q6_K for the head, and
for half of the values' and last feed-forward layers. The tokenizer is SmolLM2's, with tokens of no use behind its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from benchmarks.loading import SHAPES, Shape
from benchmarks.peers.engines import MODEL
from gguf import GGMLQuantizationType as Kind
from gguf import TokenType

from pagemill.hub import resolve_model

KINDS = {"Q4_K_M": Kind.Q4_K, "Q4_0": Kind.Q4_0, "Q8_0": Kind.Q8_0}
FILE_TYPES = {
    "Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}


def in_q6(layer: int, layers: int) -> bool:
    """Returns whether Q4_K_M has a layer's values and last feed-forward layer in Q6_K: as llama.cpp chooses them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def tensors(shape: Shape, kind: str) -> Iterator[tuple[str, int, int, Kind]]:
    """Yields the weights: name, rows, columns and format."""
    usual = KINDS[kind]
    better = Kind.Q6_K if kind == "Q4_K_M" else usual
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd", shape.vocab, shape.hidden, better  # which is the head, too
    for layer in range(shape.layers):
        mixed = better if in_q6(layer, shape.layers) else usual
        yield f"blk.{layer}.attn_q", queries, shape.hidden, usual
        yield f"blk.{layer}.attn_k", keys, shape.hidden, usual
        yield f"blk.{layer}.attn_v", keys, shape.hidden, mixed
        yield f"blk.{layer}.attn_output", shape.hidden, queries, usual
        yield f"blk.{layer}.ffn_gate", shape.intermediate, shape.hidden, usual
        yield f"blk.{layer}.ffn_up", shape.intermediate, shape.hidden, usual
        yield f"blk.{layer}.ffn_down", shape.hidden, shape.intermediate, mixed


def blocks(rows: int, columns: int, kind: Kind, draw: np.random.Generator) -> np.ndarray:
    """Returns random blocks, uint8 [rows, bytes], of weights whose outputs are about as large as their inputs."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    drawn = draw.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    # The mean square of what the integers of a format are, each of its scales taken as the mean one.
    spread = {Kind.Q4_0: 4.6, Kind.Q8_0: 74.0, Kind.Q4_K: 31.5 * 4.6, Kind.Q6_K: 18.5 * 74.0}[kind]
    scale = np.full((rows, columns // values), columns**-0.5 / spread)
    if kind == Kind.Q6_K:
        drawn[..., -2:] = scale.astype(np.float16)[..., None].view(np.uint8)
    else:
        drawn[..., :2] = scale.astype(np.float16)[..., None].view(np.uint8)
    if kind == Kind.Q4_K:
        drawn[..., 2:4] = (7.5 * scale).astype(np.float16)[..., None].view(np.uint8)
    return drawn.reshape(rows, -1)


def copy_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    fields = gguf.GGUFReader(resolve_model(MODEL)).fields
    for name, field in fields.items():
        if not name.startswith("tokenizer.") or name == "tokenizer.chat_template":
            continue
        value = field.contents()
        if name == "tokenizer.ggml.tokens":
            value = value + [f"<unused{place}>" for place in range(vocab - len(value))]
        if name == "tokenizer.ggml.token_type":
            value = value + [int(TokenType.UNUSED)] * (vocab - len(value))
        writer.add_key_value(name, value, *field.types[:2])


def write(path: Path, shape: Shape, kind: str) -> None:
    """Writes the file; equal arguments, equal file."""
    writer, draw = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_context_length(131072)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(FILE_TYPES[kind])
    copy_tokenizer(writer, shape.vocab)
    for name, rows, columns, form in tensors(shape, kind):
        writer.add_tensor(f"{name}.weight", blocks(rows, columns, form, draw), raw_dtype=form)
        if name.endswith(("attn_q", "ffn_gate")):
            norm = name.replace("attn_q", "attn_norm").replace("ffn_gate", "ffn_norm")
            writer.add_tensor(f"{norm}.weight", np.ones(shape.hidden, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes all that a writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", default="1b", choices=[name for name in SHAPES if name != "135m"])
    parser.add_argument("--kind", default="Q4_K_M", choices=[*KINDS])
    arguments = parser.parse_args()
    write(arguments.file, SHAPES[arguments.shape], arguments.kind)
    print(f"{arguments.file}: {arguments.file.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
