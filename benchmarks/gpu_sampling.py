"""Times sampling on the GPU beside reading the logits once at the speed of a copy, and beside torch's sorting.

    python -m benchmarks.gpu_sampling [--quick] [--json FILE]

Logits are fp32, of Llama 3's 128,256 tokens, random. "argmax", "drawn" from all tokens, and with top_k, top_p, or both.
Torch's are its argmax, and draws of `torch.multinomial` after a softmax and, with limits, a sort of all logits. Times
are medians over 200 ms by `triton.testing.do_bench`, which empties the L2 cache before each. A truncated draw
starts over 20 kernels; outside of a CUDA graph, their starts are most of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from benchmarks.on_gpu import heading, keep, measure_ceilings, median_ms, need_gpu, parser_for
from torch import Tensor

from pagemill.sampling.kernels import DeviceChoices

VOCAB = 128256
ROWS = (1, 8, 32, 256)
LIMITS = {"argmax": None, "drawn": (0, 1.0), "top_k": (50, 1.0), "top_p": (0, 0.9), "both": (50, 0.9)}
"""top_k and top_p by name."""


@dataclass(frozen=True)
class Result:
    """Holds one case. share: of the copy's speed, had the logits been read once. torch_ms: by torch's operators."""

    name: str
    rows: int
    ms: float
    share: float
    torch_ms: float


def by_torch(logits: Tensor, limits: tuple[int, float] | None) -> Tensor:
    if limits is None:
        return logits.argmax(-1)
    top_k, top_p = limits
    if top_k == 0 and top_p == 1:
        return torch.multinomial(logits.softmax(-1), 1)[:, 0]
    values, tokens = logits.sort(-1, descending=True)
    if top_k:
        values[:, top_k:] = -torch.inf
    probabilities = values.softmax(-1)
    probabilities[probabilities.cumsum(-1) - probabilities >= top_p] = 0
    return tokens.gather(1, torch.multinomial(probabilities, 1))[:, 0]


def run(
    all_rows: Sequence[int],
    copy_bytes_per_s: float,
    milliseconds: Callable[[Callable[[], object]], float],
    *,
    vocab: int,
    device: str,
) -> list[Result]:
    from pagemill.sampling.triton_sampling import TritonSamplingKernels

    kernels, results = TritonSamplingKernels(), []
    for rows in all_rows:
        logits = torch.randn(rows, vocab, device=device) * 3
        for name, limits in LIMITS.items():
            choices = None if limits is None else choices_of(rows, *limits, device)
            truncate = limits is not None and limits != LIMITS["drawn"]
            ms = milliseconds(partial(kernels.choose_on_device, logits, choices, truncate=truncate))
            torch_ms = milliseconds(partial(by_torch, logits, limits))
            results.append(Result(name, rows, ms, logits.nbytes / copy_bytes_per_s / ms * 1e3, torch_ms))
    return results


def choices_of(rows: int, top_k: int, top_p: float, device: str) -> DeviceChoices:
    ones = torch.ones(rows, device=device)
    uniforms = torch.rand(rows, dtype=torch.float64, device=device)
    return DeviceChoices(ones, torch.full((rows,), top_k, device=device), top_p * ones, 0 * ones, uniforms)


def table(results: list[Result]) -> str:
    lines = ["| sampling | rows | µs | share of a copy's speed | torch's, µs |", "| --- | ---: | ---: | ---: | ---: |"]
    lines += (
        f"| {at.name} | {at.rows} | {1e3 * at.ms:.1f} | {at.share:.0%} | {1e3 * at.torch_ms:.1f} |" for at in results
    )
    return "\n".join(lines)


def main() -> None:
    parser = parser_for(__doc__, "every second number of rows")
    options = parser.parse_args()
    need_gpu(parser)
    ceilings = measure_ceilings()
    all_rows = ROWS[:: 2 if options.quick else 1]
    results = run(all_rows, ceilings.copy_bytes_per_s, median_ms, vocab=VOCAB, device="cuda")
    print(f"{heading(ceilings.copies)}\n\n{table(results)}")
    keep(options.json, ceilings, results)


if __name__ == "__main__":
    main()
