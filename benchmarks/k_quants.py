"""Writes the default model again in the mixture that llama.cpp makes of a K format, to measure what computing on its
integers costs on real weights.

    python -m benchmarks.k_quants FILE [--kind Q4_K|Q5_K|Q6_K]
    python -m benchmarks.quality --model FILE --settings bfloat16,bfloat16+gguf --windows 32

K formats hold rows of multiples of 256: here the last feed-forward layers, of 1,536. The others' rows, of 576, go into
the format that llama.cpp takes instead. The head stays Q8_0. Scales are chosen by the least and the greatest number, so
the file itself is a little worse than llama.cpp's; quality is compared with the exact weights of the same file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from benchmarks.peers.engines import MODEL
from benchmarks.random_gguf import finish
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from pagemill.hub import resolve_model

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

INSTEAD = {Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0}


def quantize(weight: Floats, kind: Kind) -> Bytes:
    """Returns rows of blocks, uint8 [rows, bytes], of a weight [rows, columns]."""
    if kind not in INSTEAD:
        return gguf.quants.quantize(weight, kind)
    blocks = weight.reshape(-1, 256)
    stored = _q6_k(blocks) if kind == Kind.Q6_K else _q4_or_q5_k(blocks, 5 if kind == Kind.Q5_K else 4)
    return stored.reshape(len(weight), -1)


def _q4_or_q5_k(blocks: Floats, bits: int) -> Bytes:
    parts = blocks.reshape(-1, 8, 32)
    low = np.minimum(parts.min(-1), 0)
    largest = 2**bits - 1
    d, scales = _in_six_bits((parts.max(-1) - low) / largest)
    least, minima = _in_six_bits(-low)
    steps, offsets = (d * scales)[..., None], (least * minima)[..., None]
    values = np.rint((parts + offsets) / np.where(steps, steps, 1)).clip(0, largest).astype(np.uint8)
    header = np.concatenate((d.astype(np.float16), least.astype(np.float16)), -1).view(np.uint8)
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    mixed = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    fifths = [] if bits == 4 else [(values >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)]
    nibbles = values[:, ::2] & 15 | (values[:, 1::2] & 15) << 4
    return np.concatenate((header, first, second, mixed, *fifths, nibbles.reshape(len(blocks), 128)), -1)


def _in_six_bits(numbers: Floats) -> tuple[Floats, Bytes]:
    """Returns numbers [blocks, 8], none negative, as a step [blocks, 1], exact in fp16, and multiples of it."""
    step = (numbers.max(-1, keepdims=True) / 63).astype(np.float16).astype(np.float32)
    return step, np.rint(numbers / np.where(step, step, 1)).clip(0, 63).astype(np.uint8)


def _q6_k(blocks: Floats) -> Bytes:
    parts = blocks.reshape(-1, 16, 16)
    scale = np.abs(parts).max(-1) / 31
    d = (scale.max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    scales = np.rint(scale / np.where(d, d, 1)).clip(0, 127).astype(np.int8)
    steps = (d * scales)[..., None]
    values = np.rint(parts / np.where(steps, steps, 1)).clip(-32, 31).astype(np.int8) + 32
    quarters = values.astype(np.uint8).reshape(-1, 2, 4, 32)  # of each 128: four times 32
    lower = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    upper = (quarters >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(2, dtype=np.uint8)
    count = len(blocks)
    return np.concatenate(
        (
            lower.reshape(count, 128),
            upper.reshape(count, 64),
            scales.view(np.uint8),
            d.astype(np.float16).view(np.uint8),
        ),
        -1,
    )


def write(path: Path, kind: Kind) -> None:
    model = gguf.GGUFReader(resolve_model(MODEL))
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in model.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), *field.types[:2])
    for tensor in model.tensors:
        if tensor.tensor_type != Kind.Q4_1:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        form = INSTEAD[kind] if weight.shape[-1] % 256 else kind
        writer.add_tensor(tensor.name, quantize(weight, form), raw_dtype=form)
    finish(writer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--kind", default="Q4_K", choices=[kind.name for kind in INSTEAD])
    arguments = parser.parse_args()
    write(arguments.file, Kind[arguments.kind])
    print(f"{arguments.file}: {arguments.file.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
