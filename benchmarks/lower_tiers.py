"""How fast blocks come back from disk: against the disk itself, and against computing them again.

    python -m benchmarks.lower_tiers [--dtype float32] [--tokens 4096,8192] [--folder DIR]

First a file of the store's size is read through in large pieces by two threads, then the store's blocks through
`DiskStore`, checksums included; both with the page cache dropped, in turn, medians of three. Then sessions without
common text are begun in one `LLM`, which is closed, and go on in a new one, where the first token of a turn needs their
blocks from disk; then with another turn when these are in the pool, which says what the step takes. Medians of three
new `LLM`s, each with the disk's speed beside it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
from benchmarks.peers.engines import MODEL
from benchmarks.peers.machine import describe_machine
from benchmarks.peers.workloads import tokenize

from pagemill import LLM, SamplingParams
from pagemill.kvcache.disk_store import DiskStore

PIECE_BYTES = 16 << 20
THREADS = 2
ROUNDS = 3
TURN = 20
"""Tokens of what a session is asked next."""


def drop_cache(path: Path) -> None:
    """Writes a file out and drops it from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_file(path: Path) -> float:
    """Bytes per second of reading a file that is not in memory."""
    drop_cache(path)
    size = path.stat().st_size
    with path.open("rb") as file, ThreadPoolExecutor(THREADS) as threads:
        buffers = [bytearray(PIECE_BYTES) for _ in range(THREADS)]

        def read(first: int) -> None:
            for at in range(first * PIECE_BYTES, size, THREADS * PIECE_BYTES):
                os.preadv(file.fileno(), [buffers[first]], at)

        begin = time.perf_counter()
        list(threads.map(read, range(THREADS)))
        return size / (time.perf_counter() - begin)


def read_store(disk: DiskStore) -> float:
    """Bytes per second of reading all blocks of a store that is not in memory, in order of their chains."""
    drop_cache(disk.folder / "blocks.dat")
    names = disk.names()
    step = max(1, PIECE_BYTES // disk.record_bytes)
    with ThreadPoolExecutor(THREADS) as threads:

        def read(first: int) -> None:
            out = np.empty((step, disk.record_bytes), dtype=np.uint8)
            for at in range(first * step, len(names), THREADS * step):
                part = names[at : at + step]
                assert all(disk.read([name[:2] for name in part], out[: len(part)]))

        begin = time.perf_counter()
        list(threads.map(read, range(THREADS)))
        return len(names) * disk.slot_bytes / (time.perf_counter() - begin)


def first_token_s(llm: LLM, name: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds of a session's turn of these tokens, answered with one, and how many of all its tokens were found."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    begin = time.perf_counter()
    output = llm.session(name).generate(prompt, params)
    return time.perf_counter() - begin, output.num_cached_tokens or 0


def resume_s(llm: LLM, name: str, prompt: list[int]) -> tuple[float, int]:
    """As `first_token_s`, of a fork, which is forgotten."""
    fork = llm.session(name).fork(f"{name}-again")
    found = first_token_s(llm, fork.name, prompt)
    fork.delete()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores, load average {machine['load_average']}, {machine['date']}\n")
    text = tokenize(MODEL)
    lengths = [int(length) for length in arguments.tokens.split(",")]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:

        def make() -> LLM:
            return LLM(
                MODEL, dtype=arguments.dtype, kv_disk_memory="8GiB", kv_disk_path=folder, kv_memory="1GiB",
                max_model_len=max(lengths) + 64, hf_overrides={"max_position_embeddings": max(lengths) + 64},
                session_path=f"{folder}/sessions.sqlite",
            )  # fmt: skip

        with make() as llm:
            first_token_s(llm, "warm-up", text[-700:])
            begins = [1000 + sum(lengths[:i]) for i in range(len(lengths))]
            computed = [first_token_s(llm, str(n), text[at : at + n])[0] for n, at in zip(lengths, begins, strict=True)]
        speeds, turns = [], []
        for turn in range(0, 2 * TURN * ROUNDS, 2 * TURN):
            with make() as llm:
                disk = llm._core._tiers.lower.tiers[-1]
                path, record_bytes = disk.folder / "blocks.dat", disk.record_bytes
                speeds.append((read_file(path), read_store(disk)))
                first_token_s(llm, "step", text[-700:])
                turns.append([])
                for length in lengths:
                    drop_cache(path)
                    resumed_s, found = resume_s(llm, str(length), text[turn : turn + TURN])
                    step_s, _ = resume_s(llm, str(length), text[turn + TURN : turn + 2 * TURN])
                    turns[-1].append((resumed_s, step_s, found))
        file, store = (median(each) for each in zip(*speeds, strict=True))
        print(f"disk {file / 1e6:.0f} MB/s, store {store / 1e6:.0f} MB/s: {store / file:.0%} of it (goal: 80 %)\n")
        print("| tokens | found | MB | computed, s | resumed, s | step, s | bytes / 80 % of the disk + the step, s |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for length, computed_s, rounds in zip(lengths, computed, zip(*turns, strict=True), strict=True):
            resumed_s, step_s, found = (median(each) for each in zip(*rounds, strict=True))
            size = found // 16 * record_bytes
            goal = size / (0.8 * file) + step_s
            figures = f"{size / 1e6:.0f} | {computed_s:.2f} | {resumed_s:.3f} | {step_s:.3f} | {goal:.3f}"
            print(f"| {length} | {found} | {figures} |")


if __name__ == "__main__":
    main()
