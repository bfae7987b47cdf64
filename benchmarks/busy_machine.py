"""Measures what other processes that compute cost the engine: tokens per second beside none, one and more of them.

    python benchmarks/busy_machine.py [--model smollm2-135m] [--running 1] [--busy 0 1 2] [--rounds 3] [--tokens 200]

Each busy process computes on one core for the whole measurement. The engine runs with one thread and with one for each
core; medians of the rounds, the numbers of busy processes in turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from contextlib import ExitStack
from statistics import median

from pagemill import LLM, SamplingParams
from pagemill.doctor import cpu_model
from pagemill.machine import usable_cores

PROMPT_LEN = 32


def tokens_per_second(llm: LLM, running: int, tokens: int, busy: int) -> float:
    """Returns what the engine brings beside `busy` processes, each in a session of its own, as a user's would be."""
    prompts = [
        {"prompt_token_ids": [(17 * i + 31 * number) % 40000 + 100 for i in range(PROMPT_LEN)]}
        for number in range(running)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    with ExitStack() as stack:
        for _ in range(busy):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
        time.sleep(0.2)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return running * tokens / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--running", type=int, default=1)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    cores = usable_cores()
    print(f"{options.model}, {options.running} running, {cores} cores of {cpu_model()}")
    print("| threads | busy processes | tokens/s | of alone |\n| ---: | ---: | ---: | ---: |")
    for threads in sorted({1, cores}):
        llm = LLM(options.model, num_threads=threads, speculative_config="off", max_model_len=2048)
        tokens_per_second(llm, options.running, 20, 0)
        found: dict[int, list[float]] = {busy: [] for busy in options.busy}
        for _ in range(options.rounds):
            for busy, speeds in found.items():
                speeds.append(tokens_per_second(llm, options.running, options.tokens, busy))
        alone = median(found[options.busy[0]])
        for busy, speeds in found.items():
            print(f"| {threads} | {busy} | {median(speeds):.0f} | {median(speeds) / alone:.2f} |", flush=True)
        llm.close()


if __name__ == "__main__":
    main()
