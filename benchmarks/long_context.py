"""A context longer than the pool, streamed from disk: how fast, beside the disk itself and a pool that holds all.

    python -m benchmarks.long_context [--dtype bfloat16] [--tokens 131072] [--kv-memory 512MiB] [--folder DIR]

Seeded keys and values are put into the blocks of `--tokens` tokens; a prompt that goes on behind them by a chunk of 256
then finds them, and 32 tokens are generated. Streamed, this is done twice: with the page cache as the system keeps it,
and with the streamed blocks dropped from it before every step. `--resident` does it in a pool that holds all, too, and
compares the logits bit for bit.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from benchmarks.lower_tiers import read_file
from benchmarks.peers.engines import BLOCK_ELEMENTS, MODEL
from benchmarks.peers.machine import describe_machine
from numpy.typing import NDArray

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.kvcache.advice import advise
from pagemill.memory.digest import extend_chain
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.step_plan import StepResult

CHUNK, NEW = 256, 32
SAMPLES = 64
"""Different blocks of keys and values."""
_PAGEOUT = 21


class Run(NamedTuple):
    """Seconds of the chunk and of each token after it; the logits of all samples; bytes streamed in each step."""

    chunk_s: float
    token_s: list[float]
    logits: list[torch.Tensor]
    streamed: int


def make(arguments: argparse.Namespace, folder: str, kv_memory: str | int) -> EngineCore:
    longest = arguments.tokens + CHUNK + NEW
    return EngineCore(
        EngineConfig(
            model=str(resolve_model(MODEL)), dtype=arguments.dtype, kv_memory=kv_memory, kv_disk_memory="32GiB",
            kv_disk_path=folder, max_model_len=longest, hf_overrides={"max_position_embeddings": longest},
            max_num_seqs=1, max_num_batched_tokens=CHUNK,
        )
    )  # fmt: skip


def seed(core: EngineCore, request: EngineRequest, tokens: int) -> None:
    """Blocks of seeded keys and values, cached as if the request's first tokens had been computed."""
    memory, pool, scheduler = core._memory, core._engine.pool, core._scheduler
    root, digests = core._root(request), list[bytes]()
    extend_chain(digests, root, request.prompt_token_ids[:tokens], memory.block_size)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(SAMPLES, pool.record_bytes // pool.dtype.itemsize, generator=generator).to(pool.dtype)
    samples: NDArray[np.uint8] = values.view(torch.uint8).numpy()
    table, _ = memory.open([], [], root, 0.0, 0)
    for begin in range(0, tokens, CHUNK):
        end = min(begin + CHUNK, tokens)
        while (shortage := memory.reserve(table, end)) is not None:
            assert memory.stream(table, shortage.missing)
        core._runner.apply(scheduler._batch.plan({}))
        scheduler.commit(StepResult(), 0.0)
        frames = memory.frames(table, begin // memory.block_size)
        first = begin // memory.block_size
        pool.write_frames(frames, samples[np.arange(first, first + len(frames)) * 7 % SAMPLES])
        memory.commit(table, end, request.prompt_token_ids, digests)
    memory.close(table, 0.0)


def drop(core: EngineCore) -> None:
    """Writes streamed blocks out and drops them from memory."""
    pool = core._engine.pool
    os.sync()
    for place in range(pool.groups.layers_per_frame):
        region = pool._lower_region(place)
        advise(*region, _PAGEOUT)


def run(core: EngineCore, tokens: int, cold: bool) -> Run:
    generator = np.random.default_rng(0)
    prompt = generator.integers(100, 10_000, tokens + CHUNK).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    request = EngineRequest(request_id="r", prompt_token_ids=prompt, params=params, arrival_s=0.0)
    seed(core, request, tokens)
    logits: list[torch.Tensor] = []
    sampler = core._runner._sampler
    sample = sampler.sample
    sampler.only_likeliest = lambda rows: False  # type: ignore[method-assign]
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
        streamed = max(streamed, core.stats().blocks_streamed)
    assert (found, len(logits)) == (tokens, NEW)
    return Run(seconds[0], seconds[1:], logits, streamed * core._engine.pool.record_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--kv-memory", default="512MiB")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--resident", action="store_true")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores, load average {machine['load_average']}, {machine['date']}\n")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "read"
        with path.open("wb") as file:
            piece = np.random.default_rng(0).bytes(16 << 20)
            for _ in range(64):
                file.write(piece)
        disk = median(read_file(path) for _ in range(3))
        path.unlink()
        print(f"disk {disk / 1e6:.0f} MB/s\n")
        print("| pool | MB streamed per step | chunk, s | token, s | MB/s | of the disk |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        runs = []
        pools = [(arguments.kv_memory, False), (arguments.kv_memory, True)]
        if arguments.resident:
            frame_bytes = BLOCK_ELEMENTS * getattr(torch, arguments.dtype).itemsize
            pools.append((((arguments.tokens + CHUNK + NEW) // 16 + 64) * frame_bytes, False))
        for kv_memory, cold in pools:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                core = make(arguments, own, kv_memory)
                done = run(core, arguments.tokens, cold)
                core._runner.close()
                del core
            runs.append(done)
            token = median(done.token_s)
            speed = done.streamed / token
            kind = f"{kv_memory}, {'cold' if cold else 'as it comes'}" if done.streamed else "holds all"
            print(
                f"| {kind} | {done.streamed / 1e6:.0f} | {done.chunk_s:.2f} | {token:.3f} | {speed / 1e6:.0f} | "
                f"{speed / disk:.0%} |",
                flush=True,
            )
        for other in runs[1:]:
            assert all(map(torch.equal, runs[0].logits, other.logits)), "logits differ"
        print("\nall logits equal bit for bit")
        print(f"peak memory of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
