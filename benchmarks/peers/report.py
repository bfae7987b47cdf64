"""Turns measured runs into a report: JSON with everything, a Markdown table of medians, ratios and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]


def write_report(result: dict[str, Any], out: Path) -> None:
    """Writes OUT.json, OUT.md and OUT.png from what `run.py` has gathered so far."""
    rows = summarize(result["runs"])
    out.with_suffix(".json").write_text(json.dumps({**result, "summary": rows}, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(result, rows))
    plot(rows, f"{result['model']} on {result['machine']['cpu']}", out.with_suffix(".png"))


def summarize(runs: list[dict[str, Any]]) -> list[Row]:
    """One row per engine and workload, each figure the median over the rounds. Times in seconds."""
    found: dict[tuple[str, str], list[Row]] = {}
    for run in runs:
        for workload, measured in run["workloads"].items():
            row = {name: run[name] for name in ("engine", "precision", "first_token_s")}
            found.setdefault((workload, run["engine"]), []).append(row | {"workload": workload} | figures(measured))
    return [
        {name: _middle([row[name] for row in rows]) for name in rows[0]} | {"rounds": len(rows)}
        for rows in found.values()
    ]


def figures(measured: dict[str, Any]) -> Row:
    """Of one workload on one engine. ttft_*: time to the first token; tpot_*: per later token, by request."""
    requests = measured["requests"]
    first = [request["first_s"] for request in requests]
    # An engine that returns whole answers shows no time per token.
    longer = [request for request in requests if request["last_s"] > request["first_s"]]
    each = [(request["last_s"] - request["first_s"]) / (request["tokens"] - 1) for request in longer]
    return {
        "tokens_per_s": sum(request["tokens"] for request in requests) / measured["wall_s"],
        "ttft_median_s": median(first),
        "ttft_p99_s": _p99(first),
        "tpot_median_s": median(each) if each else None,
        "tpot_p99_s": _p99(each) if each else None,
        "peak_bytes": measured["peak_bytes"],
    }


def ratios(rows: list[Row]) -> dict[tuple[str, str], dict[str, float]]:
    """(pagemill's setup, peer) -> workload -> pagemill's output tokens per second over the peer's."""
    speed = {(row["engine"], row["workload"]): row["tokens_per_s"] for row in rows}
    found: dict[tuple[str, str], dict[str, float]] = {}
    for (engine, workload), own in speed.items():
        for (peer, other_workload), other in speed.items():
            if engine.startswith("pagemill") and not peer.startswith("pagemill") and workload == other_workload:
                found.setdefault((engine, peer), {})[workload] = own / other
    return found


def markdown(result: dict[str, Any], rows: list[Row]) -> str:
    machine = result["machine"]
    load = ", ".join(map(str, machine["load_average"]))
    lines = [
        f"# {result['model']}, side by side",
        "",
        f"{machine['cpu']} ({', '.join(machine['features'])}), {machine['cores']} cores, {machine['memory_gib']} GiB. "
        f"{machine['date']}; load average at the start {load}, before each run up to "
        f"{max(run['load_average'] for run in result['runs']):.2f}.",
        "",
        "Output tokens per second of the whole workload, prefill included. Medians over the rounds.",
    ]
    head = ["workload", "engine", "precision", "tokens/s", "TTFT ms", "p99", "TPOT ms", "p99", "peak MiB",
            "start to first token s", "rounds"]  # fmt: skip
    table = [
        [
            row["workload"],
            row["engine"],
            row["precision"],
            f"{row['tokens_per_s']:.1f}",
            *(_ms(row[name]) for name in ("ttft_median_s", "ttft_p99_s", "tpot_median_s", "tpot_p99_s")),
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['first_token_s']:.1f}",
            str(row["rounds"]),
        ]
        for row in sorted(rows, key=lambda row: [each["workload"] for each in rows].index(row["workload"]))
    ]
    lines += ["", *_table(head, table)]
    compared = ratios(rows)
    if compared:
        workloads = list(dict.fromkeys(row["workload"] for row in rows))
        table = [
            [f"{own} / {peer}", *(f"{by[workload]:.2f}x" if workload in by else "" for workload in workloads)]
            for (own, peer), by in compared.items()
        ]
        lines += ["", "Ratios of output tokens per second", "", *_table(["", *workloads], table)]
    descriptions = {run["engine"]: run["description"] for run in result["runs"]}
    lines += ["", *(f"- **{engine}**: {description}" for engine, description in descriptions.items())]
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], title: str, path: Path) -> None:
    """Bars of output tokens per second, one group of engines per workload, each workload on its own scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    figure, axes = pyplot.subplots(1, len(workloads), figsize=(2 + 1.8 * len(workloads), 3.6), squeeze=False)
    for axis, workload in zip(axes[0], workloads, strict=True):
        for row in rows:
            if row["workload"] == workload:
                at = engines.index(row["engine"])
                bar = axis.bar(at, row["tokens_per_s"], color=f"C{at}", label=row["engine"])
                axis.bar_label(bar, fmt="%.0f", fontsize=7)
        axis.set_title(workload, fontsize=9)
        axis.set_xticks([])
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("output tokens per second")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=f"C{at}") for at in range(len(engines))]
    figure.legend(handles, engines, loc="lower center", ncols=min(len(engines), 2 * len(workloads)), fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _middle(values: list[Any]) -> Any:
    return median(values) if all(isinstance(value, int | float) for value in values) else values[0]


def _p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.1f}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
