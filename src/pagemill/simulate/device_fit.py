"""Fits a device to steps that a real engine ran: eight parameters of a roofline, each with a meaning and a unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import CalibrationError
from pagemill.simulate.roofline import DeviceModel, ModelShape, Roofline
from pagemill.simulate.step_time import StepWork, least_nonnegative

LEAST_STEPS = 20
LONGEST = 3.0
"""A step counts as at most so many times as long as modelled: beyond that, something else ran on the machine."""
PRIOR = 1e-4
"""Weight that holds a parameter where it begins, beside an error of 1 in every step: what no step tells stays there."""
ROUNDS = 200
OWN_ROUNDS = 30
LEAST_DEVIATION = 1e-3
"""Smaller deviations count as this share of the median."""
_DELTA = 1e-4
Logarithms = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Holds a step that an engine ran.

    seconds: all that it took. own_s: what of that passed outside of the model. alone: False if something else ran on
    the machine meanwhile.
    """

    work: StepWork
    seconds: float
    own_s: float
    alone: bool = True


def fit_device(
    steps: Sequence[MeasuredStep], like: DeviceModel, model: ModelShape, dtype: str, kv_dtype: str = "auto"
) -> DeviceModel:
    """Returns `like` with the parameters that fit these steps best.

    The time of a step, of a row and of a new row is fitted to the engine's own part of the steps. All else is fitted to
    whole steps, whose errors are taken to grow with their length (a gamma distribution's deviance: McCullagh and
    Nelder, "Generalized Linear Models", 1989, section 8.3), so that sums of steps are right where times scatter to one
    side.
    Efficiencies of K/V and attention are relative to the weights' and products'. Raises CalibrationError for too few
    steps. kv_dtype: as that of the engine that ran them.
    """
    if len(steps) < LEAST_STEPS:
        raise CalibrationError(f"{len(steps)} steps cannot fix a device; measure {LEAST_STEPS} or more")
    works = [step.work for step in steps]
    measured = np.array([step.seconds for step in steps])
    step_s, row_s, new_row_s = _own_costs(steps)
    like = replace(like, step_s=step_s, row_s=row_s, new_row_s=new_row_s)

    def device(at: NDArray[np.float64]) -> DeviceModel:
        byte_s, kv, flop, attention = np.exp(at[:4]).tolist()
        return replace(
            like,
            bytes_per_s=byte_s,
            flop_per_s={dtype: flop}
            if dtype in ("bfloat16", "float16", "float32")
            else {dtype: flop, "bfloat16": flop},
            efficiency={**like.efficiency, "memory": 1.0, "kv": kv, "products": 1.0, "attention": attention},
            overlap=1.0 + float(np.exp(at[4])),
        )

    def logarithms(at: NDArray[np.float64]) -> NDArray[np.float64]:
        roofline = Roofline(device(at), model, dtype, kv_dtype)
        modelled: NDArray[np.float64] = np.log([roofline.seconds(work) for work in works])
        return modelled

    quickest = measured.min()
    rate = model.layer_weights * max(work.tokens / step.seconds for work, step in zip(works, steps, strict=True))
    begin = np.log([model.parameters / quickest, 1.0, 2 * rate, 0.3, 1.0])
    return device(_least(logarithms, np.log(measured), begin))


def _own_costs(steps: Sequence[MeasuredStep]) -> tuple[float, float, float]:
    """Returns the seconds outside of the model per step, per row and per new row, none below 0.

    The sum of absolute deviations is least, so that steps in which something else ran count no more than others. By
    weighted least squares over and over (Schlossmacher, "An iterative technique for absolute deviations curve fitting",
    1973).
    """
    amounts = np.array([(1.0, step.work.rows, step.work.new_rows) for step in steps])
    own_s = np.array([step.own_s for step in steps])
    middle_s = float(np.median(own_s))
    own = own_s / middle_s
    weights = np.ones_like(own)
    for _ in range(OWN_ROUNDS):
        costs = least_nonnegative(amounts * weights[:, None], own * weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(own - amounts @ costs), LEAST_DEVIATION))
    step_s, row_s, new_row_s = (middle_s * costs).tolist()
    return step_s, row_s, new_row_s


def _least(model: Logarithms, measured: NDArray[np.float64], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns where the gamma deviance of measured times from modelled ones is least, near `at`.

    Both are logarithms. By Fisher's scoring, damped as in Levenberg and Marquardt's method (Nocedal and Wright,
    "Numerical Optimization", 2006, section 10.3).
    """
    begin, damping = at, 1e-2
    prior = PRIOR * len(measured)

    def deviance(found: NDArray[np.float64], at: NDArray[np.float64]) -> float:
        over = np.minimum(measured - found, np.log(LONGEST))
        return float((np.exp(over) - over).sum() + prior / 2 * ((at - begin) ** 2).sum())

    found = model(at)
    for _ in range(ROUNDS):
        slopes = np.stack([(model(at + _DELTA * unit) - found) / _DELTA for unit in np.eye(len(at))], axis=1)
        wanted = slopes.T @ (np.minimum(np.exp(measured - found), LONGEST) - 1) - prior * (at - begin)
        square = slopes.T @ slopes + prior * np.eye(len(at))
        while True:
            step = np.clip(np.linalg.solve(square + damping * np.diag(np.diag(square)), wanted), -1.0, 1.0)
            tried = model(at + step)
            if deviance(tried, at + step) <= deviance(found, at):
                break
            damping *= 4
        at, found, damping = at + step, tried, damping / 3
        if np.abs(step).max() < _DELTA:
            break
    return at


@dataclass(frozen=True)
class FitError:
    """Says how far modelled seconds are off in steps of so many tokens, as shares of the measured ones.

    median: of the signed errors; p90: what 90 % are within; total: of the sum of all seconds.
    """

    tokens: str
    steps: int
    median_s: float
    median: float
    p90: float
    total: float


BANDS = ((1, 1), (2, 8), (9, 32), (33, 128), (129, None), (1, None))
"""Numbers of tokens of a step, from and to."""


def fit_errors(steps: Sequence[MeasuredStep], roofline: Roofline) -> list[FitError]:
    """Returns the errors in each of BANDS that has steps."""
    tokens = np.array([step.work.tokens for step in steps])
    measured = np.array([step.seconds for step in steps])
    modelled = np.array([roofline.seconds(step.work) for step in steps])
    found = []
    for low, high in BANDS:
        chosen = (tokens >= low) & (tokens <= (high or np.inf))
        if chosen.any():
            errors = modelled[chosen] / measured[chosen] - 1
            found.append(
                FitError(
                    "all" if (low, high) == BANDS[-1] else _band_name(low, high),
                    int(chosen.sum()),
                    float(np.median(measured[chosen])),
                    float(np.median(errors)),
                    float(np.percentile(np.abs(errors), 90)),
                    float(modelled[chosen].sum() / measured[chosen].sum() - 1),
                )
            )
    return found


def _band_name(low: int, high: int | None) -> str:
    return f"{low} and more" if high is None else str(low) if low == high else f"{low} to {high}"
