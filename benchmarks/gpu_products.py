"""Times products of few rows with bf16 weights on a GPU: torch's (cuBLAS), and those of `ops/triton_linear.py`, beside
the time that a copy takes for what they read and write.

    python -m benchmarks.gpu_products [--quick] [--rows 1,16] [--json FILE]
    python -m benchmarks.gpu_products --sweep [--seconds 50] [--rows 1,16] [--json FILE]

Shapes are those of Llama 3 8B's layers and head. Products run one behind the other in a CUDA graph, each with another
copy of the weight, of which there are 512 MB or more: none comes from the L2 cache. "early" ones begin while the one
before ends. Times are medians of five replays; a copy's speed counts what is read and what is written.

--sweep looks for better forms (`gpu_forms.py`), and says what it has as it goes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from benchmarks.gpu_weights import SHAPES
from benchmarks.on_gpu import DEVICE, heading, keep, measure_ceilings, need_gpu, parser_for
from torch import Tensor

from pagemill.ops.triton_early import EARLY_CAPABILITY
from pagemill.ops.triton_linear import Form, forms_of, multiply

ROWS = (1, 2, 4, 8, 16, 32, 64)
DISTINCT_BYTES = 512 << 20
CYCLES = 16
"""Through all copies of a weight, in a graph."""
CUBLAS, TRITON, EARLY = "cuBLAS", "Triton", "Triton, early"

Call = Callable[[], object]
MicrosecondsOf = Callable[[Sequence[Call], int], float]
"""Times the calls of a list, one after the other, so many times; returns the microseconds of one call."""


@dataclass(frozen=True)
class Result:
    """Holds one product. us: microseconds; share: of a copy's speed. form: of Triton's."""

    layer: str
    rows: int
    by: str
    us: float
    share: float
    form: Form | None = None


class Weights(NamedTuple):
    """Holds copies of a layer's weight, and the speed of a copy."""

    layer: str
    copies: Tensor
    bytes_per_s: float

    def x(self, rows: int) -> Tensor:
        return torch.randn(rows, self.copies.shape[2], device=self.copies.device).to(self.copies.dtype)

    def by_torch(self, x: Tensor) -> list[Call]:
        return [lambda weight=weight: F.linear(x, weight) for weight in self.copies]

    def by_triton(self, x: Tensor, form: Form, early: bool) -> list[Call]:
        return [lambda weight=weight: multiply(x, weight, None, form, early) for weight in self.copies]

    def result(self, rows: int, by: str, us: float, form: Form | None) -> Result:
        _, outputs, columns = self.copies.shape
        moved = (outputs * columns + rows * (outputs + columns)) * self.copies.itemsize
        return Result(self.layer, rows, by, us, moved / us * 1e6 / self.bytes_per_s, form)


def draw_weights(
    shapes: dict[str, tuple[int, int]], bytes_per_s: float, dtype: torch.dtype, device: str, distinct: int
) -> Iterator[Weights]:
    """Draws copies of each weight, two at least, of so many distinct bytes."""
    for layer, (outputs, columns) in shapes.items():
        count = max(2, -(-distinct // (outputs * columns * dtype.itemsize)))
        copies = torch.empty(count, outputs, columns, dtype=dtype, device=device).normal_(std=columns**-0.5)
        yield Weights(layer, copies, bytes_per_s)


class Graphs:
    """Times calls in CUDA graphs that share their memory."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._kept = self._capture([lambda: torch.zeros(1, device=DEVICE)], 1)  # the memory stays as long as a graph

    def __call__(self, calls: Sequence[Call], cycles: int) -> float:
        with torch.cuda.stream(self._stream):
            calls[0]()  # it may have to be loaded
        torch.cuda.synchronize()
        graph = self._capture(calls, cycles)
        with torch.cuda.stream(self._stream):
            graph.replay()
            return sorted(self._replay_us(graph) for _ in range(5))[2] / (cycles * len(calls))

    def _capture(self, calls: Sequence[Call], cycles: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            for _ in range(cycles):
                for call in calls:
                    call()
            graph.capture_end()
        return graph

    def _replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


def compare(
    weights: Weights, all_rows: Sequence[int], us_of: MicrosecondsOf, capability: tuple[int, int]
) -> Iterator[Result]:
    """Times torch's products and those in this GPU's forms."""
    for rows in all_rows:
        x = weights.x(rows)
        ways: list[tuple[str, Form | None, list[Call]]] = [(CUBLAS, None, weights.by_torch(x))]
        form = next((form for form in forms_of(capability) if rows <= form.rows), None)
        if form is not None:
            ways.append((TRITON, form, weights.by_triton(x, form, False)))
            if capability >= EARLY_CAPABILITY:
                ways.append((EARLY, form, weights.by_triton(x, form, True)))
        for by, of_triton, calls in ways:
            yield weights.result(rows, by, us_of(calls, CYCLES), of_triton)


def table(results: Sequence[Result]) -> str:
    names = list(dict.fromkeys(at.by for at in results))
    lines = ["| layer | rows | " + " | ".join(f"{name}, µs | share" for name in names) + " |"]
    lines += ["| --- | ---: |" + " ---: | ---: |" * len(names)]
    for layer, rows in dict.fromkeys((at.layer, at.rows) for at in results):
        found = {at.by: at for at in results if (at.layer, at.rows) == (layer, rows)}
        cells = (f"{found[by].us:.1f} | {found[by].share:.0%}" if by in found else "– | –" for by in names)
        lines.append(f"| {layer} | {rows} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read(file: Path) -> list[Result]:
    """Returns the results that a run has kept."""
    results = json.loads(file.read_text())["results"]
    return [Result(**{**at, "form": at["form"] and Form(*at["form"])}) for at in results]


def main() -> None:
    begin = time.perf_counter()
    parser = parser_for(__doc__, "every second number of rows")
    parser.add_argument("--sweep", action="store_true", help="look for better forms")
    parser.add_argument("--seconds", type=float, default=50.0, help="after which a sweep ends (default: 50)")
    parser.add_argument("--rows", help="numbers of rows, as in 1,16")
    options = parser.parse_args()
    rows = None if options.rows is None else tuple(int(part) for part in options.rows.split(","))
    compilers = None
    if options.sweep:
        from benchmarks.compiled_ahead import Compilers
        from benchmarks.gpu_forms import SWEPT_ROWS, Sweep

        compilers = Compilers()  # before the GPU is used
    need_gpu(parser)
    capability = torch.cuda.get_device_capability()
    dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    drawn = draw_weights(SHAPES, ceilings.copy_bytes_per_s, dtype, DEVICE, DISTINCT_BYTES)
    print(heading(str(dtype), ceilings.copies), flush=True)
    if compilers is not None:
        sweep = Sweep(list(drawn), Graphs(), compilers, capability, begin + options.seconds)
        for each in rows or SWEPT_ROWS:
            sweep.try_rows(each)
        results = sweep.results
        compilers.end()
        print(f"{time.perf_counter() - begin:.0f} s")
    else:
        us_of, rows = Graphs(), rows or ROWS[:: 2 if options.quick else 1]
        results = [at for weights in drawn for at in compare(weights, rows, us_of, capability)]
        print(f"\n{table(results)}")
    keep(options.json, ceilings, results)


if __name__ == "__main__":
    main()
