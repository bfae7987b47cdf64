"""Draws measured speeds and latencies: pagemill in colour, its peers in grey."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

OWN = ("#c2410c", "#ea7317", "#f2a65a", "#f7c59f", "#fbe3cf")
GREYS = ("#475569", "#94a3b8", "#cbd5e1", "#64748b", "#e2e8f0")


def plot_speeds(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plots bars of output tokens per second: a panel per workload on its own scale, the fastest engine on top."""
    pyplot = _pyplot()
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    most = max(sum(row["workload"] == workload for row in rows) for workload in workloads)
    columns = min(len(workloads), 3)
    lines = math.ceil(len(workloads) / columns)
    figure, axes = pyplot.subplots(
        lines,
        columns,
        figsize=(max(5.5, 3.4 * columns), 0.6 + lines * (0.5 + 0.22 * most)),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(workloads) :]:
        axis.set_visible(False)
    for axis, workload in zip(axes.flat, workloads, strict=False):
        here = sorted((row for row in rows if row["workload"] == workload), key=lambda row: float(row["tokens_per_s"]))
        own = [row["engine"].startswith("pagemill") for row in here]
        names = [row["engine"] for row in here]
        bars = axis.barh(
            names, [row["tokens_per_s"] for row in here], color=[OWN[0] if is_own else GREYS[2] for is_own in own]
        )
        labels = [f"{'< ' if row['stopped_s'] is not None else ''}{row['tokens_per_s']:.0f}" for row in here]
        axis.bar_label(bars, labels, padding=2, fontsize=7)
        for label, is_own in zip(axis.get_yticklabels(), own, strict=True):
            label.set_fontweight("bold" if is_own else "normal")
        axis.set_title(workload, fontsize=9, loc="left")
        axis.tick_params(axis="y", labelsize=7, length=0)
        axis.set_xticks([])
        axis.margins(x=0.16)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle(f"Output tokens per second. {title}", fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_capacity(result: dict[str, Any], title: str, path: Path) -> None:
    """Plots p99 of time per output token and of time to first token against the rate of arrivals, a line per engine."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for axis, name, label in (
        (axes[0], "tpot_p99_s", "p99 time per output token, ms"),
        (axes[1], "ttft_p99_s", "p99 time to first token, ms"),
    ):
        limit_s = result[f"slo_{name}"]
        shades = {True: iter(OWN * 2), False: iter(GREYS * 2)}
        for engine, found in result["engines"].items():
            own = engine.startswith("pagemill")
            points = sorted(found["rates"], key=lambda row: float(row["rate"]))
            axis.plot(
                [row["rate"] for row in points],
                [1000 * row[name] for row in points],
                color=next(shades[own]),
                linewidth=2 if own else 1.4,
                marker="o",
                markersize=3.5,
                label=engine,
            )
        axis.set_xlabel("requests per second", fontsize=8)
        axis.set_title(label, fontsize=9, loc="left")
        axis.tick_params(labelsize=7)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        if limit_s is not None:
            limit_ms = 1000 * limit_s
            axis.axhline(limit_ms, color="#111827", linewidth=0.8, linestyle=":")
            axis.annotate(f"limit {limit_ms:.0f} ms", (0.01, limit_ms), xycoords=("axes fraction", "data"), fontsize=7,
                          va="bottom")  # fmt: skip
    axes[0].legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_shares(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plots shares of blocks saved by sequences that fork: a panel per workload, what is published as a grey band."""
    pyplot = _pyplot()
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure, axes = pyplot.subplots(
        1, len(workloads), figsize=(3.6 * len(workloads), 3), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, workload in zip(axes.flat, workloads, strict=True):
        here = [row for row in rows if row["workload"] == workload]
        for place, row in enumerate(here):
            low, high = row["published"]
            axis.bar(place, high - low, 0.9, low, color=GREYS[2])
        bars = axis.bar([row["mode"] for row in here], [100 * row["saved"] for row in here], 0.5, color=OWN[0])
        axis.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
        axis.set_title(workload, fontsize=9, loc="left")
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].set_ylabel("blocks saved, %; published in grey", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_long_prompt(
    rows: list[dict[str, float]], looks: list[dict[str, int]], kv_bytes: int, title: str, path: Path
) -> None:
    """Draws speed against context, and resident K/V over the run beside all that there are."""
    pyplot = _pyplot()
    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    contexts = [row["context"] / 1024 for row in rows]
    speed.plot(contexts, [row["tokens_per_cpu_s"] for row in rows], color=OWN[0], marker="o", markersize=3.5)
    speed.set_title("tokens per second of one processor", fontsize=9, loc="left")
    speed.set_xlabel("context, thousands of tokens (1,024)", fontsize=8)
    share = [100 * place / len(looks) for place in range(len(looks))]
    pool, streamed = ([look[name] / (1 << 30) for look in looks] for name in ("pool", "streamed"))
    memory.stackplot(share, pool, streamed, colors=[OWN[0], OWN[2]], labels=["pool", "streamed, mapped"])
    memory.axhline(kv_bytes / (1 << 30), color="#111827", linewidth=0.8, linestyle=":", label="all K/V in the end")
    memory.set_title("K/V in memory, GiB", fontsize=9, loc="left")
    memory.set_xlabel("time, % of the run", fontsize=8)
    memory.legend(fontsize=7, loc="lower right", framealpha=0.9)
    for axis in (speed, memory):
        axis.tick_params(labelsize=7)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
