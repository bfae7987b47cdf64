"""Streams a context longer than the pool from disk: how fast, beside the disk itself and a pool that holds all.

    python -m benchmarks.long_context [--dtype bfloat16] [--tokens 131072] [--kv-memory 512MiB] [--folder DIR]
        [--runs streamed,cold] [--check]

Seeded keys and values are put into the blocks of `--tokens` tokens; a prompt that goes on behind them by a chunk of 256
then finds them, and 32 tokens are generated. `--runs` says how often: `streamed`, with the page cache as the system
keeps it; `cold`, with the streamed blocks dropped from it before every step; `resident`, in a pool that holds all.
Logits are compared bit for bit. `--check` holds the first run's attention, in all layers and all steps, to attention in
fp64 over the same keys and values, made again from their seeds.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from benchmarks.disk_tier import read_file
from benchmarks.peers.engines import BLOCK_ELEMENTS, MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.seeded_context import PIECE, Recorder, seed

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.kvcache.pages import POPULATE_READ, advise
from pagemill.sampling.params import SamplingParams

CHUNK, NEW = 256, 32
FP32_ERROR = 1e-4
"""Allowed beside half a unit in the last place of weights and outputs each: scores and sums are fp32."""
_PAGEOUT = 21


class Run(NamedTuple):
    """Seconds of seeding, of the chunk and of each token after it; the logits of all samples; bytes streamed in each
    step."""

    seed_s: float
    chunk_s: float
    token_s: list[float]
    logits: list[torch.Tensor]
    streamed: int


def make(arguments: argparse.Namespace, folder: str, kv_memory: str | int) -> EngineCore:
    longest = arguments.tokens + CHUNK + NEW
    return EngineCore(
        EngineConfig(
            model=str(resolve_model(MODEL)), dtype=arguments.dtype, kv_memory=kv_memory,
            kv_disk_memory=longest // 16 * frame_bytes(arguments) * 5 // 4, kv_disk_path=folder, max_model_len=longest,
            hf_overrides={"max_position_embeddings": longest}, max_num_seqs=1, max_num_batched_tokens=CHUNK,
            speculative_config="off",
        )
    )  # fmt: skip


def frame_bytes(arguments: argparse.Namespace) -> int:
    return BLOCK_ELEMENTS * int(getattr(torch, arguments.dtype).itemsize)


def drop(core: EngineCore) -> None:
    """Writes streamed blocks out and drops them from memory. The system takes back what is mapped, so all is first."""
    pool = core.executor.pool
    os.sync()
    for region in pool.streamed_file.regions:
        for advice in (POPULATE_READ, _PAGEOUT):
            advise(*region, advice)


def run(core: EngineCore, tokens: int, cold: bool) -> Run:
    generator = np.random.default_rng(0)
    prompt = generator.integers(100, 10_000, tokens + CHUNK).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    request = EngineRequest(request_id="r", prompt_token_ids=prompt, params=params, arrival_s=0.0)
    begin = time.perf_counter()
    seed(core, request, tokens)
    seed_s = time.perf_counter() - begin
    logits: list[torch.Tensor] = []
    sampler = core.executor.sampler
    sample = sampler.sample
    sampler.only_argmax = lambda rows: False  # type: ignore[method-assign]
    sampler.sample = lambda rows, to: (logits.append(rows.clone()), sample(rows, to))[1]  # type: ignore[method-assign]
    core.add_request(request)
    seconds, streamed, found = [], 0, 0
    while core.has_work():
        if cold:
            drop(core)
        begin = time.perf_counter()
        for output in core.step():
            found = output.num_cached_tokens
        seconds.append(time.perf_counter() - begin)
        print(f"  {time.strftime('%X')} {seconds[-1]:.3f} s", file=sys.stderr, flush=True)
        streamed = max(streamed, core.stats().blocks_streamed)
    assert (found, len(logits)) == (tokens, NEW)
    return Run(seed_s, seconds[0], seconds[1:], logits, streamed * core.executor.pool.layout.frame_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--kv-memory", default="512MiB")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--runs", type=lambda text: text.split(","), default=["streamed", "cold"])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.runs) - {"streamed", "cold", "resident"}:
        parser.error(f"--runs has {', '.join(sorted(unknown))}; there are streamed, cold and resident")
    if arguments.tokens % PIECE:
        parser.error(f"--tokens is {arguments.tokens}; it must be a multiple of {PIECE}, which are seeded at a time")
    print(heading(describe_machine()), end="\n\n")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "read"
        with path.open("wb") as file:
            piece = np.random.default_rng(0).bytes(16 << 20)
            for _ in range(64):
                file.write(piece)
        size = path.stat().st_size
        disk = median(size / read_file(path, size) for _ in range(3))
        path.unlink()
        print(f"disk {disk / 1e6:.0f} MB/s\n")
        print("| run | MB streamed per step | chunk, s | token, s | MB/s | of the disk |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        runs: list[Run] = []
        recorder = None
        for kind in arguments.runs:
            kv_memory = arguments.kv_memory
            if kind == "resident":
                kv_memory = ((arguments.tokens + CHUNK + NEW) // 16 + 64) * frame_bytes(arguments)
            with tempfile.TemporaryDirectory(dir=folder) as own:
                core = make(arguments, own, kv_memory)
                if kind != "resident" and core.executor.pool.streamed_file is None:
                    parser.error(f"--kv-memory {kv_memory} holds all tokens; lower it, so that some are streamed")
                if arguments.check and not runs:
                    recorder = Recorder(core)
                done = run(core, arguments.tokens, kind == "cold")
                core.executor.close()
                del core
            runs.append(done)
            token = median(done.token_s)
            speed = done.streamed / token
            print(
                f"| {kind} | {done.streamed / 1e6:.0f} | {done.chunk_s:.2f} | {token:.3f} | {speed / 1e6:.0f} | "
                f"{speed / disk:.0%} |",
                flush=True,
            )
    print(f"\nseeded in {median(done.seed_s for done in runs):.0f} s")
    print(f"peak memory of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    if runs[1:]:
        assert all(all(map(torch.equal, runs[0].logits, other.logits)) for other in runs[1:]), "logits differ"
        print("all logits equal bit for bit")
    if recorder is not None:
        bound = torch.finfo(getattr(torch, arguments.dtype)).eps + FP32_ERROR
        worst = []
        for layer, error in enumerate(recorder.errors(arguments.tokens)):
            worst.append(error)
            print(f"  layer {layer}: {error:.2e}", file=sys.stderr, flush=True)
        print(f"against fp64: at most {max(worst):.2e} of the mean |value| in a layer, allowed {bound:.2e}")
        assert max(worst) <= bound, worst


if __name__ == "__main__":
    main()
