"""Writes the GPU report's page: the machine, the goals beside what was measured, the tests, and every table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """Holds a row of the table of attention in docs/performance-on-gpus.md. formats: of the cache; its shares count."""

    what: str
    kind: str
    formats: tuple[str, ...]
    contexts: tuple[int, int]
    goal: str
    modelled: str


GOALS = (
    Goal("decode, bf16, contexts of 1k to 16k: share of the speed of a copy", "decode", ("bfloat16",), (1024, 16384),
         "≥ 90 %", "97 %"),
    Goal("decode, bf16, 128k", "decode", ("bfloat16",), (131072, 131072), "≥ 90 %", "99.6 %"),
    Goal("decode, int8 or fp8 cache, 1k to 16k", "decode", ("int8", "fp8_e4m3", "fp8_e5m2"), (1024, 16384), "–",
         "94 %"),
    Goal("decode, int4 cache, 1k to 16k", "decode", ("int4",), (1024, 16384), "–", "90 %"),
    Goal("prefill, bf16, 2k to 32k: share of the speed of a matrix product", "prefill", ("bfloat16",), (2048, 32768),
         "≥ 60 %", "–"),
)  # fmt: skip
STEP_GOAL = "≥ 85 %"
BUSY_GOAL = "≥ 95 %"
MOVE_GOAL, SLOWER_GOAL = "≥ 85 %", "≤ 5 %"
WAYS = {"frames": "pinned memory, by the frames alone", "host tier": "the host tier, as the engine does"}
MOVES = {
    (way, direction): f"blocks {direction}, {'to' if direction == 'out' else 'from'} {where}: share of one large copy"
    for way, where in WAYS.items()
    for direction in ("out", "back")
}
SLOWER = "a decode step beside blocks that move in both directions, by the frames alone: slower by"


def page(report: Report) -> str:
    """Returns the report as Markdown. What was not run is said to be so."""
    return "\n".join([*_lines(report), ""])


def _lines(report: Report) -> Iterator[str]:
    yield "# GPU report"
    yield ""
    yield from ("| | |", "| --- | --- |")
    yield from (f"| {name} | {value} |" for name, value in report["machine"].items())
    benchmarks = report.get("benchmarks", {})
    yield from ("", "## Goals", "", "The least and the greatest of the cases that were measured. Goals are an H200's.")
    yield from _attention(benchmarks)
    yield from _steps(benchmarks)
    yield from _moves(benchmarks)
    yield from ("", "## Tests", "")
    yield from _tests(report["tests"]) if "tests" in report else ["Not run."]
    if not benchmarks:
        yield from ("", "## Benchmarks", "", "Not run.")
    for name, outcome in benchmarks.items():
        yield from ("", f"## Benchmark: {name}", "")
        yield from _part(outcome)


def _attention(benchmarks: Report) -> Iterator[str]:
    measured: dict[str, list[Report]] = {}
    for outcome in benchmarks.values():
        results = (outcome["data"] or {}).get("results")
        if isinstance(results, dict):
            measured |= results
    yield from ("", "| attention | goal | at most, by the model | measured |", "| --- | ---: | ---: | ---: |")
    for goal in GOALS:
        least, most = goal.contexts
        shares = [
            at["share"]
            for format in goal.formats
            for at in measured.get(format, [])
            if at["name"] == goal.kind and least <= at["context"] <= most
        ]
        yield f"| {goal.what} | {goal.goal} | {goal.modelled} | {_range(shares)} |"


def _steps(benchmarks: Report) -> Iterator[str]:
    data = benchmarks.get("decode", {}).get("data")
    shares = f"share of the roofline | GPU busy in the engine, goal {BUSY_GOAL}"
    yield from ("", f"| rows | context | goal | share, by the model | {shares} |")
    yield "| ---: | ---: | ---: | ---: | ---: | ---: |"
    if data is None:
        yield f"| – | – | {STEP_GOAL} | – | not measured | not measured |"
        return
    for at, modelled in zip(data["results"], data["modelled_shares"], strict=True):
        busy = (at["engine"] or {}).get("busy")
        seen = f"{busy['share']:.0%}" if busy else "not measured"
        yield f"| {at['rows']} | {at['context']} | {STEP_GOAL} | {modelled:.0%} | {at['share']:.0%} | {seen} |"


def _moves(benchmarks: Report) -> Iterator[str]:
    data = benchmarks.get("swap", {}).get("data") or {"results": [], "beside": []}
    yield from ("", "| moving blocks | goal | measured |", "| --- | ---: | ---: |")
    for (way, direction), what in MOVES.items():
        shares = [at["share"] for at in data["results"] if (at["way"], at["direction"]) == (way, direction)]
        yield f"| {what} | {MOVE_GOAL} | {_range(shares)} |"
    yield f"| {SLOWER} | {SLOWER_GOAL} | {_range([at['slower'] for at in data['beside'] if at['way'] == 'frames'])} |"


def _range(shares: list[float]) -> str:
    return f"{min(shares):.0%} to {max(shares):.0%} ({len(shares)} cases)" if shares else "not measured"


def _tests(tests: Report) -> Iterator[str]:
    counts = ", ".join(f"{tests[name]} {name}" for name in ("passed", "failed", "skipped") if name in tests)
    why = f" ({tests['why']})" if tests["why"] else ""
    yield f"{counts or 'No outcome was written'}; {tests['status']}{why} after {tests['seconds']:.0f} s."
    if tests.get("failures"):
        yield from ("", "Failed:", "")
        yield from (f"- `{name}`: {' '.join(message.split())}" for name, message in tests["failures"].items())
    if tests.get("reasons"):
        yield from ("", "Skipped:", "")
        yield from (f"- {count}: {reason}" for reason, count in tests["reasons"].items())


def _part(outcome: Report) -> Iterator[str]:
    why = f": {outcome['why']}" if outcome["why"] else ""
    yield f"{outcome['status']} after {outcome['seconds']:.0f} s{why}."
    if outcome["printed"]:
        yield from ("", outcome["printed"].strip())
    if outcome["errors"]:
        yield from ("", "```", outcome["errors"].strip(), "```")
