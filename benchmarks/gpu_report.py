"""Runs the GPU's benchmarks, or the GPU's tests, within minutes, and writes one report of both.

    python -m benchmarks.gpu_report benchmarks [--minutes 6] [--full] [--folder build/gpu-report]
    python -m benchmarks.gpu_report tests [--minutes 6] [--folder build/gpu-report] [-- PYTEST_ARGS]

`report.md` in the folder has the machine, what was measured beside the goals and the model's figures, every table, and
the tests' outcome; `report.json` has the same for programs. Each command puts its half in, and leaves the other's.

The benchmarks that the goals are about come first, with all cases, the others with every second one (`--full`: all).
Each may take half of the time that is left, the last one all of it. One that fails, or takes too long, is said to have
done so, with what it had printed, and the next begins. Tests that are stopped for time fail the command.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from benchmarks.gpu_attention import FORMATS
from benchmarks.gpu_machine import describe_machine
from benchmarks.gpu_page import page
from benchmarks.tests_outcome import read_outcome
from benchmarks.timed_command import Outcome, run_command

FOLDERS = ("executor", "attention", "ops", "parity", "kvcache", "sampling", "benchmarks")
"""Folders of the tests that are marked `gpu`: whole engines come first."""
COMPILED = "not compile_for_every_gpu and not gpus_that_are_not_there"
"""Leaves out tests of the compiler, which need no GPU."""
MARKED = "gpu and not slow"
"""Says by marks which tests are run."""
NO_TESTS = 5
"""pytest's exit status where it finds no tests."""
MINUTES = 6.0
"""Limits either half, so that both fit into 15 minutes with a machine's start."""
LEAST_S = 10.0
"""Less time than this is not worth a start."""
WORKERS = 16
"""Processes that test on a GPU at most: compiling takes most of the time, on a core each; each has a CUDA context."""

BENCHMARKS = {
    "decode": ["benchmarks.gpu_decode"],
    "attention": ["benchmarks.gpu_attention", "--caches", "bfloat16"],
    "swap": ["benchmarks.gpu_swap", "--quick"],
    "shared prefixes": ["benchmarks.gpu_shared_prefixes"],
    "products": ["benchmarks.gpu_products", "--quick"],
    "weights": ["benchmarks.gpu_weights", "--quick"],
    "operators": ["benchmarks.gpu_ops", "--quick"],
    "sampling": ["benchmarks.gpu_sampling", "--quick"],
    "launches": ["benchmarks.gpu_launches", "--quick"],
    **{
        f"attention over {format}": ["benchmarks.gpu_attention", "--quick", "--caches", format]
        for format in FORMATS
        if format != "bfloat16"
    },
}
"""Modules and their arguments by name, in the order of their weight."""


def run_benchmarks(benchmarks: dict[str, list[str]], seconds: float, folder: Path) -> dict[str, Outcome]:
    """Runs modules one after another, in `seconds` together. Returns what became of each."""
    end = time.monotonic() + seconds
    outcomes = {}
    for at, (name, arguments) in enumerate(benchmarks.items()):
        left = end - time.monotonic()
        share_s = left if at == len(benchmarks) - 1 else left / 2
        if share_s < LEAST_S:
            outcomes[name] = Outcome("not run", f"{left:.0f} s of {seconds:.0f} s were left", 0.0)
        else:
            data = folder / "data.json"
            data.unlink(missing_ok=True)
            outcome = run_command([sys.executable, "-m", *arguments, "--json", str(data)], share_s)
            if outcome.status == "done":
                outcome = replace(outcome, data=json.loads(data.read_text()))
            data.unlink(missing_ok=True)
            outcomes[name] = outcome
        said = outcomes[name]
        print(f"{name}: {said.status} in {said.seconds:.0f} s{said.why and ': ' + said.why}", flush=True)
    return outcomes


def run_tests(runs: Sequence[Sequence[str]], seconds: float | None, folder: Path) -> tuple[int, dict[str, object]]:
    """Runs pytest with each of these arguments, one run after another, in `seconds` together. Returns the first exit
    status that is not 0, and what `read_outcome` finds in all, with the time they took."""
    outcomes: list[Outcome] = []
    files = [folder / f"tests-{at}.xml" for at in range(len(runs))]
    for file, arguments in zip(files, runs, strict=True):
        file.unlink(missing_ok=True)
        if outcomes and outcomes[-1].status == "stopped":
            break
        left = None if seconds is None else max(0.0, seconds - sum(outcome.seconds for outcome in outcomes))
        options = ["--junit-xml", str(file), "--skip-missing", "-m", MARKED]
        outcomes.append(run_command([sys.executable, "-m", "pytest", *options, *arguments], left, shown=True))
    decides = next((each for each in outcomes if each.exit_code not in (0, NO_TESTS)), None)
    decides = decides or min(outcomes, key=lambda outcome: outcome.exit_code)
    said = {"status": decides.status, "why": decides.why, "seconds": sum(outcome.seconds for outcome in outcomes)}
    if written := [file for file in files if file.exists()]:
        said |= read_outcome(written)
    for file in written:
        file.unlink()
    return decides.exit_code, said


def on_gpus(environment: MutableMapping[str, str]) -> list[list[str]]:
    """Returns what has pytest test on a GPU: in several processes with a core each, where pytest-xdist is installed,
    and then, in one alone, what measures the whole GPU's memory or takes it."""
    options = ["-k", COMPILED]
    if importlib.util.find_spec("xdist") is None:
        return [options]
    environment["PAGEMILL_TESTS_ON_ONE_CORE_EACH"] = "1"
    processes = ["--dist", "worksteal", "--numprocesses", str(max(1, min(WORKERS, os.cpu_count() or 1)))]
    beside, alone = (["-m", f"{MARKED} and {which}"] for which in ("not alone_on_gpu", "alone_on_gpu"))
    return [[*options, *beside, *processes], [*options, *alone]]


def put(folder: Path, half: str, found: object) -> None:
    """Puts one half into the report, beside the other that may be there."""
    file = folder / "report.json"
    report = json.loads(file.read_text()) if file.exists() else {}
    report |= {"machine": describe_machine(), half: found}
    file.write_text(json.dumps(report, indent=1))
    (folder / "report.md").write_text(page(report))
    print(f"wrote {folder / 'report.md'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("benchmarks", "tests"))
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"for all that runs on a GPU (default: {MINUTES:g})"
    )
    parser.add_argument("--full", action="store_true", help="all cases of all benchmarks; give it 60 minutes")
    parser.add_argument("--folder", type=Path, default=Path("build/gpu-report"))
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, pytest_args = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    if options.minutes <= 0:
        parser.error(f"--minutes is {options.minutes:g}; it must be more than 0")
    if pytest_args and options.what == "benchmarks":
        parser.error(f"benchmarks take no {pytest_args[0]!r}; it would be pytest's")
    on_gpu, seconds = torch.cuda.is_available(), 60 * options.minutes
    if options.what == "benchmarks" and not on_gpu:
        why = "" if torch.version.cuda else "; this torch is built without CUDA: name another Python by GPU_PYTHON="
        sys.exit(f"error: torch finds no NVIDIA GPU on this machine, and this measures one{why}")
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.what == "tests":
        folders = [f"tests/{folder}" for folder in FOLDERS]
        runs = [[*folders, *arguments, *pytest_args] for arguments in (on_gpus(os.environ) if on_gpu else [[]])]
        status, found = run_tests(runs, seconds if on_gpu else None, options.folder)
        put(options.folder, "tests", found)
        sys.exit(status)
    benchmarks = {
        name: [part for part in arguments if not (options.full and part == "--quick")]
        for name, arguments in BENCHMARKS.items()
    }
    outcomes = run_benchmarks(benchmarks, seconds, options.folder)
    put(options.folder, "benchmarks", {name: asdict(outcome) for name, outcome in outcomes.items()})
    sys.exit(any(outcome.status == "failed" for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
