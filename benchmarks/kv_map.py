"""Measures what a snapshot of the KV memory costs the engine, which takes some a second while a page is open.

    python -m benchmarks.kv_map [--frames 4000 100000 1000000]

Half of the pool is held by block tables, half is cached. Medians in milliseconds.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
from time import perf_counter

from pagemill.memory.block_table import BlockTable
from pagemill.memory.digest import extend_chain, root_digest
from pagemill.memory.manager import MemoryManager

BLOCK_SIZE = 16
ROOT = root_digest(b"benchmark", "float32", "none", "")
CELLS, SHOWN, CACHED, CHAINS = 4096, 48, 512, 32
ROUNDS = 40


def fill(num_frames: int, num_tables: int) -> tuple[MemoryManager, list[BlockTable]]:
    """Returns a full pool, and the tables that hold half of it."""
    memory, tables = MemoryManager(num_frames, BLOCK_SIZE, [None]), []
    numbers, blocks = random.Random(1), num_frames // num_tables // 2
    for step in range(2 * num_tables):
        tokens = numbers.choices(range(49152), k=blocks * BLOCK_SIZE)
        digests: list[bytes] = []
        extend_chain(digests, ROOT, tokens, BLOCK_SIZE)
        table = memory.open(tokens, digests, ROOT, float(step), len(tokens) - 1).table
        assert memory.reserve(table, len(tokens)) is None
        memory.drain(step)
        memory.commit(table, len(tokens), tokens, digests)
        memory.retire(step)
        if step % 2:
            memory.close(table, float(step))
        else:
            tables.append(table)
    return memory, tables


def measure(num_frames: int) -> None:
    """Prints what the parts of a snapshot cost."""
    memory, tables = fill(num_frames, 32 if num_frames < 10_000 else 64)
    pool, tenant = f"{num_frames} blocks, {len(tables)} tables", memory.tenants["default"]
    for name, work in (
        ("block map", lambda: memory.block_map((), (), None, CELLS)),
        ("block map, as a tenant sees it", lambda: memory.block_map((), (), tenant, CELLS)),
        ("prefix tree", lambda: memory.prefix_tree(tables[:SHOWN], memory.tenants, CACHED, CHAINS)),
    ):
        seconds = []
        for _ in range(ROUNDS):
            begin = perf_counter()
            work()
            seconds.append(perf_counter() - begin)
        print(f"{pool}: {name} {1000 * statistics.median(seconds):.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, nargs="+", default=[4_000, 100_000, 1_000_000])
    frames = parser.parse_args().frames
    print(f"{platform.machine()}, Python {platform.python_version()}")
    for num_frames in frames:
        measure(num_frames)


if __name__ == "__main__":
    main()
