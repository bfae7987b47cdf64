"""Holds the devices that steps are modelled on against steps and requests that were timed on them.

    python -m benchmarks.replay devices

What was timed is data, `measured_steps.json`, each table with its source: this project's own decode steps on an H200,
and what others have published. A case is a decode step of so many rows of a context; a prompt's step; or a batch whose
prompts are computed in one step and whose answers all have one length. It runs nothing and needs no GPU. A difference
of +10 % is a model that takes 10 % longer than what was timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.replay.setup import add_output_argument

from pagemill.simulate.roofline import Roofline, read_device, read_shape
from pagemill.simulate.step_time import StepWork

OWN = "pagemill"
MEASURED = Path(__file__).with_name("measured_steps.json")


class Case(NamedTuple):
    """Is something that was timed, and what the model says of it, in seconds. name: says what it is."""

    name: str
    measured_s: float
    modelled_s: float

    @property
    def difference(self) -> float:
        return self.modelled_s / self.measured_s - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    from benchmarks.replay.output import write_table

    rows: list[dict[str, Any]] = []
    for table in json.loads(MEASURED.read_text()):
        roofline = roofline_of(table)
        print(f"{roofline.description}\nbeside {table['by']}: {table['source']}\n")
        print("| | measured | modelled | difference |\n| --- | ---: | ---: | ---: |")
        for case in cases_of(table, roofline):
            print(f"| {case.name} | {_time(case.measured_s)} | {_time(case.modelled_s)} | {case.difference:+.0%} |")
            rows.append({"device": table["device"], "shape": table["shape"], **case._asdict()})
        print()
    write_table(arguments, "devices", {}, rows)


def roofline_of(table: dict[str, Any]) -> Roofline:
    device = read_device(table["device"])
    if table["by"] != OWN:
        device = replace(device, kv_formats={})  # these are shares that this project's kernels reach
    return Roofline(device, read_shape(table["shape"]), table["dtype"], table["kv_dtype"])


def cases_of(table: dict[str, Any], roofline: Roofline) -> Iterator[Case]:
    for case in table["cases"]:
        rows = case["rows"]
        if "context" in case:
            name = f"decode step, {rows} x {case['context']:,}"
            yield Case(name, case["ms"] / 1e3, decode_s(roofline, rows, case["context"]))
        elif "output" in case:
            prompt, output = case["prompt"], case["output"]
            seconds = prompts_s(roofline, rows, prompt)
            seconds += sum(decode_s(roofline, rows, prompt + at) for at in range(1, output))
            yield Case(f"batch, {rows} x ({prompt:,} + {output:,})", rows * output / case["tokens_per_s"], seconds)
        else:
            name = f"first token, {case['prompt']:,}"
            yield Case(name, case["ms"] / 1e3, prompts_s(roofline, rows, case["prompt"]))


def decode_s(roofline: Roofline, rows: int, context: int) -> float:
    """Returns the seconds of a step that gives each row its next token."""
    seen = roofline.model.layers * rows * context
    return roofline.seconds(StepWork(rows, rows, rows, seen, seen))


def prompts_s(roofline: Roofline, rows: int, prompt: int) -> float:
    """Returns the seconds of a step that computes each row's whole prompt."""
    layers = roofline.model.layers
    pairs = layers * rows * prompt * (prompt + 1) // 2
    return roofline.seconds(StepWork(rows, rows * prompt, rows, pairs, layers * rows * prompt))


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.1 else f"{seconds:.3g} s"
