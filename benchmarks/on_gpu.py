"""Measures a GPU's ceilings, takes times on it, and tells of a run, for all benchmarks of GPUs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
DEVICE = "cuda"
WARM_MS, RUNS_MS = 25, 200
"""For how long something runs before it is timed, and while it is."""
GEMM_SIZE = 8192
COPY_BYTES = 4 << 30


@dataclass(frozen=True)
class Ceilings:
    """Holds what the GPU does at best: bytes per second, read and written, and FLOP per second in bf16."""

    copy_bytes_per_s: float
    gemm_flop_per_s: float

    @property
    def copies(self) -> str:
        return f"copies {self.copy_bytes_per_s / 1e12:.2f} TB/s"

    @property
    def both(self) -> str:
        return f"{self.copies}, bf16 products {self.gemm_flop_per_s / 1e12:.0f} TFLOP/s"


def parser_for(doc: str | None, quick: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser that knows where results go. quick: what a quick run leaves out; None: there is none."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path)
    return parser


def need_gpu(parser: argparse.ArgumentParser) -> None:
    """Ends the program where torch finds no GPU."""
    if not torch.cuda.is_available():
        parser.error("torch finds no NVIDIA GPU on this machine, and this measures one")


def median_ms(run: Callable[[], object]) -> float:
    import triton.testing

    return float(triton.testing.do_bench(run, warmup=WARM_MS, rep=RUNS_MS, return_mode="median"))


def capture(step: Callable[[], T]) -> tuple[Callable[[], object], T]:
    """Returns a replay of a step's CUDA graph, and the step's result, which each replay overwrites."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):  # kernels are compiled, and libraries take their workspaces
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay(inputs: Callable[[], T] = step) -> None:  # a graph reads its inputs where they lay: they must stay
        graph.replay()

    return replay, result


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """Returns a replay of a step's CUDA graph; the step itself where there is no GPU."""
    return capture(step)[0] if torch.cuda.is_available() else step


def measure_ceilings() -> Ceilings:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    copy = median_ms(lambda: target.copy_(source))
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = median_ms(lambda: a @ b)
    return Ceilings(2e3 * COPY_BYTES / copy, 2e3 * GEMM_SIZE**3 / product)


def heading(*more: str) -> str:
    """Returns the line that says on what was measured."""
    return ", ".join([torch.cuda.get_device_name(), f"torch {torch.__version__}", *more])


def keep(file: Path | None, ceilings: object, results: object, **more: object) -> None:
    """Writes a run as JSON, if there is a file for it."""
    if file is not None:
        file.write_text(json.dumps({"ceilings": ceilings, "results": results, **more}, default=asdict))
