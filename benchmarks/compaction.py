"""What scattered frames cost whole decode steps, and what it would cost to make them neighbours.

    python -m benchmarks.compaction [--rows 64] [--context 1024] [--steps 40]

Two engines decode the same prompts, which share nothing, and take their steps in turn. In one, each sequence's frames
are neighbours, as the pool gives them; in the other, all blocks have changed places at random, the worst there is. Then
blocks are moved as resizing moves them, from frames anywhere to neighbouring ones, a sequence's at a time. Medians.
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
from pagemill.memory.occupancy import scatter
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.step_plan import StepPlan, StepResult

BLOCK_SIZE = 16


def decoding(arguments: argparse.Namespace, scattered: bool) -> EngineCore:
    """An engine whose rows have all been given their first token."""
    rows, length = arguments.rows, arguments.context + arguments.steps + 8
    frames = 2 * rows * -(-length // BLOCK_SIZE)
    config = EngineConfig(
        model=str(resolve_model(MODEL)), dtype=arguments.dtype, kv_memory="8GiB", max_model_len=length,
        max_num_seqs=rows, max_num_batched_tokens=1024, enable_prefix_caching=False,
    )  # fmt: skip
    core = EngineCore(config)
    core.resize(frames * core._engine.pool.layout.frame_bytes)
    generator = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    for row in range(rows):
        prompt = [generator.randrange(1000, 40000) for _ in range(arguments.context)]
        core.add_request(EngineRequest(request_id=f"r{row}", prompt_token_ids=prompt, params=params, arrival_s=0.0))
    # Prompts are not computed: what a step takes does not depend on what K and V are, only that they are there.
    core._engine.pool._frames[:, :frames].fill_(0.01)
    core._scheduler.max_num_batched_tokens = rows * arguments.context
    computed, core._runner.run = core._runner.run, _nothing
    core.step()
    assert core._scheduler.num_running == rows
    if scattered:
        memory = core._memory
        blocks = memory._blocks.in_use()
        places = [memory._blocks.frame[block] for block in blocks]
        for block, place in zip(blocks, generator.sample(places, len(places)), strict=True):
            memory._blocks.frame[block] = place
        for table in memory._tables:
            memory.place(table, table.row)
    core._runner.run = computed
    return core


def _nothing(plan: StepPlan) -> StepResult:
    """A step's result, had every row got token 0."""
    samples = len(plan.sample_from)
    return StepResult(tokens=[0] * samples, logprobs=[None] * samples)


def move_s(core: EngineCore, blocks: int, rounds: int) -> float:
    """Seconds to move so many blocks out of random frames; the pool's other half is free."""
    generator, pool = random.Random(1), core._engine.pool
    times = []
    for _ in range(rounds):
        source = torch.tensor(generator.sample(range(pool.num_frames // 2), blocks))
        target = torch.arange(blocks) + generator.randrange(pool.num_frames // 2, pool.num_frames - blocks)
        begin = time.perf_counter()
        pool.copy_frames(source, target)
        times.append(time.perf_counter() - begin)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores, {arguments.dtype}, load average {machine['load_average']}")
    cores = {"neighbours": decoding(arguments, scattered=False), "scattered": decoding(arguments, scattered=True)}
    times: dict[str, list[float]] = {name: [] for name in cores}
    for _ in range(arguments.steps):
        for name, core in cores.items():
            begin = time.perf_counter()
            core.step()
            times[name].append(time.perf_counter() - begin)
    step = {name: median(values[2:]) for name, values in times.items()}
    for name, core in cores.items():
        steps, apart = scatter(core._memory)
        print(f"{name:12} {1e3 * step[name]:7.2f} ms per step, {apart / steps:.0%} of table steps lead elsewhere")
    gained = (step["scattered"] - step["neighbours"]) / arguments.rows
    blocks = -(-arguments.context // BLOCK_SIZE)
    moved = move_s(cores["scattered"], blocks, 20)
    print(
        f"scattered / neighbours {step['scattered'] / step['neighbours']:.3f}; {1e6 * gained:.0f} µs per row and step"
    )
    print(f"to move a row's {blocks} blocks {1e3 * moved:.2f} ms, which is {moved / gained:.0f} of its steps")


if __name__ == "__main__":
    main()
