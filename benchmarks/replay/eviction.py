"""Measures how much of the prompts each eviction policy finds again, by the cache's size, beside the best possible.

    python -m benchmarks.replay eviction [TRACE.jsonl] [--blocks 2048,4096,…] [--workload agents] [--rate 1]

Without a TRACE, the workload's requests come, `--rate` a second. By default sizes are nine powers of two, the largest
of which holds all blocks that prompts name; but for those in which the longest request would not fit.

The real memory manager, at the trace's own grain: a block of 512 tokens is one token of its chain, so that only the
bookkeeping runs. Requests come in the order of the trace, one after the other; each finds what it can, holds blocks for
its whole prompt and answer, publishes the full ones, and leaves. "best" is Belady's rule on the same requests, see
`best_eviction`; it finds the most tokens, which need not be those that cost most to compute.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Mapping, Sequence

from benchmarks.replay.best_eviction import Visit, best_hits
from benchmarks.replay.output import lines, write_table
from benchmarks.replay.setup import CALIBRATION, add_output_argument, add_trace_arguments, chosen_trace, source_name

from pagemill.errors import TraceError
from pagemill.memory.digest import extend_chain
from pagemill.memory.eviction import POLICIES, PolicyFactory
from pagemill.memory.manager import MemoryManager
from pagemill.simulate.engine import ROOT
from pagemill.simulate.step_time import StepTimes
from pagemill.simulate.trace import MOONCAKE_BLOCK, TracedRequest

ANSWER_BLOCKS = 1 << 31
"""Blocks that answers fill are numbered from here: no prompt of the trace has them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser, seconds=3600.0, rate=1.0, workload="agents", whole=True)
    add_output_argument(parser)
    parser.set_defaults(device=None)
    parser.add_argument("--blocks", help="cache sizes, by commas")
    parser.add_argument("--policies", default=",".join(POLICIES))


def main(arguments: argparse.Namespace) -> None:
    trace = chosen_trace(arguments)
    if not trace[0].hash_ids:
        raise TraceError(
            f"{source_name(arguments)} names no prefixes; eviction needs a trace with hash_ids, as Mooncake's, or a "
            "workload with prefixes or turns"
        )
    step_times = StepTimes.load(CALIBRATION)
    # What attending to a block adds to the cost of computing one, by the calibration.
    layers = len(step_times.shape.windows)
    pair, token = step_times.seconds_of["pair"], step_times.seconds_of["token beyond"]
    attention_share = MOONCAKE_BLOCK * layers * pair / token
    policies = {name: POLICIES[name](attention_share) for name in arguments.policies.split(",")}
    visits = [visit_of(request) for request in trace]
    tokens = [request.prompt_len for request in trace]
    work = [work_of(count / MOONCAKE_BLOCK, attention_share) for count in tokens]
    distinct = len({block for visit in visits for block in visit.chain})
    if arguments.blocks is None:
        longest = max(visit.num_held for visit in visits)
        sizes = [size for size in sizes_up_to(max(distinct, longest)) if size >= longest]
    else:
        sizes = [int(size) for size in arguments.blocks.split(",")]
    print(
        f"{source_name(arguments)}: {len(trace)} requests, {sum(tokens)} prompt tokens, "
        f"{distinct} distinct whole blocks of {MOONCAKE_BLOCK}; "
        f"a block costs {attention_share:.2f} more for each before it",
        flush=True,
    )
    hits: dict[str, list[list[int]]] = {}
    begin = time.perf_counter()
    for name, policy in policies.items():
        hits[name] = [replay_policy(trace, visits, size, policy) for size in sizes]
    hits["best"] = [best_hits(visits, size) for size in sizes]
    found = {name: [MOONCAKE_BLOCK * sum(one) / sum(tokens) for one in by_size] for name, by_size in hits.items()}
    saved = {
        name: [sum(work_of(count, attention_share) for count in one) / sum(work) for one in by_size]
        for name, by_size in hits.items()
    }
    report("share of prompt tokens found", sizes, found)
    report("share of the prompts' computing that this saves", sizes, saved)
    print(f"\nreplayed {len(sizes)} x {len(hits)} times in {time.perf_counter() - begin:.0f} s")
    rows = [
        {
            "blocks": size,
            "found": {name: found[name][i] for name in hits},
            "saved": {name: saved[name][i] for name in hits},
        }
        for i, size in enumerate(sizes)
    ]
    write_table(arguments, "eviction", {"attention_share": attention_share}, rows)
    percent = {name: [100 * share for share in shares] for name, shares in found.items()}
    lines(arguments, "eviction", sizes, percent, "cache, blocks of 512 tokens", "prompt tokens found, %")


def sizes_up_to(num_blocks: int) -> list[int]:
    """Returns nine powers of two, the largest of which holds so many blocks."""
    last = (num_blocks - 1).bit_length()
    return [1 << power for power in range(max(0, last - 8), last + 1)]


def report(title: str, sizes: Sequence[int], shares: Mapping[str, Sequence[float]]) -> None:
    """Prints a table; in brackets, each share of the last column's."""
    print(f"\n{title}\n\n| blocks | tokens |" + "".join(f" {name} |" for name in shares))
    print("| ---: | ---: |" + " ---: |" * len(shares))
    for index, size in enumerate(sizes):
        best = shares["best"][index]
        cells = [f" {by_size[index]:.2%} ({by_size[index] / best if best else 1:.0%}) |" for by_size in shares.values()]
        print(f"| {size} | {size * MOONCAKE_BLOCK / 1e6:.1f} M |" + "".join(cells))


def work_of(num_blocks: float, attention_share: float) -> float:
    """Returns the cost of computing the first blocks of a chain; 1 is that of a block before which there is none."""
    return num_blocks + attention_share * num_blocks * (num_blocks - 1) / 2 if num_blocks > 1 else num_blocks


def visit_of(request: TracedRequest) -> Visit:
    """Returns a request's visit. One token of the prompt must be computed; an answer's last token needs no place."""
    chain = request.hash_ids[: request.prompt_len // MOONCAKE_BLOCK]
    return Visit(chain, (request.prompt_len - 1) // MOONCAKE_BLOCK, -(-(request.length - 1) // MOONCAKE_BLOCK))


def replay_policy(
    trace: Sequence[TracedRequest], visits: Sequence[Visit], num_frames: int, policy: PolicyFactory
) -> list[int]:
    """Returns the blocks found, by request, by the real memory manager. Raises TraceError if a request does not fit."""
    memory = MemoryManager(num_frames, 1, [None], policy=policy)
    hits: list[int] = []
    for step, (request, visit) in enumerate(zip(trace, visits, strict=True)):
        full = (request.length - 1) // MOONCAKE_BLOCK
        answer = range(ANSWER_BLOCKS + 1024 * request.number, ANSWER_BLOCKS + 1024 * request.number + 1024)
        blocks = array("L", [*visit.chain, *answer[: full - len(visit.chain)]])
        digests: list[bytes] = []
        extend_chain(digests, ROOT, blocks, 1)
        table, found = memory.open(blocks, digests, ROOT, request.arrival_s, visit.num_wanted)
        hits.append(found)
        if memory.reserve(table, visit.num_held) is not None:
            raise TraceError(f"request {request.number} holds {visit.num_held} blocks; give the cache more, --blocks")
        memory.drain(step)
        memory.commit(table, full, blocks, digests)
        memory.retire(step)
        memory.close(table, request.arrival_s)
    return hits
