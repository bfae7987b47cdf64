"""Shallow: the real model's first layers, for tests in which the rest would only take time. Weights and text are real,
what it says is not."""

from __future__ import annotations

from pathlib import Path

import gguf

LAYERS = 6
FRAME_BYTES = LAYERS * 2 * 3 * 64 * 16 * 4
"""In float32, blocks of 16: 3 KV heads of 64."""


def write_shallow(whole: Path, path: Path) -> None:
    """Copies a GGUF file, but of its layers only the first ones."""
    reader = gguf.GGUFReader(whole)
    architecture = reader.fields["general.architecture"].contents()
    count = f"{architecture}.block_count"
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = LAYERS if name == count else field.contents()
            writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        layer = tensor.name.split(".")[1]
        if not layer.isdigit() or int(layer) < LAYERS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
