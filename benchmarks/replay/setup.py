"""Holds what the replays have in common: arguments, the simulated engine, where results go."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pagemill.arguments import arguments_of
from pagemill.config import EngineConfig
from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.scheduler import Scheduler
from pagemill.simulate.simulator import END_TOKEN, Served
from pagemill.simulate.step_time import StepTimes
from pagemill.simulate.trace import TracedRequest, read_trace, slice_of

CALIBRATION = Path(__file__).parent / "xeon-amx-1-thread.json"
RESULTS = Path("benchmarks/results/replay")
MIB = 1 << 20


@dataclass(frozen=True)
class Setup:
    """Holds the engine's settings, as in EngineConfig."""

    kv_bytes: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    target_tpot_s: float | None = math.inf
    kv_compaction: str = "auto"

    def memory(self, step_times: StepTimes, **settings: Any) -> MemoryManager:
        shape = step_times.shape
        frames = self.kv_bytes // shape.frame_bytes(self.block_size)
        return MemoryManager(frames, self.block_size, [group.window for group in shape.groups.groups], **settings)

    def scheduler(self, memory: Any, *, caching: bool = True) -> Scheduler:
        return Scheduler(
            memory,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            eos_token_ids=frozenset({END_TOKEN}),
            ageing_s=10.0,
            enable_prefix_caching=caching,
            target_tpot_s=self.target_tpot_s,
            compacts=self.kv_compaction == "auto" and isinstance(memory, MemoryManager),
        )


def add_trace_arguments(parser: argparse.ArgumentParser, *, seconds: float, rate: float) -> None:
    parser.add_argument("trace", type=Path, help="Azure's .csv or Mooncake's .jsonl")
    parser.add_argument("--start", type=float, default=0.0, help="seconds of the trace to skip")
    parser.add_argument("--seconds", type=float, default=seconds, help="seconds of the trace to replay")
    parser.add_argument("--rate", type=float, default=rate, help="arrive this many times as fast as in the trace")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calibration", type=Path, default=CALIBRATION, help="step times, made by `calibrate`")
    parser.add_argument("--kv-mib", type=int, default=2048, help="bytes of the KV pool, in MiB")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--kv-compaction", default="auto", choices=arguments_of(EngineConfig)["kv_compaction"].choices)


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for tables (JSON) and plots (PNG)")


def add_replay_arguments(parser: argparse.ArgumentParser, *, seconds: float, rate: float) -> None:
    """Adds all of the above."""
    add_trace_arguments(parser, seconds=seconds, rate=rate)
    add_engine_arguments(parser)
    add_output_argument(parser)


def begin(arguments: argparse.Namespace) -> tuple[StepTimes, list[TracedRequest]]:
    """Prints what is replayed, and returns its step times and the trace."""
    step_times, trace = StepTimes.load(arguments.calibration), chosen_trace(arguments)
    print(describe(arguments, step_times, trace), flush=True)
    return step_times, trace


def chosen_trace(arguments: argparse.Namespace) -> list[TracedRequest]:
    return slice_of(read_trace(arguments.trace), arguments.start, arguments.seconds, arguments.rate)


def chosen_setup(arguments: argparse.Namespace, block_size: int = 16) -> Setup:
    return Setup(
        arguments.kv_mib * MIB,
        block_size,
        arguments.max_num_seqs,
        arguments.max_num_batched_tokens,
        kv_compaction=arguments.kv_compaction,
    )


def describe(arguments: argparse.Namespace, step_times: StepTimes, trace: Sequence[TracedRequest]) -> str:
    prompts, outputs = sum(r.prompt_len for r in trace), sum(r.output_len for r in trace)
    return (
        f"{arguments.trace.name}: {len(trace)} requests in {trace[-1].arrival_s:.0f} s "
        f"({arguments.rate:g} times the trace's rate), {prompts} prompt and {outputs} output tokens\n"
        f"step times: {step_times.about['model']} in {step_times.about['dtype']} on {step_times.about['cpu']}, "
        f"{step_times.about['cores']} cores; KV pool {arguments.kv_mib} MiB"
    )


def latencies(served: Sequence[Served]) -> dict[str, float]:
    """Medians and 99th percentiles over finished requests, in seconds."""
    finished = [one for one in served if one.finished_s is not None]
    ttft = [one.ttft_s for one in finished]
    tpot = [one.tpot_s for one in finished if one.tpot_s is not None]
    nothing = float("nan")
    return {
        "ttft_median_s": median(ttft) if ttft else nothing,
        "ttft_p99_s": float(np.percentile(ttft, 99)) if ttft else nothing,
        "tpot_median_s": median(tpot) if tpot else nothing,
        "tpot_p99_s": float(np.percentile(tpot, 99)) if tpot else nothing,
    }
