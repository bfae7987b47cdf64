"""Measures what the memory core costs per block, with a small pool and with a large one.

Through the manager: sequences of 64 blocks are allocated, shared, freed, published, found and evicted, until every
frame of the pool has been used, in the order of allocation and in random order (frames, ids and sequences shuffled
first). Then the parts on their own. Medians over rounds, nanoseconds of this thread's CPU time per block.

The garbage collector is told to leave alone what exists before the rounds (gc.freeze), as a long-lived process should:
otherwise each of its full passes visits every published block of the pool, and sharing seems to cost twice as much.

    python benchmarks/memory_core.py [--frames 1024 1048576] [--blocks-per-sequence 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
from array import array
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import thread_time_ns

from pagemill.memory.digest import extend_chain, pack_tokens, root_digest
from pagemill.memory.eviction import Lru
from pagemill.memory.frames import FramePool
from pagemill.memory.manager import MemoryManager
from pagemill.memory.prefix_index import PrefixIndex

BLOCK_SIZE = 16
ROOT = root_digest(b"benchmark", "float32", "none", "")
CORE = ("allocate", "append one", "share (fork)", "drop shared", "free", "share (prefix hit)")
"""Allocating, sharing and freeing: what the goals (1 µs; 1.2x) are about."""


class Clock:
    """Sums per operation within a round, medians over rounds."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[float]] = defaultdict(list)

    def measure(self, name: str, blocks: int, work: Callable[[], object]) -> None:
        start = thread_time_ns()
        work()
        self.rounds[name].append((thread_time_ns() - start) / blocks)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.rounds.items()}


def shuffle_pool(memory: MemoryManager, generator: random.Random) -> None:
    """Leaves frames and block ids free in random order."""
    tables = []
    for _ in range(memory.num_frames):
        table = memory.open((), (), ROOT, 0.0, 0).table
        memory.reserve(table, BLOCK_SIZE)
        tables.append(table)
    generator.shuffle(tables)
    for table in tables:
        memory.close(table, 0.0)


def through_the_manager(num_frames: int, per_sequence: int, rounds: int, shuffled: bool) -> dict[str, float]:
    generator = random.Random(0)
    memory = MemoryManager(num_frames, BLOCK_SIZE, [None])
    if shuffled:
        shuffle_pool(memory, generator)
    count = num_frames // per_sequence
    blocks = count * per_sequence
    length = per_sequence * BLOCK_SIZE
    clock = Clock()

    def order(items: list) -> list:
        return generator.sample(items, len(items)) if shuffled else items

    shared: list = []
    prompts = []
    for number in range(count):
        # Same length, different first token; the digests are the scheduler's work and are timed on their own below.
        tokens = array("i", range(number, number + length))
        digests: list[bytes] = []
        extend_chain(digests, ROOT, tokens, BLOCK_SIZE)
        prompts.append((tokens, digests))

    def reserve_all() -> None:
        for table in tables:
            memory.reserve(table, length)

    def append_all() -> None:
        for table in tables:
            for end in range(BLOCK_SIZE, length + 1, BLOCK_SIZE):
                memory.reserve(table, end)

    def close_all(open_tables: list) -> None:
        for table in open_tables:
            memory.close(table, 0.0)
        open_tables.clear()

    def commit_all() -> None:
        for table, (tokens, digests) in zip(tables, prompts, strict=True):
            memory.commit(table, length, tokens, digests)

    def close_tables() -> None:
        close_all(order(tables))

    def close_shared() -> None:
        close_all(shared)

    def open_all() -> None:
        for tokens, digests in visits:
            shared.append(memory.open(tokens, digests, ROOT, 0.0, length).table)

    def fork_all() -> None:
        shared.extend(memory.fork(table, length) for table in order(tables))

    gc.collect()
    gc.freeze()
    for _ in range(rounds + 1):
        # Without publishing
        tables = [memory.open((), (), ROOT, 0.0, 0).table for _ in range(count)]
        clock.measure("allocate", blocks, reserve_all)
        clock.measure("free", blocks, close_tables)
        tables = [memory.open((), (), ROOT, 0.0, 0).table for _ in range(count)]
        clock.measure("append one", blocks, append_all)
        # Published, shared, cached, found again, evicted
        clock.measure("publish", blocks, commit_all)
        clock.measure("share (fork)", blocks, fork_all)
        clock.measure("drop shared", blocks, close_shared)
        visits = order(prompts)
        clock.measure("share (prefix hit)", blocks, open_all)
        close_shared()
        clock.measure("free to cache", blocks, close_tables)
        visits = order(prompts)
        clock.measure("find in cache", blocks, open_all)
        close_shared()
        tables = [memory.open((), (), ROOT, 0.0, 0).table for _ in range(count)]
        clock.measure("evict and allocate", blocks, reserve_all)
        assert memory.stats().frames_active == blocks
        close_tables()
    memory.check()
    gc.unfreeze()
    return drop_first(clock).medians()


def parts(num_blocks: int, per_sequence: int, rounds: int, shuffled: bool) -> dict[str, float]:
    generator = random.Random(1)
    clock = Clock()
    ids = list(range(num_blocks))
    if shuffled:
        generator.shuffle(ids)
    pool = FramePool(num_blocks)
    runs = [ids[start : start + per_sequence][::-1] for start in range(0, num_blocks, per_sequence)]
    policy = Lru()
    index = PrefixIndex(num_blocks, BLOCK_SIZE, [None])
    tokens = list(range(num_blocks * BLOCK_SIZE)) if num_blocks <= 4096 else list(range(4096 * BLOCK_SIZE))
    chain: list[bytes] = []
    for start in range(0, num_blocks * BLOCK_SIZE, len(tokens)):
        piece: list[bytes] = []
        extend_chain(piece, root_digest(b"%d" % start, "", "", ""), tokens, BLOCK_SIZE)
        chain += piece
    packed = [pack_tokens([block] * BLOCK_SIZE) for block in range(num_blocks)]

    def take() -> None:
        last = None
        for run in runs:
            frames = pool.take(len(run), last)
            last = frames[-1]

    def give() -> None:
        for run in runs:
            pool.give(run)

    def policy_add() -> None:
        for block in ids:
            policy.add(block, 0.0)

    def policy_victims() -> None:
        for _ in ids:
            policy.victim()

    def publish() -> None:
        parent = ROOT
        for block, digest, words in zip(ids, chain, packed, strict=True):
            index.publish(block, 0, digest, parent, words, 0)
            parent = digest

    def match() -> None:
        for start in range(0, num_blocks, per_sequence):
            index.match(chain[start : start + per_sequence], ROOT, (), per_sequence * BLOCK_SIZE)

    def forget() -> None:
        for block in ids:
            index.forget(block, 0)

    for _ in range(rounds + 1):
        clock.measure("pool: take", num_blocks, take)
        clock.measure("pool: give", num_blocks, give)
        clock.measure("lru: add", num_blocks, policy_add)
        clock.measure("lru: victim", num_blocks, policy_victims)
        clock.measure("index: publish", num_blocks, publish)
        clock.measure("index: match", num_blocks, match)
        clock.measure("index: forget", num_blocks, forget)
        clock.measure(
            "digest: extend chain", len(tokens) // BLOCK_SIZE, lambda: extend_chain([], ROOT, tokens, BLOCK_SIZE)
        )
    return drop_first(clock).medians()


def drop_first(clock: Clock) -> Clock:
    """Leaves out the round that warmed everything up."""
    for values in clock.rounds.values():
        del values[0]
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, nargs=2, default=[1024, 1 << 20], metavar=("SMALL", "LARGE"))
    parser.add_argument("--blocks-per-sequence", type=int, default=64)
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds over the large pool; the small one gets as many blocks"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    small, large = arguments.frames
    columns: dict[str, dict[str, float]] = {}
    for shuffled in (False, True):
        for frames in (small, large):
            rounds = arguments.rounds if frames == large else max(arguments.rounds, min(200, large // small))
            figures = through_the_manager(frames, arguments.blocks_per_sequence, rounds, shuffled)
            figures |= parts(frames, arguments.blocks_per_sequence, rounds, shuffled)
            columns[f"{frames} {'random' if shuffled else 'in order'}"] = figures
    names = list(columns)
    print(f"CPU ns per block, {platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{'':22}" + "".join(f"{name:>20}" for name in names) + f"{'ratio in order':>16}")
    for operation in columns[names[0]]:
        values = [columns[name][operation] for name in names]
        mark = " *" if operation in CORE else ""
        print(
            f"{operation + mark:22}" + "".join(f"{value:20.0f}" for value in values) + f"{values[1] / values[0]:16.2f}"
        )
    print("* allocating, sharing, freeing: goal 1000 ns, and in order at most 1.2 from the small pool to the large")
    if arguments.json:
        arguments.json.write_text(json.dumps({"unit": "CPU ns per block", "columns": columns}, indent=2) + "\n")


if __name__ == "__main__":
    main()
