"""Measures how fast blocks come back from disk: against the disk itself, and against computing them again.

    python -m benchmarks.disk_tier [--dtype float32] [--tokens 4096,8192] [--folder DIR]

Sessions without common text are begun in one `LLM`, which is closed, and go on in a new one, where the first token of
a turn needs their blocks from disk; then with another turn when these are in the pool, which says what the step takes.
In a new pool, of 1 GiB, loads may have the system find pages first. In a used one the pages are there: it has room for
the longest session only, and a session as long as that comes before each. The goal is 80 % of the disk's speed and one
step: before and after a turn, as many bytes of the store's file are read by two threads, directly and with nothing of
it in memory, which is what the disk takes at that time. Medians of new `LLM`s, which have computed one prompt without a
session before. In each, the whole file is read so too, and then the store's blocks through `DiskStore`, checksums
included, by as many threads as load blocks.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
from benchmarks.peers.engines import MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.peers.workloads import tokenize

from pagemill import LLM, SamplingParams
from pagemill.kvcache.disk_store import DiskStore

PIECE_BYTES = 4 << 20
THREADS = 2
STORE_THREADS = 4
"""As `Transfers` has."""
FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
FILLER = "filler"
"""A session as long as the longest one."""
TURN = 20
"""Tokens of what a session is asked next."""


def drop_cache(path: Path) -> None:
    """Writes a file out and drops it from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def whole_pages(nbytes: int) -> mmap.mmap:
    """Returns memory whose pages are there, huge ones if the system has them. A virtual machine's disk may fill small
    ones that lie scattered at less than half the speed."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:: mmap.PAGESIZE] = bytes(-(-nbytes // mmap.PAGESIZE))
    return memory


def read_file(path: Path, size: int) -> float:
    """Returns the seconds to read so much of a file that is not in memory."""
    drop_cache(path)
    buffers = [whole_pages(PIECE_BYTES) for _ in range(THREADS)]
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(first: int) -> None:
        for at in range(first * PIECE_BYTES, size, THREADS * PIECE_BYTES):
            os.preadv(file, [buffers[first]], at)

    with ThreadPoolExecutor(THREADS) as threads:
        begin = time.perf_counter()
        list(threads.map(read, range(THREADS)))
        seconds = time.perf_counter() - begin
    os.close(file)
    return seconds


def read_store(disk: DiskStore) -> float:
    """Returns the seconds to read all blocks of a store that is not in memory, in order of their chains."""
    drop_cache(disk.folder / "blocks.dat")
    names = disk.names()
    step = max(1, PIECE_BYTES // disk.record_bytes)
    outs = [np.frombuffer(whole_pages(step * disk.record_bytes), dtype=np.uint8) for _ in range(STORE_THREADS)]
    with ThreadPoolExecutor(STORE_THREADS) as threads:

        def read(first: int) -> None:
            out = outs[first].reshape(step, -1)
            for at in range(first * step, len(names), STORE_THREADS * step):
                part = names[at : at + step]
                assert all(disk.read([name[:2] for name in part], out[: len(part)]))

        begin = time.perf_counter()
        list(threads.map(read, range(STORE_THREADS)))
        return time.perf_counter() - begin


def first_token_s(llm: LLM, name: str, prompt: list[int]) -> tuple[float, int]:
    """Times a session's turn of these tokens, answered with one. Returns seconds, and how many tokens were found."""
    begin = time.perf_counter()
    output = llm.session(name).generate(prompt, FIRST_TOKEN)
    return time.perf_counter() - begin, output.num_cached_tokens or 0


def resume_s(llm: LLM, name: str, prompt: list[int]) -> tuple[float, int]:
    """Times the first token of a fork of the session, which is then forgotten."""
    fork = llm.session(name).fork(f"{name}-again")
    found = first_token_s(llm, fork.name, prompt)
    fork.delete()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    arguments = parser.parse_args()
    print(heading(describe_machine()), end="\n\n")
    text = tokenize(MODEL)
    lengths = [int(length) for length in arguments.tokens.split(",")]
    warm_up = {"prompt_token_ids": text[-min(700, *lengths) :]}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:

        def make(kv_memory: int | str) -> LLM:
            return LLM(
                MODEL, dtype=arguments.dtype, kv_disk_memory="8GiB", kv_disk_path=folder, kv_memory=kv_memory,
                max_model_len=max(lengths) + 64, hf_overrides={"max_position_embeddings": max(lengths) + 64},
                session_path=f"{folder}/sessions.sqlite",
            )  # fmt: skip

        with make("1GiB") as llm:
            llm.generate(warm_up, FIRST_TOKEN, use_tqdm=False)
            begins = [1000 + sum(lengths[:i]) for i in range(len(lengths))]
            computed = [first_token_s(llm, str(n), text[at : at + n])[0] for n, at in zip(lengths, begins, strict=True)]
            first_token_s(llm, FILLER, text[1000 + sum(lengths) :][: max(lengths)])
            one_at_a_time = (max(lengths) // 16 + 8) * llm.client.core.executor.pool.layout.frame_bytes
        speeds: list[tuple[float, float]] = []
        turns: dict[tuple[str, int], list[tuple[float, ...]]] = {}
        prompts = (text[at : at + TURN] for at in range(0, len(text), TURN))
        for _, pool in product(range(arguments.rounds), ("new", "used")):
            with make("1GiB" if pool == "new" else one_at_a_time) as llm:
                disk = llm.client.core.tiers.offload.tiers[-1]
                path, slot_bytes = disk.folder / "blocks.dat", disk.slot_bytes
                size = path.stat().st_size
                speeds.append((size / read_file(path, size), size / read_store(disk)))
                llm.generate(warm_up, FIRST_TOKEN, use_tqdm=False)
                for length in lengths:
                    if pool == "used":
                        resume_s(llm, FILLER, next(prompts))
                    size = length // 16 * slot_bytes
                    before_s = read_file(path, size)
                    drop_cache(path)
                    loaded = llm.client.core.stats().blocks_loaded
                    resumed_s, found = resume_s(llm, str(length), next(prompts))
                    loaded = llm.client.core.stats().blocks_loaded - loaded
                    disk_s = (before_s + read_file(path, size)) / 2
                    step_s, _ = resume_s(llm, str(length), next(prompts))
                    goal_s = disk_s / 0.8 + step_s
                    turns.setdefault((pool, length), []).append((found, loaded, disk_s, step_s, goal_s, resumed_s))
        file, store = (median(each) for each in zip(*speeds, strict=True))
        print(f"disk {file / 1e6:.0f} MB/s, store {store / 1e6:.0f} MB/s: {store / file:.0%} of it (goal: 80 %)\n")
        print("| pool | tokens | found | loaded, MB | computed, s | disk, s | step, s | goal, s | resumed, s |")
        print("| :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for (pool, length), rounds in turns.items():
            found, loaded, *seconds = (median(each) for each in zip(*rounds, strict=True))
            figures = " | ".join(f"{each:.3f}" for each in (computed[lengths.index(length)], *seconds))
            print(f"| {pool} | {length} | {found} | {loaded * slot_bytes / 1e6:.0f} | {figures} |")


if __name__ == "__main__":
    main()
