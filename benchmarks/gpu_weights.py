"""Times products with narrow weights on a GPU beside what the GPU can do: the time that a copy takes for the bytes that
each must read and write, and torch's product (cuBLAS) with the same weight in bf16.

    python -m benchmarks.gpu_weights [--quick] [--json FILE]

Shapes are those of Llama 3 8B's layers and head; weights are random. Times are medians over 200 ms by
`triton.testing.do_bench`, which empties the L2 cache before each. A copy's speed counts what is read and what is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from benchmarks.on_gpu import heading, keep, measure_ceilings, median_ms, need_gpu, parser_for

from pagemill.ops.quantized import AffineWeight, Float8Weight, QuantizedWeight, quantize_int8

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
"""Outputs and columns."""
KINDS = ("Q4_0", "Q4_K", "Q6_K", "Q8_0", "GPTQ-128", "int8", "fp8")
ROWS = (1, 8, 32, 256)


@dataclass(frozen=True)
class Result:
    """Holds one case. bits: per weight. share: of a copy's speed, counting weight, x and y once. dense_ms: in bf16."""

    kind: str
    layer: str
    rows: int
    bits: float
    ms: float
    share: float
    dense_ms: float


def random_weight(kind: str, outputs: int, columns: int, device: str) -> AffineWeight | Float8Weight | QuantizedWeight:
    """Makes a weight as files of a kind hold it, of about a normal layer's size."""

    def numbers(groups: int) -> torch.Tensor:
        return (torch.rand(outputs, groups, device=device) / 64 + 1 / 64).half().float()

    def two_levels(groups: int, in_block: int) -> torch.Tensor:
        fine = torch.randint(1, 64, (outputs, groups), device=device).float()
        return fine * (numbers(groups // in_block) / 64).half().float().repeat_interleave(in_block, dim=1)

    if kind == "int8":
        return quantize_int8(torch.randn(outputs, columns, device=device) / 64)
    if kind == "fp8":
        values = torch.randn(outputs, columns, device=device).to(torch.float8_e4m3fn)
        return Float8Weight(values, numbers(columns // 128), 128)
    bits = {"Q6_K": 6, "Q8_0": 8}.get(kind, 4)
    values = torch.randint(0, 1 << bits, (outputs, columns), dtype=torch.uint8, device=device)
    if kind == "Q4_K":
        scale, low = two_levels(columns // 32, 8), -two_levels(columns // 32, 8)
    elif kind == "Q6_K":
        scale = two_levels(columns // 16, 16)
        low = -32 * scale
    elif kind == "GPTQ-128":
        scale = numbers(columns // 128)
        low = -scale * torch.randint(0, 16, scale.shape, device=device)
        scale, low = (part.repeat_interleave(4, dim=1) for part in (scale, low))
    else:
        scale = numbers(columns // 32)
        low = -(1 << bits - 1) * scale
    return AffineWeight(values, scale.contiguous(), low.contiguous(), 4 if bits == 4 else 8)


def run(
    shapes: dict[str, tuple[int, int]],
    rows: Iterable[int],
    copy_bytes_per_s: float,
    ms_of: Callable[[Callable[[], object]], float],
    capability: tuple[int, int],
    device: str,
) -> list[Result]:
    """Times every kind on every shape. ms_of: times a call."""
    from pagemill.ops.triton_quantized import TritonQuantizedOps

    ops = TritonQuantizedOps(capability)
    element = torch.bfloat16 if capability >= (8, 0) else torch.float16
    results = []
    for layer, (outputs, columns) in shapes.items():
        dense = torch.randn(outputs, columns, device=device).to(element)
        inputs = {count: torch.randn(count, columns, device=device).to(element) for count in rows}
        dense_ms = {count: ms_of(lambda x=x, dense=dense: F.linear(x, dense)) for count, x in inputs.items()}
        for kind in KINDS:
            weight = random_weight(kind, outputs, columns, device)
            if isinstance(weight, AffineWeight):
                linear = ops.pack_affine(weight)
            elif isinstance(weight, Float8Weight):
                linear = ops.pack_float8(weight)
            else:
                linear = ops.pack_quantized(weight, None, element)
            bits = linear.nbytes * 8 / (outputs * columns)
            for count, x in inputs.items():
                ms = ms_of(lambda x=x, linear=linear: linear(x))
                moved = linear.nbytes + (columns + outputs) * count * element.itemsize
                share = moved / ms * 1e3 / copy_bytes_per_s
                results.append(Result(kind, layer, count, bits, ms, share, dense_ms[count]))
    return results


def table(results: list[Result]) -> str:
    lines = [
        "| weights | layer | rows | bits | ms | share of a copy's speed | bf16 in cuBLAS, ms | times as fast |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += (
        f"| {at.kind} | {at.layer} | {at.rows} | {at.bits:.1f} | {at.ms:.3f} | {at.share:.0%} | {at.dense_ms:.3f} "
        f"| {at.dense_ms / at.ms:.1f} |"
        for at in results
    )
    return "\n".join(lines)


def main() -> None:
    parser = parser_for(__doc__, "one layer, two numbers of rows")
    options = parser.parse_args()
    need_gpu(parser)
    shapes = {"gate_up": SHAPES["gate_up"]} if options.quick else SHAPES
    ceilings = measure_ceilings()
    capability = torch.cuda.get_device_capability()
    rows = (1, 32) if options.quick else ROWS
    results = run(shapes, rows, ceilings.copy_bytes_per_s, median_ms, capability, "cuda")
    print(f"{heading(ceilings.copies)}\n\n{table(results)}")
    keep(options.json, ceilings, results)


if __name__ == "__main__":
    main()
