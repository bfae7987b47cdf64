"""Shallow: the real model with some of its layers. Weights and text are real, what it says is not always."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

LAYERS = 6
"""The model in `shallow_path` has so many of the real model's layers, the first ones."""
FRAME_BYTES = LAYERS * 2 * 3 * 64 * 16 * 4
"""A block of 16 tokens of that model takes so many bytes in float32: each layer has 3 KV heads of 64."""


def write_layers(whole: Path, path: Path, layers: Sequence[int]) -> None:
    """Copies a GGUF file, but of its layers only these, in this order."""
    import gguf
    from benchmarks.random_gguf import finish

    reader = gguf.GGUFReader(whole)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = len(layers) if name == f"{architecture}.block_count" else field.contents()
            writer.add_key_value(name, value, *field.types[:2])
    places = {f"blk.{layer}.": f"blk.{place}." for place, layer in enumerate(layers)}
    for tensor in reader.tensors:
        layer = tensor.name[: tensor.name.find(".", 4) + 1] if tensor.name.startswith("blk.") else ""
        if not layer or layer in places:
            name = places.get(layer, "") + tensor.name.removeprefix(layer)
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
