"""Computes one prompt longer than the pool, and measures how fast, and in how much memory.

    python -m benchmarks.long_prompt [--tokens 131072] [--dtype bfloat16] [--kv-memory 1GiB] [--chunk 2048]

Text is repeated to `--tokens` tokens and given to the public `LLM`, whose `hf_overrides` stretch the model's positions;
every token is computed, 16 are generated. Each step is recorded with its time by the clock and by the processors, which
other work on the machine does not lengthen, the blocks in the pool and streamed, and the resident memory of both, which
a thread looks up every `WATCH_S`. The results are a line per 16K tokens of context, JSON and a plot. The digest at the
end stands for the generated tokens and their log probabilities: it is the same with any `--kv-memory` and `--chunk`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from benchmarks.peers.engines import BLOCK_ELEMENTS, MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.peers.plots import plot_long_prompt
from benchmarks.peers.workloads import tokenize

from pagemill import LLM, SamplingParams
from pagemill.kvcache.device_pool import DevicePool

RESULTS = Path(__file__).parent / "results"
NEW = 16
BAND = 16_384
"""Tokens of context that a line of the results is about."""
WATCH_S = 0.5
MIB = 1 << 20
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) [^/]*(/.*)?")
"""A line of smaps: addresses, and the file that is mapped there."""


class Resident(NamedTuple):
    """Holds the bytes of K/V in this process's memory: of the pool, and of streamed blocks that it maps."""

    pool: int
    streamed: int


class Step(NamedTuple):
    """Holds a step: tokens of context at its end, seconds by the clock and of all processors, blocks when it ended, and
    the bytes of streamed blocks that it read."""

    context: int
    clock_s: float
    cpu_s: float
    resident_blocks: int
    streamed_blocks: int
    streamed_bytes: int


def resident(pool: DevicePool) -> Resident:
    """Returns how much K/V is in memory, as the system counts it."""
    begin, end = pool.storage.data_ptr(), pool.storage.data_ptr() + pool.storage.nbytes
    found, kind = [0, 0], None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := _MAPPING.fullmatch(line):
            first, last = (int(address, 16) for address in mapping.groups()[:2])
            kind = (mapping[3] is not None) if first < end and last > begin else None
        elif kind is not None and line.startswith("Rss:"):
            found[kind] += int(line.split()[1]) << 10
    return Resident(*found)


@contextmanager
def watch(pool: DevicePool) -> Iterator[list[Resident]]:
    """Looks every WATCH_S, until the end; the looks so far."""
    looks, over = [resident(pool)], threading.Event()

    def look() -> None:
        while not over.wait(WATCH_S):
            looks.append(resident(pool))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        over.set()
        thread.join()


def record_steps(llm: LLM, steps: list[Step]) -> None:
    """Has each step of the engine recorded, and a line printed for every band of context."""
    core: Any = llm.client.core
    run, begun = core.step, (time.perf_counter(), time.process_time())

    def step() -> Any:
        before = core.stats()
        begin = time.perf_counter(), time.process_time()
        outputs = run()
        clock_s, cpu_s = time.perf_counter() - begin[0], time.process_time() - begin[1]
        (row,) = core.scheduler.state.running or [None]
        context = steps[-1].context + 1 if row is None else row.table.length
        after = core.stats()
        read = max(before.blocks_streamed, after.blocks_streamed) * core.executor.pool.layout.frame_bytes
        steps.append(Step(context, clock_s, cpu_s, after.frames_active, after.blocks_streamed, read))
        if context // BAND > (steps[-2].context if len(steps) > 1 else 0) // BAND:
            print(f"  {context} tokens after {time.perf_counter() - begun[0]:.0f} s, "
                  f"{time.process_time() - begun[1]:.0f} s of processors; blocks in the pool {after.frames_active}, "
                  f"streamed {after.blocks_streamed}", flush=True)  # fmt: skip
        return outputs

    core.step = step


def bands(steps: list[Step], prompt_len: int) -> list[dict[str, float]]:
    """Returns what the steps of each BAND of the prompt took."""
    rows, last = [], 0
    for first in range(0, prompt_len, BAND):
        of = [step for step in steps if first < step.context <= min(first + BAND, prompt_len)]
        tokens = of[-1].context - last
        last = of[-1].context
        clock_s, cpu_s = sum(step.clock_s for step in of), sum(step.cpu_s for step in of)
        rows.append(
            {
                "context": last,
                "clock_s": clock_s,
                "cpu_s": cpu_s,
                "tokens_per_clock_s": tokens / clock_s,
                "tokens_per_cpu_s": tokens / cpu_s,
                "resident_blocks": of[-1].resident_blocks,
                "streamed_blocks": of[-1].streamed_blocks,
                "streamed_bytes": sum(step.streamed_bytes for step in of),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--chunk", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--folder", type=Path, help="of the disk to stream from; default: the temporary folder")
    parser.add_argument("--name", default="long_prompt", help="of the files in benchmarks/results")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(heading(machine), end="\n\n")
    text = tokenize(MODEL)
    prompt = (text * (arguments.tokens // len(text) + 1))[: arguments.tokens]
    longest = arguments.tokens + NEW
    kv_bytes = longest * BLOCK_ELEMENTS // 16 * getattr(torch, arguments.dtype).itemsize
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=1)
    steps: list[Step] = []
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        LLM(
            MODEL, dtype=arguments.dtype, kv_memory=arguments.kv_memory, kv_disk_memory=2 * kv_bytes,
            kv_disk_path=folder, max_model_len=longest, hf_overrides={"max_position_embeddings": longest},
            max_num_seqs=1, max_num_batched_tokens=arguments.chunk,
        ) as llm,
    ):  # fmt: skip
        record_steps(llm, steps)
        begin, pool = (time.perf_counter(), time.process_time()), llm.client.core.executor.pool
        with watch(pool) as looks:
            (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        clock_s, cpu_s = time.perf_counter() - begin[0], time.process_time() - begin[1]
    (answer,) = output.outputs
    assert (output.num_cached_tokens, len(answer.token_ids), answer.finish_reason) == (0, NEW, "length"), answer
    assert answer.logprobs is not None
    likely = [
        probabilities[token].logprob for token, probabilities in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
    digest = hashlib.sha256(repr((list(answer.token_ids), likely)).encode()).hexdigest()[:16]
    rows = bands(steps, len(prompt))
    print("\n| context | s | s of processors | tokens/s | per s of processors | blocks in the pool | streamed | read |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row['context']} | {row['clock_s']:.0f} | {row['cpu_s']:.0f} | {row['tokens_per_clock_s']:.0f} | "
            f"{row['tokens_per_cpu_s']:.0f} | {row['resident_blocks']} | {row['streamed_blocks']} | "
            f"{row['streamed_bytes'] / 1e9:.1f} GB |"
        )
    peak = Resident(*map(max, zip(*looks, strict=True)))
    result = {
        "tokens": arguments.tokens, "dtype": arguments.dtype, "chunk": arguments.chunk, "digest": digest,
        "clock_s": clock_s, "cpu_s": cpu_s, "token_s": median(step.clock_s for step in steps[1 - NEW :]),
        "kv_bytes": kv_bytes, "pool_bytes": pool.nbytes, "record_bytes": pool.layout.frame_bytes,
        "peak_bytes": max(map(sum, looks)), "peak_pool_bytes": peak.pool, "peak_streamed_bytes": peak.streamed,
        "most_blocks_in_pool": max(step.resident_blocks for step in steps),
        "most_blocks_streamed": max(step.streamed_blocks for step in steps),
        "bytes_streamed": sum(step.streamed_bytes for step in steps),
    }  # fmt: skip
    print(
        f"\nK/V of {kv_bytes / MIB:.0f} MiB, a pool of {pool.nbytes / MIB:.0f}: {clock_s:.0f} s, {cpu_s:.0f} s of "
        f"processors; a token behind all of it {result['token_s']:.2f} s\n"
        f"resident at once: at most {result['peak_bytes'] / MIB:.0f} MiB of K/V (pool {peak.pool / MIB:.0f}, streamed "
        f"{peak.streamed / MIB:.0f}); at most {result['most_blocks_in_pool']} blocks in the pool, "
        f"{result['most_blocks_streamed']} streamed; {result['bytes_streamed'] / 1e9:.1f} GB streamed\ndigest {digest}"
    )
    print(f"continues: {answer.text!r}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{arguments.name}.json"
    everything = {"machine": machine, **result, "bands": rows, "steps": [step._asdict() for step in steps]}
    path.write_text(json.dumps(everything, indent=2))
    title = f"{machine['cpu']}, {os.cpu_count()} cores, {arguments.dtype}"
    plot_long_prompt(rows, [look._asdict() for look in looks], kv_bytes, title, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
