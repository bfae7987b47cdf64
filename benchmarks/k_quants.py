"""Times models of random weights from GGUF files of mixed formats, on their integers, beside the same shape in bf16.

    python -m benchmarks.k_quants [--shape 135m] [--files bf16,Q4_K_M,Q5_K,Q6_K] [--rounds 3] [--folder FOLDER]
    python -m benchmarks.k_quants --requantize SOURCE.gguf TARGET.gguf [--files Q4_K_M]

Decode is one sequence's tokens per second, prefill those of one prompt; the models take turns. Q4_K_M and Q5_K_M choose
formats as llama.cpp does, and all files take Q5_0, Q5_1 or Q8_0 where rows are no whole blocks of 256. The second form
writes a real model's weights in these formats, for `benchmarks.quality`. The gguf package cannot write K formats, so
they are rounded to nearest here, without llama.cpp's search for better scales. FOLDER keeps the files.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

import gguf
import numpy as np
from benchmarks.loading import SHAPES, Shape, write_checkpoint
from benchmarks.packed_integers import measure
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from pagemill.config import EngineConfig
from pagemill.doctor import cpu_model
from pagemill.engine.core import EngineCore

INSTEAD = {Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0}


def kind_of(name: str, columns: int, layers: int, file: str) -> Kind:
    """Returns the format of a matrix in a file of `file`: Q4_K_M, Q5_K_M, Q4_K, Q5_K or Q6_K."""
    kind = Kind[file.removesuffix("_M")]
    part = name.split(".")[-2]
    if file.endswith("_M"):
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        if part in ("output", "token_embd") or (part in ("attn_v", "ffn_down") and more):
            kind = Kind.Q6_K
    return INSTEAD[kind] if columns % 256 else kind


def quantize(weight: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
    """Returns rows of `weight`, rounded to nearest, in the layout of `kind`."""
    if kind not in INSTEAD:
        return gguf.quants.quantize(weight, kind)
    blocks = weight.reshape(len(weight), -1, 256)
    packed = _q6_k(blocks) if kind == Kind.Q6_K else _k(blocks, fifth=kind == Kind.Q5_K)
    return packed.reshape(len(weight), -1)


def _over(part: NDArray[np.float32], unit: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.rint(np.divide(part, unit, out=np.zeros_like(part), where=unit > 0))


def _halves(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    return numbers.astype(np.float16).view(np.uint8)


def _q6_k(blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
    groups = blocks.reshape(*blocks.shape[:2], 16, 16)
    steps = np.abs(groups).max(-1) / 31
    unit = (steps.max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    scales = _over(steps, np.broadcast_to(unit, steps.shape)).clip(0, 127)
    step = (scales * unit)[..., None]
    q = (_over(groups, np.broadcast_to(step, groups.shape)).clip(-32, 31) + 32).astype(np.uint8)
    q = q.reshape(*blocks.shape[:2], 2, 4, 32)
    low = (q[..., :2, :] & 15) | (q[..., 2:, :] & 15) << 4
    high = np.bitwise_or.reduce((q >> 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=-2)
    flat = (*blocks.shape[:2], -1)
    return np.concatenate(
        (low.reshape(flat), high.reshape(flat), scales.astype(np.int8).view(np.uint8), _halves(unit)), axis=-1
    )


def _k(blocks: NDArray[np.float32], fifth: bool) -> NDArray[np.uint8]:
    groups = blocks.reshape(*blocks.shape[:2], 8, 32)
    most = 31 if fifth else 15
    least = np.minimum(groups.min(-1), 0)
    parts = []
    for part in ((groups.max(-1) - least) / most, -least):
        unit = (part.max(-1, keepdims=True) / 63).astype(np.float16).astype(np.float32)
        parts.append((unit, _over(part, np.broadcast_to(unit, part.shape)).clip(0, 63).astype(np.uint8)))
    (unit, scales), (least_unit, minima) = parts
    step = np.broadcast_to((unit * scales)[..., None], groups.shape)
    q = _over(groups + (least_unit * minima)[..., None], step).clip(0, most).astype(np.uint8)
    packed = (
        (scales[..., :4] | (scales[..., 4:] >> 4) << 6),
        (minima[..., :4] | (minima[..., 4:] >> 4) << 6),
        (scales[..., 4:] & 15) | (minima[..., 4:] & 15) << 4,
    )
    high = np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=-2)
    low = (q[..., ::2, :] & 15) | (q[..., 1::2, :] & 15) << 4
    rest = (*packed, *([high] if fifth else []), low.reshape(*blocks.shape[:2], -1))
    return np.concatenate((_halves(unit), _halves(least_unit), *rest), axis=-1)


def write_random(path: Path, shape: Shape, file: str) -> None:
    """Writes a Llama of random weights, whose matrices repeat 64 rows."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    queries, keys, random = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, np.random.default_rng(0)
    sizes = {
        "attn_q": (queries, shape.hidden), "attn_k": (keys, shape.hidden), "attn_v": (keys, shape.hidden),
        "attn_output": (shape.hidden, queries), "ffn_gate": (shape.intermediate, shape.hidden),
        "ffn_up": (shape.intermediate, shape.hidden), "ffn_down": (shape.hidden, shape.intermediate),
    }  # fmt: skip
    matrices = {f"blk.{layer}.{part}.weight": size for layer in range(shape.layers) for part, size in sizes.items()}
    for name, (rows, columns) in {"token_embd.weight": (shape.vocab, shape.hidden), **matrices}.items():
        kind = kind_of(name, columns, shape.layers, file)
        stored = quantize(random.normal(0, 0.02, (64, columns)).astype(np.float32), kind)
        writer.add_tensor(name, np.tile(stored, (-(-rows // 64), 1))[:rows], raw_dtype=kind)
    norms = [f"blk.{layer}.{part}_norm.weight" for layer in range(shape.layers) for part in ("attn", "ffn")]
    for name in ("output_norm.weight", *norms):
        writer.add_tensor(name, np.ones(shape.hidden, np.float32))
    _finish(writer)


def requantize(source: Path, target: Path, file: str) -> None:
    """Writes a GGUF model's weights, as they are dequantized, in the formats of `file`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key != "general.architecture" and not key.startswith("GGUF."):
            item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], item)
    layers = 1 + max(int(tensor.name.split(".")[1]) for tensor in reader.tensors if tensor.name.startswith("blk."))
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = kind_of(tensor.name, weight.shape[1], layers, file) if weight.ndim > 1 else Kind.F32
        writer.add_tensor(tensor.name, quantize(weight, kind) if weight.ndim > 1 else weight, raw_dtype=kind)
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="135m", choices=SHAPES)
    parser.add_argument("--files", default="bf16,Q4_K_M,Q5_K,Q6_K")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--requantize", type=Path, nargs=2)
    args = parser.parse_args()
    files = args.files.split(",")
    if args.requantize:
        return requantize(*args.requantize, files[0])
    cores, sizes, held, shape = {}, {}, {}, SHAPES[args.shape]
    with tempfile.TemporaryDirectory() as temporary:
        for file in files:
            path = (args.folder or Path(temporary)) / (args.shape if file == "bf16" else f"{args.shape}-{file}.gguf")
            if not path.exists():
                write_checkpoint(path, shape) if file == "bf16" else write_random(path, shape, file)
            sizes[file] = sum(each.stat().st_size for each in (path.iterdir() if path.is_dir() else [path]))
            before = resident_bytes()
            cores[file] = EngineCore(
                EngineConfig(model=str(path), max_num_seqs=1, max_model_len=1024, kv_memory="64MiB")
            )
            held[file] = resident_bytes() - before
    found = {file: [] for file in files}
    for number in range(args.rounds + 1):
        for file, core in cores.items():
            found[file].append(measure(core, number))
    print(cpu_model())
    for file, rounds in found.items():
        prefill, decode = (median(each) for each in zip(*rounds[1:], strict=True))
        print(
            f"{args.shape} {file}: file {sizes[file] / 1e6:.0f} MB, held {held[file] / 1e6:.0f} MB, "
            f"prefill {prefill:.0f}, decode {decode:.1f} tokens/s"
        )
        cores[file].close()


if __name__ == "__main__":
    main()
