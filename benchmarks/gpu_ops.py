"""Times the GPU's operators beside the bytes that each must move at the speed of a copy, and beside torch's operators.

    python -m benchmarks.gpu_ops [--quick] [--dtype bfloat16] [--json FILE]

Sizes are those of Llama 3 8B, with the head norms of Qwen 3 8B, and the mixture of Qwen3-30B-A3B: 8 of 128 experts. An
operator must read its inputs and write its outputs once; of a mixture, the weights of the experts that some token has
chosen. Times are medians over 200 ms by `triton.testing.do_bench`, which empties the L2 cache before each. Below
about a megabyte, the start of a kernel is most of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from benchmarks.on_gpu import heading, keep, measure_ceilings, median_ms, need_gpu, parser_for
from torch import Tensor

from pagemill.ops.torch_ops import TorchOps

ROWS = (1, 32, 256, 2048)
EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of a dense model's layer, and of a mixture's."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336
    mixture_hidden: int = 2048
    experts: int = 128
    chosen: int = 8
    expert_size: int = 768


@dataclass(frozen=True)
class Case:
    """Holds an operator on its inputs, and the same work by torch's operators, if they have it. nbytes: read and
    written at least."""

    name: str
    nbytes: int
    run: Callable[[], object]
    by_torch: Callable[[], object] | None


@dataclass(frozen=True)
class Result:
    """Holds one case. share: of the copy's speed. torch_ms: by torch's operators."""

    name: str
    rows: int
    ms: float
    share: float
    torch_ms: float | None


def cases(sizes: Sizes, rows: int, dtype: torch.dtype, device: str, capability: tuple[int, int]) -> Iterator[Case]:
    from pagemill.ops.triton_experts import apply_experts, most_likely
    from pagemill.ops.triton_ops import TritonOps

    ops, plain = TritonOps(capability), TorchOps()

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    x, added, weight = draw(rows, sizes.hidden), draw(rows, sizes.hidden), draw(sizes.hidden, dtype=torch.float32)
    yield Case("rms_norm", 2 * x.nbytes, lambda: ops.rms_norm(x, weight, EPS), lambda: plain.rms_norm(x, weight, EPS))
    yield Case(
        "add_rms_norm", 4 * x.nbytes,
        lambda: ops.add_rms_norm(x, added, weight, EPS), lambda: plain.rms_norm(x + added, weight, EPS),
    )  # fmt: skip
    turned = sizes.heads + sizes.kv_heads
    heads = draw(rows, turned + sizes.kv_heads, sizes.head_dim)[:, :turned]
    queries, keys = heads.split([sizes.heads, sizes.kv_heads], 1)
    angle = draw(rows, sizes.head_dim // 2, dtype=torch.float32)
    cos, sin, of_heads = angle.cos(), angle.sin(), draw(sizes.head_dim, dtype=torch.float32)
    turned_bytes = 2 * heads.numel() * heads.itemsize + cos.nbytes + sin.nbytes

    def rotate_by_torch() -> None:
        plain.rotate(queries, cos, sin)
        plain.rotate(keys, cos, sin)

    def norm_and_rotate_by_torch() -> None:
        for part in (queries, keys):
            plain.rotate(plain.rms_norm(part, of_heads, EPS), cos, sin)

    yield Case("rotate", turned_bytes, lambda: ops.rotate(heads, cos, sin), rotate_by_torch)
    yield Case(
        "norm_and_rotate", turned_bytes,
        lambda: ops.norm_and_rotate(heads, sizes.heads, of_heads, of_heads, EPS, cos, sin), norm_and_rotate_by_torch,
    )  # fmt: skip
    both = draw(rows, 2 * sizes.intermediate)
    yield Case("gated", both.nbytes * 3 // 2, lambda: ops.gated(both, "silu"), lambda: plain.gated(both, "silu"))

    x, logits = draw(rows, sizes.mixture_hidden), draw(rows, sizes.experts, dtype=torch.float32)
    gate_up = draw(sizes.experts, 2 * sizes.expert_size, sizes.mixture_hidden)
    down = draw(sizes.experts, sizes.mixture_hidden, sizes.expert_size)
    used = logits.topk(sizes.chosen).indices.unique().numel()
    nbytes = used * (gate_up[0].nbytes + down[0].nbytes) + 2 * x.nbytes + logits.nbytes
    options = {"activation": "silu", "matrix_units": ops.has_matrix_units(dtype)}

    def apply() -> Tensor:
        return apply_experts(x, most_likely(logits, sizes.chosen, normalize=True), gate_up, down, **options)

    yield Case("experts", nbytes, apply, None)


def run(
    all_rows: Sequence[int],
    copy_bytes_per_s: float,
    milliseconds: Callable[[Callable[[], object]], float],
    *,
    sizes: Sizes,
    dtype: torch.dtype,
    device: str,
    capability: tuple[int, int],
) -> list[Result]:
    results = []
    for rows in all_rows:
        for case in cases(sizes, rows, dtype, device, capability):
            ms = milliseconds(case.run)
            share = case.nbytes / copy_bytes_per_s / ms * 1e3
            torch_ms = None if case.by_torch is None else milliseconds(case.by_torch)
            results.append(Result(case.name, rows, ms, share, torch_ms))
    return results


def table(results: list[Result]) -> str:
    lines = ["| operator | rows | µs | share of a copy's speed | torch's, µs |", "| --- | ---: | ---: | ---: | ---: |"]
    for at in results:
        by_torch = "–" if at.torch_ms is None else f"{1e3 * at.torch_ms:.1f}"
        lines.append(f"| {at.name} | {at.rows} | {1e3 * at.ms:.1f} | {at.share:.0%} | {by_torch} |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_for(__doc__, "every second number of rows")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args()
    need_gpu(parser)
    ceilings = measure_ceilings()
    results = run(
        ROWS[:: 2 if options.quick else 1], ceilings.copy_bytes_per_s, median_ms, sizes=Sizes(),
        dtype=getattr(torch, options.dtype), device="cuda", capability=torch.cuda.get_device_capability(),
    )  # fmt: skip
    print(f"{heading(options.dtype, ceilings.copies)}\n\n{table(results)}")
    keep(options.json, ceilings, results)


if __name__ == "__main__":
    main()
