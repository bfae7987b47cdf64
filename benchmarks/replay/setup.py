"""Holds what the replays have in common: arguments, the simulated engine, where results go."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.replay.workload import add_workload_argument

from pagemill.arguments import arguments_of
from pagemill.config import EngineConfig
from pagemill.errors import ConfigError
from pagemill.planner.replica import Setup
from pagemill.planner.workload import workload_named
from pagemill.simulate.roofline import DEVICES, SHAPES, Roofline, names_in, read_device, read_shape
from pagemill.simulate.step_time import StepModel, StepTimes
from pagemill.simulate.trace import TracedRequest, read_trace, slice_of

CALIBRATION = Path(__file__).parent / "xeon-amx-1-thread.json"
RESULTS = Path("benchmarks/results/replay")
MIB = 1 << 20


def add_trace_arguments(
    parser: argparse.ArgumentParser, *, seconds: float, rate: float, workload: str, whole: bool = False
) -> None:
    """Adds a trace and the part of it that is taken, and the workload that is served without one.

    whole: whether `seconds` is the workload's alone, and a trace is by default taken to its end.
    """
    parser.add_argument("trace", type=Path, nargs="?", help="Azure's .csv or Mooncake's .jsonl; else the --workload")
    add_workload_argument(parser, workload)
    parser.add_argument("--start", type=float, default=0.0, help="seconds of the trace to skip")
    parser.add_argument(
        "--seconds",
        type=above_zero,
        default=None if whole else seconds,
        help=f"how long requests come: by default {f'all of the trace, else {seconds:g}' if whole else f'{seconds:g}'}",
    )
    parser.set_defaults(workload_seconds=seconds)
    parser.add_argument("--rate", type=above_zero, default=rate, help="times as fast as in the trace; else requests/s")


def above_zero(text: str) -> float:
    """Returns an option's number. Raises ArgumentTypeError if it is not above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def all_above_zero(text: str) -> list[float]:
    """Returns the numbers that an option lists by commas. Raises ArgumentTypeError for one that is not above 0."""
    return [above_zero(number) for number in text.split(",")]


def add_engine_arguments(parser: argparse.ArgumentParser, *, kv_mib: int = 2048, calibrated: bool = True) -> None:
    """Adds the engine's settings. calibrated: whether step times may come from a calibration."""
    if calibrated:
        parser.add_argument("--calibration", type=Path, default=CALIBRATION, help="step times, made by `calibrate`")
    parser.add_argument(
        "--kv-mib", type=int, help=f"bytes of the KV pool, in MiB: by default {kv_mib}, or what a --device has left"
    )
    parser.set_defaults(calibrated_kv_mib=kv_mib)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--kv-compaction", default="auto", choices=arguments_of(EngineConfig)["kv_compaction"].choices)


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for tables (JSON) and plots (PNG)")


def add_device_arguments(
    parser: argparse.ArgumentParser, *, device: str | None = None, shape: str | None = None
) -> None:
    parser.add_argument(
        "--device",
        default=device,
        help=f"model this device's step times: {', '.join(names_in(DEVICES))}, or a .json file",
    )
    parser.add_argument("--shape", default=shape, help=f"model on it: {', '.join(names_in(SHAPES))}, or a .json file")
    parser.add_argument("--dtype", default="bfloat16", help="of its weights: bfloat16, float16, float32, float8, int8")


def add_replay_arguments(
    parser: argparse.ArgumentParser, *, seconds: float, rate: float, kv_mib: int = 2048, workload: str = "sharegpt"
) -> None:
    """Adds all of the above. workload: what is served without a trace."""
    add_trace_arguments(parser, seconds=seconds, rate=rate, workload=workload)
    add_engine_arguments(parser, kv_mib=kv_mib)
    add_device_arguments(parser)
    add_output_argument(parser)


def add_modelled_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what replays of a generated workload on a modelled device take: by default, as the vLLM paper has both."""
    add_workload_argument(parser, "sharegpt")
    add_engine_arguments(parser, calibrated=False)
    add_device_arguments(parser, device="a100-40", shape="opt-13b")
    add_output_argument(parser)


def begin(arguments: argparse.Namespace) -> tuple[StepModel, list[TracedRequest]]:
    """Prints what is replayed, and returns its step times and the trace."""
    step_times, trace = chosen_step_times(arguments), chosen_trace(arguments)
    print(describe(arguments, step_times, trace), flush=True)
    return step_times, trace


def chosen_step_times(arguments: argparse.Namespace) -> StepModel:
    """Returns the device's or the calibration's step times, and sets `kv_mib` where nobody has."""
    if (arguments.device is None) != (arguments.shape is None):
        raise ConfigError("give both --device and --shape, or neither for step times of a --calibration")
    if arguments.device is None:
        if arguments.kv_mib is None:
            arguments.kv_mib = arguments.calibrated_kv_mib
        return StepTimes.load(arguments.calibration)
    return chosen_roofline(arguments)


def chosen_roofline(arguments: argparse.Namespace) -> Roofline:
    roofline = Roofline(read_device(arguments.device), read_shape(arguments.shape), arguments.dtype)
    if arguments.kv_mib is None:
        arguments.kv_mib = roofline.kv_bytes // MIB
    return roofline


def chosen_trace(arguments: argparse.Namespace) -> list[TracedRequest]:
    """Returns the part of the trace that was asked for, or the workload's requests."""
    if arguments.trace is None:
        seconds = arguments.seconds or arguments.workload_seconds
        return workload_named(arguments.workload).requests(arguments.rate, seconds)
    seconds = arguments.seconds or math.inf
    return slice_of(read_trace(arguments.trace), arguments.start, seconds, arguments.rate)


def source_name(arguments: argparse.Namespace) -> str:
    """Returns the name of the trace's file, or else of the workload or its file."""
    return Path(arguments.workload if arguments.trace is None else arguments.trace).name


def longest_possible(arguments: argparse.Namespace) -> int:
    """Returns the tokens of the longest request that must be expected: the whole trace's, or a workload's context."""
    if arguments.trace is None:
        return workload_named(arguments.workload).context
    return max(request.length for request in read_trace(arguments.trace))


def chosen_setup(arguments: argparse.Namespace, block_size: int = 16) -> Setup:
    return Setup(
        arguments.kv_mib * MIB,
        block_size,
        arguments.max_num_seqs,
        arguments.max_num_batched_tokens,
        kv_compaction=arguments.kv_compaction,
    )


def describe(arguments: argparse.Namespace, step_times: StepModel, trace: Sequence[TracedRequest]) -> str:
    prompts, outputs = sum(r.prompt_len for r in trace), sum(r.output_len for r in trace)
    pace = f"{arguments.rate:g} times the trace's rate" if arguments.trace else f"{arguments.rate:g} a second"
    return (
        f"{source_name(arguments)}: {len(trace)} requests in {trace[-1].arrival_s:.0f} s "
        f"({pace}), {prompts} prompt and {outputs} output tokens\n"
        f"step times: {step_times.description}; KV pool {arguments.kv_mib} MiB"
    )


def link_speed(roofline: Roofline) -> float:
    """Returns the bytes per second of the device's link to host memory. Raises ConfigError where there is none."""
    device = roofline.device
    if device.link_bytes_per_s is None:
        raise ConfigError(f"{device.about} has no link: its pool lies in host memory; choose another --device")
    return device.efficiency["link"] * device.link_bytes_per_s
