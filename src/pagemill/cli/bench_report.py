"""What `pagemill bench` measures, and how it shows it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagemill.cli.bench_workload import BenchWorkload

if TYPE_CHECKING:
    from rich.table import Table

BLOCK = 16
"""Tokens that prompts of other texts may have in common behind their prefix."""


@dataclass(frozen=True)
class Sample:
    """One request as its client saw it. Times in seconds; ttft: to the first token, tpot: per later one."""

    latency: float
    ttft: float
    tpot: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class EngineFigures:
    """What only an engine of our own tells."""

    preemptions: int
    kv_blocks: int
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Report:
    """The measurements: times in seconds, each as mean, median and 99th percentile over the requests.

    engine: None where a server was measured. notes: what a reader must know to compare.
    """

    workload: BenchWorkload
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    latency_s: dict[str, float]
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int
    failed_requests: int
    measured: str
    notes: list[str]
    engine: EngineFigures | None = None

    @classmethod
    def of(
        cls,
        workload: BenchWorkload,
        samples: Sequence[Sample],
        duration_s: float,
        measured: str,
        notes: Sequence[str] = (),
        engine: EngineFigures | None = None,
    ) -> Report:
        """Returns the report of a run. measured: the engine or server, in words for people."""
        prompt = sum(sample.prompt_tokens for sample in samples)
        output = sum(sample.output_tokens for sample in samples)
        cached = sum(sample.cached_tokens for sample in samples)
        notes = [*notes]
        if cached > len(samples) * (workload.prefix_len + BLOCK):
            notes.append(f"{cached} of {prompt} prompt tokens were cached by an earlier run: give another --seed.")
        return cls(
            workload=workload,
            duration_s=duration_s,
            output_tokens_per_s=output / duration_s,
            total_tokens_per_s=(prompt + output) / duration_s,
            requests_per_s=len(samples) / duration_s,
            ttft_s=_spread([sample.ttft for sample in samples]),
            tpot_s=_spread([sample.tpot for sample in samples]),
            latency_s=_spread([sample.latency for sample in samples]),
            prompt_tokens=prompt,
            output_tokens=output,
            cached_prompt_tokens=cached,
            failed_requests=workload.num_prompts - len(samples),
            measured=measured,
            notes=notes,
            engine=engine,
        )

    def table(self) -> Table:
        """Returns it for people."""
        from rich.table import Table

        workload = self.workload
        lengths = f"{workload.prefix_len} shared and {workload.input_len} own tokens, answers of {workload.output_len}"
        caption = "\n".join([self.measured, *self.notes])
        table = Table(title=f"{workload.num_prompts} prompts of {lengths}", caption=caption)
        table.add_column("")
        for name in self.ttft_s:
            table.add_column(name, justify="right")
        table.add_row("output tokens/s", f"{self.output_tokens_per_s:.1f}")
        table.add_row("total tokens/s", f"{self.total_tokens_per_s:.1f}")
        table.add_row("requests/s", f"{self.requests_per_s:.2f}")
        spreads = {
            "time to first token, ms": self.ttft_s,
            "time per output token, ms": self.tpot_s,
            "latency, ms": self.latency_s,
        }
        for label, spread in spreads.items():
            table.add_row(label, *(f"{1000 * value:.1f}" for value in spread.values()))
        table.add_row("prompt tokens from the prefix cache", str(self.cached_prompt_tokens))
        if self.failed_requests:
            table.add_row("failed requests", str(self.failed_requests))
        if self.engine is not None:
            table.add_row("preemptions", str(self.engine.preemptions))
            if self.engine.peak_memory_bytes is not None:
                table.add_row("engine's peak memory, MiB", f"{self.engine.peak_memory_bytes / 2**20:.0f}")
        return table


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }
