"""Looks for the forms in which `ops/triton_linear.py` multiplies fastest on a GPU; `gpu_products --sweep` runs it.

All candidates are compiled in a process for each CPU, and timed roughly on each layer. The best for a whole step, and
each layer's best, are timed well beside cuBLAS; the former also with an early begin. Of the forms that cut a layer's
columns alike, one is timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from benchmarks.compiled_ahead import Compilers
from benchmarks.gpu_products import CUBLAS, CYCLES, EARLY, TRITON, Call, MicrosecondsOf, Result, Weights

from pagemill.ops.triton_early import EARLY_CAPABILITY
from pagemill.ops.triton_linear import Form, multiply, parts_of

SWEPT_ROWS = (1, 16, 64, 4, 32)
"""In the order of their weight."""
LAYERS = 32
ROUGH_CYCLES = 3
FINALISTS = 4
SHARED_BYTES = (72 << 10, 108 << 10, 220 << 10)
"""Bytes that a program of few rows may take, so that three, two, or one of them fit into a multiprocessor."""
PROGRAMS = (1, 264, 528, 1056)
NEVER = float("inf")


class Code(NamedTuple):
    """Names what is compiled: a form, with several parts or one, in a dtype, to begin early or not."""

    form: Form
    parts: bool
    dtype: torch.dtype
    early: bool


def launch_code(code: Code) -> None:
    """Launches what a product of a form launches, of any shape."""
    form = code.form._replace(programs=1 << 20 if code.parts else 1)
    x, weight = (torch.empty(rows, 16384, dtype=code.dtype) for rows in (form.rows, 4096))
    multiply(x, weight, None, form, code.early)


def candidates(rows: int) -> list[Form]:
    """Returns the forms that are tried for so many rows."""
    return list(dict.fromkeys([*(_of_one() if rows == 1 else ()), *_of_few(rows)]))


def _of_one() -> Iterator[Form]:
    for columns in (256, 512, 1024, 2048):
        for warps in (2, 4, 8):
            for of_thread in (16, 32, 64):
                outputs = of_thread * 32 * warps // columns
                if 1 <= outputs <= 16:
                    for programs in (1, 1056, 2112):
                        yield Form(1, outputs, columns, warps, 1, programs)


def _of_few(rows: int) -> Iterator[Form]:
    tile = max(8, 1 << (rows - 1).bit_length())
    for outputs, columns, warps in ((64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 8), (128, 128, 8), (32, 128, 4)):
        for shared in SHARED_BYTES if rows > 1 else SHARED_BYTES[1:2]:
            stages = min(8, shared // ((outputs + tile) * columns * 2))
            if stages >= 2:
                for tiles in (False, True):
                    for programs in PROGRAMS:
                        yield Form(tile, outputs, columns, warps, stages, programs, tiles=tiles)


def times_of(layer: str) -> int:
    """Returns how often a step multiplies by a layer's weight."""
    return 1 if layer == "head" else LAYERS


def best_forms(results: Iterable[Result]) -> tuple[Form, ...]:
    """Returns the form that is best for a step, early where there are such, of each number of rows; in ascending order
    of what they take."""
    step_us: dict[tuple[int, str], dict[Form, list[float]]] = {}
    for at in results:
        if at.form is not None:
            of_form = step_us.setdefault((at.rows, at.by), {}).setdefault(at.form, [])
            of_form.append(times_of(at.layer) * at.us)
    best = []
    for rows in sorted({rows for rows, _ in step_us}):
        found = step_us.get((rows, EARLY)) or step_us[rows, TRITON]
        most = max(len(us) for us in found.values())  # some were timed on one layer only
        best.append(min((form for form in found if len(found[form]) == most), key=lambda form: sum(found[form])))
    return tuple(sorted(dict.fromkeys(best), key=lambda form: form.rows))


class Sweep:
    """Looks for forms on several layers, until `end_s` by `time.perf_counter`. results: of those timed well.

    compilers: None: forms are compiled when they are first timed.
    """

    def __init__(
        self,
        weights: Sequence[Weights],
        us_of: MicrosecondsOf,
        compilers: Compilers | None,
        capability: tuple[int, int],
        end_s: float,
    ) -> None:
        self.results: list[Result] = []
        self._weights, self._us_of, self._compilers = weights, us_of, compilers
        self._capability, self._end_s = capability, end_s

    def try_rows(self, rows: int, tried: Sequence[Form] | None = None) -> None:
        """Tries forms (default: all candidates) for so many rows, and prints the best. Does nothing once time is
        over."""
        if time.perf_counter() > self._end_s:
            print(f"{rows} rows: no time is left")
            return
        forms = self._compiled(tried or candidates(rows), early=False)
        rough = [dict(self._roughly(weights, rows, forms)) for weights in self._weights]
        step = self._of_step(rough)
        first_of = {us: form for form, us in reversed(step.items())}  # those that cut all layers alike take as long
        best = [first_of[us] for us in sorted(first_of)[:FINALISTS]]
        of_layers = [min(found, key=found.__getitem__) for found in rough]
        self._time_well(rows, TRITON, list(dict.fromkeys([*best, *of_layers])))
        if self._capability >= EARLY_CAPABILITY:
            self._time_well(rows, EARLY, self._compiled(best, early=True))

    def _compiled(self, forms: Sequence[Form], *, early: bool) -> Sequence[Form]:
        """Returns the forms that compile."""
        if self._compilers is None:
            return forms
        dtype = self._weights[0].copies.dtype
        kernels = dict.fromkeys(form._replace(programs=1) for form in forms)
        codes = [Code(kernel, parts, dtype, early) for kernel in kernels for parts in (False, True)]
        well, seconds = self._compilers.compile(launch_code, codes, self._capability)
        ill = {code.form for code in set(codes) - set(well)}
        print(f"compiled {len(well)} of {len(codes)} kernels in {seconds:.1f} s", flush=True)
        return [form for form in forms if form._replace(programs=1) not in ill]

    def _roughly(self, weights: Weights, rows: int, forms: Iterable[Form]) -> Iterator[tuple[Form, float]]:
        x, (_, outputs, columns) = weights.x(rows), weights.copies.shape
        known: dict[tuple[Form, int], float] = {}
        for form in forms:
            alike = form._replace(programs=1), parts_of(form, outputs, columns)
            if alike not in known:
                over = time.perf_counter() > self._end_s
                known[alike] = NEVER if over else self._us(weights.by_triton(x, form, False), ROUGH_CYCLES)
            yield form, known[alike]

    def _us(self, calls: Sequence[Call], cycles: int) -> float:
        """Returns a call's microseconds; NEVER if the GPU has too little for it."""
        from triton.runtime.errors import OutOfResources

        try:
            return self._us_of(calls, cycles)
        except OutOfResources:
            return NEVER

    def _time_well(self, rows: int, by: str, forms: Sequence[Form]) -> None:
        """Times forms on all layers, and prints the best; torch's products too, beside those that begin as usual."""
        found: list[dict[Form | None, float]] = []
        for weights in self._weights:
            x = weights.x(rows)
            timed: dict[Form | None, float] = {}
            if by == TRITON:
                timed[None] = self._us_of(weights.by_torch(x), CYCLES)
            for form in forms:
                timed[form] = self._us(weights.by_triton(x, form, by == EARLY), CYCLES)
            found.append(timed)
            of_layer = [weights.result(rows, by if form else CUBLAS, us, form) for form, us in timed.items()]
            self.results += of_layer
            for at in _best(of_layer, lambda at: at.us, lambda at: at.form is None):
                print(f"{at.layer}, {rows} rows: {at.us:7.1f} µs, {at.share:4.0%}, {at.by} {at.form or ''}")
        step = self._of_step(found)
        for form in _best(step, step.__getitem__, lambda form: form is None):
            print(f"* a step's products, {rows} rows: {step[form] / 1e3:.3f} ms, {by if form else CUBLAS} {form or ''}")
        print(flush=True)

    def _of_step(self, found: Sequence[dict[Form, float]]) -> dict[Form, float]:
        """Returns the microseconds of a step's products by form: of all layers, and the head."""
        times = [times_of(weights.layer) for weights in self._weights]
        return {
            form: sum(count * of_layer[form] for count, of_layer in zip(times, found, strict=True)) for form in found[0]
        }


def _best(among, cost, is_kept) -> list:
    """Returns the three of least cost, and those that are kept in any case."""
    ordered = sorted(among, key=cost)
    return [each for at, each in enumerate(ordered) if at < 3 or is_kept(each)]
