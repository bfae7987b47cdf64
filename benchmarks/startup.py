"""Times a command from its start to its first token: N new processes, beside `import torch` in the same run.

    python -m benchmarks.startup [MODEL] [--runs 5]

`generate` is `pagemill generate MODEL Hello --max-tokens 1`, to its end; `torch` is `python -c "import torch"`, the
part of it that no engine on torch can do without. They take turns. The phases are those of the engine's process, each
time in a process of their own; what the command does besides, it does meanwhile.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import time

PHASES = """
import sys, time
marks = [("", time.perf_counter())]
def mark(name): marks.append((name, time.perf_counter()))
import gc; gc.disable()
import pagemill.engine.process; mark("front-end modules")
import torch; mark("import torch")
import pagemill.engine.core; mark("engine modules")
from pagemill.config import EngineConfig
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.models.loading import load
from pagemill.sampling.params import SamplingParams
reading = load.open_checkpoint
def opened(*args):
    mark("resolve"); found = reading(*args); mark("header, configuration"); return found
load.open_checkpoint = opened
from pagemill.executor import backend
selecting = backend.cpu_decoder
def selected(*args):
    mark("read, widen, pack weights"); return selecting(*args)
backend.cpu_decoder = selected
core = pagemill.engine.core.EngineCore(EngineConfig(model=str(resolve_model(sys.argv[1]))), None)
mark("decoder, pool, runner")
params = SamplingParams(max_tokens=1)
core.add_request(EngineRequest(request_id="r", prompt_token_ids=[1], params=params, arrival_s=0.0))
core.step(); mark("first step")
print(*(f"{name}={now - before:.4f}" for (_, before), (name, now) in zip(marks, marks[1:])), sep=";")
import os; sys.stdout.flush(); os._exit(0)
"""


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    output_of(command)
    return time.perf_counter() - begin


def output_of(command: list[str]) -> str:
    """Returns what a command writes. Ends this one with what a command says that fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command[:4])} … failed (status {done.returncode}):\n{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    commands = {
        "generate": [sys.executable, "-m", "pagemill", "generate", given.model, "Hello", "--max-tokens", "1"],
        "torch": [sys.executable, "-c", "import torch"],
    }
    seconds(commands["generate"])  # files into the system's cache, the tokenizer into pagemill's
    times: dict[str, list[float]] = {name: [] for name in commands}
    phases: dict[str, list[float]] = {}
    for _ in range(given.runs):
        for name, command in commands.items():
            times[name].append(seconds(command))
        for phase in output_of([sys.executable, "-c", PHASES, given.model]).strip().split(";"):
            name, _, value = phase.partition("=")
            phases.setdefault(name, []).append(float(value))
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{given.runs} runs, medians; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| | seconds | fastest | slowest |\n| --- | ---: | ---: | ---: |")
    for name, values in times.items():
        print(f"| {name} | {medians[name]:.2f} | {min(values):.2f} | {max(values):.2f} |")
    print(f"\ngenerate / torch: {medians['generate'] / medians['torch']:.2f}\n")
    print("| phase of the engine's process | ms |\n| --- | ---: |")
    for name, values in phases.items():
        print(f"| {name} | {statistics.median(values) * 1e3:.0f} |")


if __name__ == "__main__":
    main()
