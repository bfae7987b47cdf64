"""How fast blocks come back from disk: against the disk itself, and against computing them again.

    python -m benchmarks.lower_tiers [--dtype float32] [--tokens 4096,8192] [--folder DIR]

First a file of the store's size is read through in large pieces by two threads, then the store's blocks through
`DiskStore`, checksums included; both with the page cache dropped, in turn, medians of three. Then a prompt is computed
by one engine, which is closed, and asked for again in a new one, whose first token needs the blocks from disk.
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

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.sampling.params import SamplingParams

PIECE_BYTES = 16 << 20
THREADS = 2


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


def read_store(core: EngineCore) -> float:
    """Bytes per second of reading all blocks of an engine's store that is not in memory, in order of their chains."""
    disk = core._tiers.lower.disk
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


def first_token_s(core: EngineCore, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token of a prompt, and how many of its tokens were found."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    begin = time.perf_counter()
    core.add_request(EngineRequest(request_id="r", prompt_token_ids=prompt, params=params, arrival_s=time.monotonic()))
    while True:
        for output in core.step():
            return time.perf_counter() - begin, output.num_cached_tokens


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

        def make() -> EngineCore:
            return EngineCore(
                EngineConfig(
                    model=str(resolve_model(MODEL)), dtype=arguments.dtype, kv_disk_memory="8GiB", kv_disk_path=folder,
                    kv_memory="1GiB", max_model_len=max(lengths) + 64,
                    hf_overrides={"max_position_embeddings": max(lengths) + 64},
                )
            )  # fmt: skip

        core = make()
        first_token_s(core, text[-700:])  # warm-up
        computed = {length: first_token_s(core, text[1000 : 1000 + length])[0] for length in lengths}
        core.close()
        core = make()
        path = core._tiers.lower.disk.folder / "blocks.dat"
        rounds = [(read_file(path), read_store(core)) for _ in range(3)]
        file, store = (median(speeds) for speeds in zip(*rounds, strict=True))
        print(f"disk {file / 1e6:.0f} MB/s, store {store / 1e6:.0f} MB/s: {store / file:.0%} of it (goal: 80 %)\n")
        print("| tokens | found | MB | computed, s | loaded, s | bytes / 80 % of the disk + a step, s |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: |")
        step_s = first_token_s(core, text[-40:-20])[0]
        for length in lengths:
            drop_cache(path)
            loaded_s, found = first_token_s(core, text[1000 : 1000 + length])
            size = found // 16 * core._tiers.lower.record_bytes
            goal = size / (0.8 * file) + step_s
            print(f"| {length} | {found} | {size / 1e6:.0f} | {computed[length]:.2f} | {loaded_s:.2f} | {goal:.2f} |")
        core.close()


if __name__ == "__main__":
    main()
