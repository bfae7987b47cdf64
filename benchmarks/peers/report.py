"""Turns measured runs into a report: JSON with everything, Markdown tables of medians with goals, and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.goals import GOALS, START_S
from benchmarks.peers.plots import plot_speeds

Row = dict[str, Any]


def write_report(result: dict[str, Any], out: Path) -> None:
    """Writes OUT.json, OUT.md and OUT.png from what `run.py` has gathered so far."""
    rows = summarize(result["runs"])
    out.with_suffix(".json").write_text(json.dumps({**result, "summary": rows}, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(result, rows))
    plot_speeds(rows, f"{result['model']} on {describe_cpu(result['machine'])}", out.with_suffix(".png"))


def summarize(runs: list[dict[str, Any]]) -> list[Row]:
    """Returns a row for each engine and workload. Each figure is the median over the rounds; times are in seconds."""
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
    """Returns the figures of one workload on one engine.

    ttft_*: from a request's arrival to its first token. tpot_*: per later token.
    Of a workload that was stopped after `stopped_s`, tokens_per_s is a bound that the engine stayed under, and other
    figures are None.
    """
    if "stopped_s" in measured:
        unknown = dict.fromkeys(("ttft_median_s", "ttft_p99_s", "tpot_median_s", "tpot_p99_s", "peak_bytes"))
        stopped = measured["stopped_s"]
        return {"tokens_per_s": measured["output_tokens"] / stopped, "stopped_s": stopped, **unknown}
    requests = measured["requests"]
    first = [request["first_s"] - request["arrival_s"] for request in requests]
    # An engine that returns whole answers shows no time per token.
    longer = [request for request in requests if request["last_s"] > request["first_s"]]
    each = [(request["last_s"] - request["first_s"]) / (request["tokens"] - 1) for request in longer]
    return {
        "tokens_per_s": sum(request["tokens"] for request in requests) / measured["wall_s"],
        "stopped_s": None,
        "ttft_median_s": median(first),
        "ttft_p99_s": _p99(first),
        "tpot_median_s": median(each) if each else None,
        "tpot_p99_s": _p99(each) if each else None,
        "peak_bytes": measured["peak_bytes"],
    }


def speed(measured: dict[str, Any]) -> str:
    return _speed(figures(measured))


def ratio(rows: list[Row], workload: str, engine: str, against: tuple[str, ...]) -> tuple[float, Row] | None:
    """Returns `engine`'s output tokens per second over those of the fastest of `against`, and that one's row."""
    by_engine = {row["engine"]: row for row in rows if row["workload"] == workload}
    others = [by_engine[name] for name in against if name in by_engine]
    if engine not in by_engine or not others:
        return None
    fastest = max(others, key=lambda row: float(row["tokens_per_s"]))
    return by_engine[engine]["tokens_per_s"] / fastest["tokens_per_s"], fastest


def markdown(result: dict[str, Any], rows: list[Row]) -> str:
    load = max(run["load_average"] for run in result["runs"])
    lines = [
        f"# {result['model']}, side by side",
        "",
        f"{describe_machine_line(result['machine'])}; load average before a run up to {load:.2f}.",
        "",
        "Output tokens per second of the whole workload, prefill included; medians over the rounds. "
        "TTFT: time to first token. TPOT: time per output token after the first. Both in milliseconds, over requests.",
    ]
    goals = _goals(rows)
    if goals:
        head = ["workload", "engine", "tokens/s", "against", "tokens/s", "ratio", "goal", ""]
        lines += ["", "## Goals", "", *table(head, goals)]
    for precision in dict.fromkeys(row["precision"] for row in rows):
        lines += ["", f"## {precision}", "", *_precision(rows, precision)]
    lines += ["", "## Start to first token", "", *table(["engine", "seconds", "goal"], _starts(rows)), ""]
    descriptions = {run["engine"]: run["description"] for run in result["runs"]}
    lines += [f"- **{engine}**: {description}" for engine, description in descriptions.items()]
    return "\n".join(lines) + "\n"


def describe_cpu(machine: dict[str, Any]) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores"


def describe_machine_line(machine: dict[str, Any]) -> str:
    features = ", ".join(machine["features"])
    return f"{describe_cpu(machine)} ({features}), {machine['memory_gib']} GiB; {machine['date']}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def _goals(rows: list[Row]) -> list[list[str]]:
    found = []
    speeds = {(row["workload"], row["engine"]): _speed(row) for row in rows}
    for goal in GOALS:
        measured = ratio(rows, goal.workload, goal.engine, goal.against)
        if measured is not None:
            times, fastest = measured
            reached = "reached" if times >= goal.at_least else f"{times / goal.at_least:.0%} of it"
            found.append(
                [goal.workload, goal.engine, speeds[goal.workload, goal.engine], fastest["engine"], _speed(fastest),
                 _times(times, fastest), f"{goal.at_least:g}x", reached]
            )  # fmt: skip
    return found


def _precision(rows: list[Row], precision: str) -> list[str]:
    """Returns a table of all engines of one precision by workload. "pagemill is": its speed over that engine's."""
    chosen = [row for row in rows if row["precision"] == precision]
    own = next((row["engine"] for row in chosen if row["engine"].startswith("pagemill")), None)
    head = ["workload", "engine", "tokens/s", f"{own} is" if own else "", "TTFT", "p99", "TPOT", "p99", "peak MiB",
            "rounds"]  # fmt: skip
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in chosen):
        here = [row for row in chosen if row["workload"] == workload]
        for row in sorted(here, key=lambda row: (row["engine"] != own, -row["tokens_per_s"])):
            measured = ratio(here, workload, own, (row["engine"],)) if own and row["engine"] != own else None
            name = f"**{row['engine']}**" if row["engine"] == own else row["engine"]
            lines.append(
                [workload, name, _speed(row), _times(*measured) if measured else ""]
                + [_ms(row[name]) for name in ("ttft_median_s", "ttft_p99_s", "tpot_median_s", "tpot_p99_s")]
                + ["" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}", str(row["rounds"])]
            )
    return table(head, lines)


def _starts(rows: list[Row]) -> list[list[str]]:
    """Returns a row for each engine; its median over the rounds is the same in all its rows."""
    seconds = {row["engine"]: row["first_token_s"] for row in rows}
    return [
        [engine, f"{time:.1f}", f"under {START_S:g}" if engine.startswith("pagemill") else ""]
        for engine, time in seconds.items()
    ]


def _speed(row: Row) -> str:
    if row["stopped_s"] is not None:
        return f"under {row['tokens_per_s']:.1f} (stopped after {row['stopped_s']:.0f} s)"
    return f"{row['tokens_per_s']:.1f}"


def _times(times: float, other: Row) -> str:
    return f"{'over ' if other['stopped_s'] is not None else ''}{times:.2f}x"


def _middle(values: list[Any]) -> Any:
    """Returns the median of the figures that are known, or the one name that all are."""
    known = [value for value in values if value is not None]
    return median(known) if known and all(isinstance(value, int | float) for value in known) else values[0]


def _p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.1f}"
