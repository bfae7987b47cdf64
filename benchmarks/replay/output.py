"""Writes results: tables as JSON, plots as PNG, named after the command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import LogFormatter


def write_table(
    arguments: argparse.Namespace, name: str, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    settings = {key: str(value) for key, value in vars(arguments).items() if key not in ("run", "command")}
    _write(arguments.out / f"{name}.json", json.dumps({"settings": settings, "about": about, "rows": rows}, indent=1))


def bars(
    arguments: argparse.Namespace,
    name: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    x_label: str,
    y_label: str,
) -> None:
    """Plots groups of bars, one group per label."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    width = 0.8 / len(series)
    for index, (label, values) in enumerate(series.items()):
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(labels))]
        axes.bar_label(axes.bar(places, values, width, label=label), fmt="%.3g", fontsize=7)
    axes.set_xticks(range(len(labels)), labels)
    _finish(arguments, name, figure, axes, x_label, y_label)


def stacks(
    arguments: argparse.Namespace,
    name: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    x_label: str,
    y_label: str,
) -> None:
    """Plots a bar for each label, in which the series lie one over the other; those of 3 and more are written in."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    below = [0.0] * len(labels)
    for label, values in series.items():
        drawn = axes.bar(range(len(labels)), values, 0.7, below, label=label)
        axes.bar_label(
            drawn, [f"{value:.1f}" if value >= 3 else "" for value in values], label_type="center", fontsize=7
        )
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.set_xticks(range(len(labels)), labels)
    _finish(arguments, name, figure, axes, x_label, y_label)


def lines(
    arguments: argparse.Namespace,
    name: str,
    xs: Sequence[float],
    series: Mapping[str, Sequence[float]],
    x_label: str,
    y_label: str,
) -> None:
    """Plots one line per series over a logarithmic x."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for label, values in series.items():
        axes.plot(xs, values, marker="o", markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    _finish(arguments, name, figure, axes, x_label, y_label)


def panels(
    arguments: argparse.Namespace,
    name: str,
    x_label: str,
    charts: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    limits: Mapping[str, tuple[float, float]],
    *,
    x_log: bool = True,
    logarithmic: bool = False,
) -> None:
    """Plots charts side by side, by the label of y: one line of (x, y) per series.

    limits: of y, by its label. x_log, logarithmic: whether x, and y, are logarithmic.
    """
    figure, axes = pyplot.subplots(1, len(charts), figsize=(4.5 * len(charts), 4), layout="constrained")
    for one, (y_label, series) in zip(axes, charts.items(), strict=True):
        for label, points in series.items():
            xs, ys = zip(*points, strict=True)
            one.plot(xs, ys, marker="o", markersize=3, label=label if one is axes[0] else None)
        if x_log:
            one.set_xscale("log", base=2)
            one.xaxis.set_major_formatter("{x:g}")
        one.set_xlabel(x_label)
        one.set_ylabel(y_label)
        if logarithmic:
            one.set_yscale("log")
            one.yaxis.set_major_formatter("{x:g}")
            one.yaxis.set_minor_formatter(LogFormatter())
        else:
            one.set_ylim(*limits.get(y_label, (0.0, None)))
        one.grid(alpha=0.3)
    _save(arguments, name, figure)


def _finish(arguments: argparse.Namespace, name: str, figure: Any, axes: Any, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", alpha=0.3)
    _save(arguments, name, figure)


def _save(arguments: argparse.Namespace, name: str, figure: Any) -> None:
    if arguments.device is not None:
        figure.supxlabel(f"modelled: {arguments.shape} on {arguments.device}, {arguments.dtype}", fontsize=8)
    figure.legend(fontsize=8, loc="outside upper center", ncols=4)  # beside what is drawn, wherever that is
    path = arguments.out / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
    print(f"wrote {path}")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(f"\nwrote {path}")
