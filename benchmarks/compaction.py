"""Measures what scattered frames cost whole decode steps, and what it would cost to make them neighbours.

    python -m benchmarks.compaction [--rows 64] [--context 1024] [--steps 120]

Three engines decode the same prompts, which share nothing, and take their steps in turn. In one, each sequence's frames
are neighbours, as the pool gives them; in the others, all blocks have changed places at random, the worst there is, and
one of these moves them together again while it decodes (`kv_compaction`). "late" are the last quarter of the steps.
Then a sequence's blocks are moved at once, from frames anywhere to neighbouring ones; and the engine that has nothing
to move looks for it. Medians.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median

import torch
from benchmarks.peers.engines import MODEL
from benchmarks.peers.machine import describe_machine

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.step_plan import StepPlan, StepResult

BLOCK_SIZE = 16


def decoding(arguments: argparse.Namespace, scattered: bool, kv_compaction: str) -> EngineCore:
    """Returns an engine whose rows have all been given their first token."""
    rows, length = arguments.rows, arguments.context + arguments.steps + 8
    frames = 2 * rows * -(-length // BLOCK_SIZE)
    config = EngineConfig(
        model=str(resolve_model(MODEL)), dtype=arguments.dtype, kv_memory="1GiB", max_model_len=length,
        max_num_seqs=rows, max_num_batched_tokens=1024, enable_prefix_caching=False,
        kv_compaction=kv_compaction, speculative_config="off",
    )  # fmt: skip
    core = EngineCore(config)
    core.resize(frames * core.executor.pool.layout.frame_bytes)
    generator = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    for row in range(rows):
        prompt = [generator.randrange(1000, 40000) for _ in range(arguments.context)]
        core.add_request(EngineRequest(request_id=f"r{row}", prompt_token_ids=prompt, params=params, arrival_s=0.0))
    # Prompts are not computed: what a step takes does not depend on what K and V are, only that they are there.
    for layer in range(len(core.executor.decoder.spec.layers)):
        cache = core.executor.pool.layer(layer)
        cache.key[:frames], cache.value[:frames] = 0.01, 0.01
    core.scheduler.max_num_batched_tokens = rows * arguments.context
    computed, core.executor.run = core.executor.run, _nothing
    core.step()
    assert core.scheduler.num_running == rows
    if scattered:
        memory = core.memory
        blocks = memory.core.blocks.in_use()
        places = [memory.core.blocks.frame[block] for block in blocks]
        for block, place in zip(blocks, generator.sample(places, len(places)), strict=True):
            memory.core.blocks.frame[block] = place
        for table in memory.core.tables:
            memory.place(table, table.row)
    core.executor.run = computed
    return core


def _nothing(plan: StepPlan) -> StepResult:
    """Returns a step's result, had every row got token 0."""
    samples = len(plan.sample_from)
    return StepResult(tokens=[[0]] * samples, logprobs=[None] * samples)


def move_s(core: EngineCore, blocks: int, rounds: int) -> float:
    """Returns the seconds to move so many blocks out of random frames; the pool's other half is free."""
    generator, pool = random.Random(1), core.executor.pool
    times = []
    for _ in range(rounds):
        source = torch.tensor(generator.sample(range(pool.num_frames // 2), blocks))
        target = torch.arange(blocks) + generator.randrange(pool.num_frames // 2, pool.num_frames - blocks)
        begin = time.perf_counter()
        pool.frames.copy(source, target)
        times.append(time.perf_counter() - begin)
    return median(times)


def look_s(core: EngineCore, rounds: int) -> float:
    """Returns the seconds to look at a sequence whose blocks lie together, on average."""
    compaction, tables = core.memory.compaction, list(core.memory.core.tables)
    begin = time.perf_counter()
    for turn in range(rounds):
        assert compaction.compact(tables[turn % len(tables)], 1000, 64) == 0
    return (time.perf_counter() - begin) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores, {arguments.dtype}, load average {machine['load_average']}")
    cores = {
        "neighbours": decoding(arguments, scattered=False, kv_compaction="auto"),
        "scattered": decoding(arguments, scattered=True, kv_compaction="off"),
        "compacting": decoding(arguments, scattered=True, kv_compaction="auto"),
    }
    looked = look_s(cores["neighbours"], 2000)
    times: dict[str, list[float]] = {name: [] for name in cores}
    for _ in range(arguments.steps):
        for name, core in cores.items():
            begin = time.perf_counter()
            core.step()
            times[name].append(time.perf_counter() - begin)
    step = {name: median(values[2:]) for name, values in times.items()}
    for name, core in cores.items():
        steps, apart = core.memory.scatter()
        late, stats = median(times[name][-arguments.steps // 4 :]), core.stats()
        print(
            f"{name:12} {1e3 * step[name]:7.2f} ms per step, late {1e3 * late:7.2f}, all {sum(times[name]):6.2f} s; "
            f"{apart / steps:.0%} of table steps lead elsewhere, {stats.compaction_copies} copies"
        )
    gained = (step["scattered"] - step["neighbours"]) / arguments.rows
    blocks = -(-arguments.context // BLOCK_SIZE)
    moved = move_s(cores["scattered"], blocks, 20)
    print(
        f"scattered / neighbours {step['scattered'] / step['neighbours']:.3f}; {1e6 * gained:.0f} µs per row and step"
    )
    print(f"to move a row's {blocks} blocks {1e3 * moved:.2f} ms, which is {moved / gained:.0f} of its steps")
    print(f"to look at a row and find nothing to move {1e6 * looked:.1f} µs")


if __name__ == "__main__":
    main()
