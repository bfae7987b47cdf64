"""`pagemill calibrate`: measures this machine's steps, and makes a device of it that `pagemill plan` takes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pagemill.cli.options import ModelArgument, engine_options
from pagemill.cli.out_file import check_out_file


@engine_options
def calibrate(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", help="Where the device is written, as JSON.")] = Path("device.json"),
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Times that each point is measured.")] = 2,
    clock: Annotated[
        Literal["wall", "cpu"],
        typer.Option("--clock", help="cpu: one thread, by its CPU time, for a machine that has other things to do."),
    ] = "wall",
    *,
    settings: dict[str, Any],
) -> None:
    """Measure a model on this machine, and make a device of it.

    `pagemill plan --device OUT` takes it.

    Steps are measured over a grid of rows, contexts and prompts: a minute or two for a small model. What is measured is
    kept beside OUT until all is, so a run that was cut off goes on where it was.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Table

    from pagemill.cli.loading import messages
    from pagemill.config import config_for
    from pagemill.errors import ConfigError
    from pagemill.planner.calibration import calibrate as measure

    if out.suffix != ".json":
        raise ConfigError(f"--out is {str(out)!r}; its name must end in .json, or pagemill plan would not read it")
    check_out_file("--out", out)
    config = config_for("pagemill calibrate", model, settings)
    kept = out.with_name(f".{out.name}.steps")
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as bar:
        loading, measuring = bar.add_task(f"loading {model}", total=None), bar.add_task("measuring steps", total=None)
        found = measure(
            config,
            rounds,
            kept,
            clock=clock,
            loading=lambda done, total: bar.update(loading, completed=done, total=total),
            progress=lambda done, total: bar.update(measuring, completed=done, total=total),
        )
    found.save(out, out.stem)
    kept.unlink(missing_ok=True)
    device = found.device
    rates = {
        "weights": f"{device.bytes_per_s / 1e9:.1f} GB/s",
        "keys and values": f"{device.efficiency['kv'] * device.bytes_per_s / 1e9:.1f} GB/s",
        "products": f"{next(iter(device.flop_per_s.values())) / 1e9:,.0f} GFLOP/s",
        "attention": f"{device.efficiency['attention'] * next(iter(device.flop_per_s.values())) / 1e9:,.0f} GFLOP/s",
        "overlap of reading and multiplying": f"{device.overlap:.1f}",
        "a step": f"{1e3 * device.step_s:.2f} ms",
        "a row": f"{1e6 * device.row_s:.0f} us",
        "a new row": f"{1e6 * device.new_row_s:.0f} us",
    }
    parameters = Table("fitted", "", title=device.about, title_justify="left")
    for name, value in rates.items():
        parameters.add_row(name, value)
    errors = Table("tokens in the step", "steps", "measured", "median error", "90 % within", "sum")
    for error in found.errors:
        errors.add_row(
            error.tokens, str(error.steps), f"{1e3 * error.median_s:.1f} ms",
            f"{error.median:+.1%}", f"{error.p90:.0%}", f"{error.total:+.1%}",
        )  # fmt: skip
    console = Console()
    console.print(parameters, errors)
    if found.disturbed:
        console.print(
            f"Something else ran on the machine during {found.disturbed:.0%} of the steps, which are so much too long. "
            "Measure again when it is quiet, or with --clock cpu."
        )
    sys.stdout.write(f"wrote {out}; next: pagemill plan {model} --device {out} --dtype {found.roofline.dtype}\n")
