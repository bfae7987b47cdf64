"""Draws a plan's trade-off: latency against the load of a device, one line per size of replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagemill.errors import ConfigError
from pagemill.planner.search import Plan

SUFFIXES = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """Raises ConfigError, before anything is simulated, for a plot of no known form, and without matplotlib."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"plot is {str(path)!r}; its name must end in {', '.join(SUFFIXES)}")
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "a plot is drawn with matplotlib, which is not installed; pip install 'pagemill[plot]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(plan: Plan, path: Path) -> None:
    """Writes the plot. Stars are replicas at their share of the load; dashed lines are the limits."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(13.5, 4), layout="constrained")
    limits = (plan.limits.ttft_p99_s or 0.0, plan.limits.tpot_p99_s)
    for option in plan.options:
        ranks = option.size.settings.ranks
        trials = [trial for trial in option.size.own_trials if not trial.cut]
        for one, name, limit in zip(axes, ("ttft_p99_s", "tpot_p99_s"), limits, strict=False):
            trials = sorted([*trials, option.at_share], key=lambda trial: trial.rate)
            points = [(trial.rate / ranks, 1e3 * getattr(trial, name)) for trial in trials]
            (line,) = one.plot(*zip(*points, strict=True), marker="o", markersize=3)
            one.plot(
                option.at_share.rate / ranks, 1e3 * getattr(option.at_share, name), "*", color=line.get_color(), ms=12
            )
            one.set_ylim(0, 3e3 * limit)
        axes[2].bar(f"{option.replicas} x {ranks}", _height(option))
    for one, name, limit in zip(axes, ("time to first token", "time per token"), limits, strict=False):
        one.axhline(1e3 * limit, linestyle="--", color="gray", linewidth=1)
        one.set_xlabel("requests per second and device")
        one.set_ylabel(f"p99 of the {name}, ms")
        one.grid(alpha=0.3)
    axes[2].set_xlabel("replicas x devices of each")
    axes[2].set_ylabel("US dollars per million output tokens" if _priced(plan) else "devices")
    labels = [f"tensor parallel {option.size.settings.ranks}" for option in plan.options]
    figure.legend(axes[0].lines[:-1:2], labels, fontsize=8, loc="outside upper center", ncols=4)
    figure.supxlabel(plan.options[0].size.roofline.description.replace("*", ""), fontsize=8)
    try:
        figure.savefig(path, dpi=140)
    except OSError as error:
        raise ConfigError(f"plot is {str(path)!r}, which cannot be written: {error}", param="plot") from error
    finally:
        pyplot.close(figure)


def _priced(plan: Plan) -> bool:
    return plan.options[0].cost_output is not None


def _height(option: Any) -> float:
    return float(option.devices if option.cost_output is None else option.cost_output)
