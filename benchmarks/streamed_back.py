"""Measures what it brings that streamed blocks come back into the pool when it has room again.

    python -m benchmarks.streamed_back [--dtype bfloat16] [--tokens 4096] [--tier disk]

Two prompts of `--tokens` generate side by side in a pool that has room for one and a half of them, so that one streams.
Then the other ends. The tokens that follow take a step each: while all blocks that were streamed still are, and once
they have come back; the same with blocks that never come back. Tokens are compared.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks.peers.engines import BLOCK_ELEMENTS, MODEL
from benchmarks.peers.machine import describe_machine, heading

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling import unstreaming

BLOCK, BESIDE, AFTER = 16, 600, 200
"""Tokens of a block; those that the first request gets beside the second, and those after it."""


class Run(NamedTuple):
    """Seconds of steps after the other's end, by whether anything still streamed; the most blocks that did; tokens."""

    streaming_s: list[float]
    resident_s: list[float]
    streamed: int
    tokens: list[int]


def serve(arguments: argparse.Namespace) -> Run:
    frame = BLOCK_ELEMENTS * int(getattr(torch, arguments.dtype).itemsize)
    tokens = arguments.tokens
    frames = (3 * tokens // 2 + BESIDE) // BLOCK
    with tempfile.TemporaryDirectory() as folder:
        lower: dict[str, Any] = {"kv_host_memory": 2 * frames * frame}
        if arguments.tier == "disk":
            lower = {"kv_disk_memory": 2 * frames * frame, "kv_disk_path": folder}
        core = EngineCore(
            EngineConfig(
                model=str(resolve_model(MODEL)), dtype=arguments.dtype, kv_memory=frames * frame, max_model_len=8192,
                max_num_seqs=2, target_tpot_ms="off", enable_prefix_caching=True, speculative_config="off", **lower,
            )
        )  # fmt: skip
        generator, seconds, got = np.random.default_rng(0), {True: [0.0][:0], False: [0.0][:0]}, [0][:0]
        streamed = 0
        for name, length, new in (("stays", tokens, BESIDE + AFTER), ("other", tokens // 2 + BLOCK, BESIDE)):
            core.add_request(
                EngineRequest(
                    request_id=name, prompt_token_ids=generator.integers(100, 10_000, length).tolist(),
                    params=SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True), arrival_s=time.monotonic(),
                )
            )  # fmt: skip
        ended = False
        while core.has_work():
            streams, begin = core.stats().blocks_streamed, time.perf_counter()
            outputs = core.step()
            if ended:
                seconds[streams > 0].append(time.perf_counter() - begin)
            streamed = max(streamed, streams)
            got += [token for output in outputs if output.request_id == "stays" for token in output.new_token_ids]
            ended = ended or any(output.request_id == "other" and output.finish_reason for output in outputs)
        core.close()
    return Run(seconds[True], seconds[False], streamed, got)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--tier", choices=["host", "disk"], default="disk")
    arguments = parser.parse_args()
    print(heading(describe_machine()), end="\n\n")
    print("| blocks | streamed, at most | a step while they stream, ms | steps | once they are back, ms | steps |")
    print("| --- |" + " ---: |" * 5)
    runs: list[Run] = []
    patience = unstreaming.PATIENCE
    for name, steps in (("stay below", 1 << 30), ("come back", patience)):
        unstreaming.PATIENCE = steps
        one = serve(arguments)
        cells = [f"{1e3 * median(part):.1f} | {len(part)}" if part else "– | 0" for part in one[:2]]
        print(f"| {name} | {one.streamed} | {cells[0]} | {cells[1]} |", flush=True)
        runs.append(one)
    assert runs[0].tokens == runs[1].tokens
    print("\nequal tokens")


if __name__ == "__main__":
    main()
