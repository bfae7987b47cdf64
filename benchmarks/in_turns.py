"""Runs engines in turns of a few steps: within a turn, a shared machine's speed changes less than between seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median, quantiles

from pagemill.engine.core import EngineCore

STEPS_OF_A_TURN = 6
"""The first is left out: what the other engine has left behind counts in it."""


def turns_of_steps(
    cores: Sequence[EngineCore], running: int, steps_of_a_turn: int = STEPS_OF_A_TURN
) -> list[list[float]]:
    """Runs what the engines have to its end. Returns, for each turn in which every step of every engine brought
    `running` tokens, each engine's seconds of a step (the median). Raises SystemExit if a request fails."""
    turns = []
    while any(core.has_work() for core in cores):
        turn = [[_step(core) for _ in range(steps_of_a_turn) if core.has_work()] for core in cores]
        if all(len(steps) == steps_of_a_turn and {new for new, _ in steps} == {running} for steps in turn):
            turns.append([median(seconds for _, seconds in steps[1:]) for steps in turn])
    return turns


def sums_of_steps(cores: Sequence[EngineCore]) -> list[float]:
    """Runs what the engines have to its end, a step of each in turn. Returns each engine's seconds."""
    sums = [0.0] * len(cores)
    while any(core.has_work() for core in cores):
        for index, core in enumerate(cores):
            if core.has_work():
                sums[index] += _step(core)[1]
    return sums


def ratios_of(turns: Sequence[Sequence[float]]) -> str:
    """Returns in words: the milliseconds of two engines, and how often the second takes the first's time."""
    ms = [1e3 * median(times) for times in zip(*turns, strict=True)]
    ratios = [second / first for first, second in turns]
    low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
    return f"{ms[0]:.1f} | {ms[1]:.1f} | {middle:.3f} ({low:.3f} to {high:.3f}, {len(ratios)} turns)"


def _step(core: EngineCore) -> tuple[int, float]:
    """Returns a step's new tokens and seconds."""
    begin = time.perf_counter()
    outputs = core.step()
    seconds = time.perf_counter() - begin
    if failed := next((output.error for output in outputs if output.error is not None), None):
        raise SystemExit(f"a request failed: {failed.message}")
    return sum(len(output.new_token_ids) for output in outputs), seconds
