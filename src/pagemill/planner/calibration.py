"""Measures a model's steps on this machine, over a grid of rows, contexts and prompts, and fits a device to them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from pagemill.config import EngineConfig
from pagemill.doctor import cpu_model
from pagemill.errors import CalibrationError
from pagemill.planner.real_engine import CLOCKS, RealEngine
from pagemill.simulate.device_fit import FitError, MeasuredStep, fit_device, fit_errors
from pagemill.simulate.roofline import EFFICIENCIES, DeviceModel, Roofline
from pagemill.simulate.step_time import StepWork

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (32, 128, 512, 2048)
PROMPTS = (16, 64, 192, 448)
"""Tokens of a prompt that comes while the rows generate."""
MOST_TOKENS = 8192
"""The most tokens of all contexts of a point: computing them is most of the time that a point takes."""
OUTPUT_LEN = 256
"""More tokens than a row generates until its point is measured."""
DECODE_STEPS = 40
PROMPT_STEPS = 2
"""Steps of a point that only generate, and that take in a prompt of each length. Prompts come between the others, as
they do where requests are served: right behind one another they take less, since what only they use is in the caches.
"""

TRIES = 3
"""How often a point is measured until enough of its steps had the machine for themselves."""
ENOUGH_ALONE = 0.5
"""Share of a point's steps that are enough."""


class Point(NamedTuple):
    """Is a point of the grid: so many rows generate at this context. round: how often it was measured before."""

    rows: int
    context: int
    round: int


@dataclass(frozen=True)
class Calibration:
    """Holds what a calibration found."""

    device: DeviceModel
    roofline: Roofline
    steps: list[MeasuredStep]

    @property
    def errors(self) -> list[FitError]:
        return fit_errors(self.steps, self.roofline)

    @property
    def disturbed(self) -> float:
        """Returns the share of the steps during which something else ran on the machine."""
        return sum(not step.alone for step in self.steps) / len(self.steps)

    def save(self, path: Path, name: str) -> None:
        """Writes the device in the form of `devices.json`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({name: asdict(self.device)}, indent=1) + "\n")


def grid(rounds: int, longest: int, most_rows: int, most_tokens: int) -> list[Point]:
    """Returns the points, those of each round in another order, so that slow minutes of a machine hit them alike.

    longest: tokens of a sequence at most. most_rows: as max_num_seqs. most_tokens: as max_num_batched_tokens.
    """
    points = []
    for round_number in range(rounds):
        one_round = [
            Point(rows, context, round_number)
            for rows in ROWS
            for context in CONTEXTS
            if rows < min(most_rows, most_tokens) and rows * context <= MOST_TOKENS and context + OUTPUT_LEN < longest
        ]
        random.Random(round_number).shuffle(one_round)
        points += one_round
    return points


class StepFile:
    """Keeps measured steps in a file, one point a line, so that a calibration that was cut off goes on where it was.

    settings: what the steps depend on; a file with others is begun anew.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self.points: dict[Point, list[MeasuredStep]] = {}
        head = json.dumps(settings, sort_keys=True)
        text = path.read_text() if path.is_file() else ""
        lines = text.splitlines()
        if lines and lines[0] == head:
            if not text.endswith("\n"):  # what was cut off must not take the next point's line along
                path.write_text(text + "\n")
            for line in lines[1:]:
                self._read(line)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(head + "\n")

    def _read(self, line: str) -> None:
        """Takes in a line, unless it was cut off in the middle of writing."""
        try:
            found = json.loads(line)
            steps = [MeasuredStep(StepWork(*work), *rest) for work, *rest in found["steps"]]
            self.points[Point(*found["point"])] = steps
        except (ValueError, KeyError, TypeError):
            return

    def add(self, point: Point, steps: list[MeasuredStep]) -> None:
        self.points[point] = steps
        rows = [[step.work, step.seconds, step.own_s, step.alone] for step in steps]
        with self._path.open("a") as file:
            file.write(json.dumps({"point": point, "steps": rows}) + "\n")


def measure(engine: RealEngine, points: list[Point], kept: StepFile, progress: Callable[[int], None]) -> None:
    """Measures the points that the file does not have. progress(done): called before the first and after each."""
    left = [point for point in points if point not in kept.points]
    progress(len(points) - len(left))
    if left:
        _measure_point(engine, left[0])  # warms up
    for number, point in enumerate(left, start=len(points) - len(left) + 1):
        kept.add(point, _measure_alone(engine, point))
        progress(number)


def _measure_alone(engine: RealEngine, point: Point) -> list[MeasuredStep]:
    """Returns the steps of a point that had the machine for themselves, of several tries if need be.

    Where even these had hardly any, all steps of the last one.
    """
    alone: list[MeasuredStep] = []
    steps: list[MeasuredStep] = []
    for _ in range(TRIES):
        steps = _measure_point(engine, point)
        alone += [step for step in steps if step.alone]
        if len(alone) >= ENOUGH_ALONE * len(steps):
            return alone
    return steps


def _measure_point(engine: RealEngine, point: Point) -> list[MeasuredStep]:
    """Returns all steps of computing the contexts, and of generating at them with prompts in between."""
    engine.steps.clear()
    live = {engine.add(engine.prompt(point.context), OUTPUT_LEN) for _ in range(point.rows)}
    started: set[str] = set()
    while started != live:
        started |= {request_id for request_id, _ in engine.step()}
    budget = engine.core.config.max_num_batched_tokens - point.rows
    prompts = [length for length in PROMPTS if length <= budget for _ in range(PROMPT_STEPS)]
    for length in prompts:
        _generate(engine, DECODE_STEPS // len(prompts))
        engine.add(engine.prompt(length), 1)
        engine.step()
    _generate(engine, DECODE_STEPS % len(prompts) if prompts else DECODE_STEPS)
    engine.core.abort(live)
    while engine.core.has_work():
        engine.step()
    return [*engine.steps]


def _generate(engine: RealEngine, steps: int) -> None:
    for _ in range(steps):
        engine.step()


def calibrate(
    config: EngineConfig,
    rounds: int,
    kept: Path,
    *,
    clock: str = "wall",
    loading: Callable[[int, int], None] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Returns a device that is this machine, as this model's steps find it.

    clock: "wall", or "cpu": one thread, by its CPU time, where the machine has other things to do.
    rounds: how often each point of the grid is measured. kept: where steps lie until all are measured.
    loading(done, total): bytes of weights. progress(done, total): points of the grid.
    Raises CalibrationError if the engine's limits leave too few points, and as an engine that cannot be built does.
    """
    if clock == "cpu":
        config = replace(config, num_threads=1)
    config = replace(config, target_tpot_ms="off")  # steps are as large as they are asked to be
    engine = RealEngine(config, loading, CLOCKS[clock])
    dtype = weights_dtype(engine)
    core = engine.core
    longest = core.scheduler.longest_sequence(core.ready.max_model_len)
    points = grid(rounds, longest, config.max_num_seqs, config.max_num_batched_tokens)
    if len({point.rows for point in points}) < 2:
        raise CalibrationError(
            f"max_num_seqs is {config.max_num_seqs}, max_num_batched_tokens {config.max_num_batched_tokens} and the "
            f"longest sequence {longest} tokens: that leaves {len(points)} points to measure; raise them, or kv_memory"
        )
    machine = f"{core.ready.description}; {cpu_model()}"
    file = StepFile(
        kept,
        {
            "machine": machine,
            "model": config.model,
            "dtype": dtype,
            "clock": clock,
            "rounds": rounds,
            "config": repr(config),
        },
    )
    measure(engine, points, file, lambda done: progress(done, len(points)))
    steps = [step for point in points for step in file.points[point]]
    kv_dtype = engine.kv_shape.format or "auto"
    device = fit_device(steps, _like(engine, machine), engine.shape, dtype, kv_dtype)
    calibration = Calibration(device, Roofline(device, engine.shape, dtype, kv_dtype), steps)
    everything = calibration.errors[-1]
    disturbed = f" ({calibration.disturbed:.0%} of them while something else ran)" if calibration.disturbed else ""
    fitted = (
        f"fitted to {len(steps)} steps{disturbed} of {config.model} in {dtype} on "
        f"{datetime.now(timezone.utc):%Y-%m-%d}, by the {clock} clock: "
        f"median error {everything.median:+.1%}, 90 % of the steps within {everything.p90:.0%}, sum of all "
        f"{everything.total:+.1%}"
    )
    names = ("bytes_per_s", "flop_per_s", "efficiency", "overlap", "step_s, row_s, new_row_s")
    device = replace(device, sources={**device.sources, **dict.fromkeys(names, fitted)})
    return replace(calibration, device=device, roofline=replace(calibration.roofline, device=device))


def weights_dtype(engine: RealEngine) -> str:
    """Returns the dtype of the weights, as `Roofline` names it."""
    return "int8" if engine.core.executor.facts.quantization is not None else engine.dtype


def _like(engine: RealEngine, machine: str) -> DeviceModel:
    """Returns this machine with rates that are still to be fitted."""
    memory = engine.core.executor.memory()
    return DeviceModel(
        about=f"this machine ({machine})",
        memory_bytes=memory.total,
        bytes_per_s=1.0,
        flop_per_s={"bfloat16": 1.0},
        link_bytes_per_s=None,
        efficiency=dict.fromkeys(EFFICIENCIES, 1.0),
        step_s=0.0,
        row_s=0.0,
        memory_share=0.8,
        working_bytes=1 << 30,
        sources={
            "memory_bytes": "what the system says",
            "link_bytes_per_s": "not measured",
            "memory_share, working_bytes": "assumed",
            "peer_bytes_per_s, peers, all_reduce_s": "not measured: one device",
            "price_per_hour": "nobody has said; give one with --price",
        },
    )
