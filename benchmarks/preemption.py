"""Measures what preemption costs when memory is short: the pool holds a share of the blocks that a workload asks for.

    python -m benchmarks.preemption [--workload mixed] [--dtype float32,bfloat16] [--modes recompute,swap,auto]
        [--pool-share 0.5] [--target-tpot-ms off,auto] [--rounds 3]

All requests are there from the start. The pool has `--pool-share` of the blocks that they would hold at once if all ran
side by side, host memory below it as many as the pool; in mode "none" there is none. "roomy" is the same in a pool that
is large enough. Gaps are the times between a request's tokens, those in which it was preempted included. Engines of all
modes and targets take turns, a round of each after the other.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from benchmarks.peers.engines import BLOCK_ELEMENTS, MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.peers.workloads import SHAPES, Workload, make, tokenize

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.sampling.params import SamplingParams

BLOCK = 16


def blocks_wanted(workload: Workload) -> int:
    """Returns the most blocks that its requests hold at once if all run side by side, a token each per step."""
    lengths = list(zip(map(len, workload.prompts), workload.max_tokens, strict=True))
    return max(
        sum(-(-(prompt + step) // BLOCK) for prompt, output in lengths if step < output)
        for step in range(max(workload.max_tokens))
    )


@dataclass
class Served:
    """Holds one run: its seconds, the seconds between two tokens of a request, and differences of `EngineStats`."""

    seconds: float
    tokens: int
    gaps: list[float]
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def row(self) -> str:
        middle, late = np.percentile(self.gaps, [50, 99])
        counts = " | ".join(f"{count:.0f}" for count in self.counts.values())
        return (
            f"{self.tokens / self.seconds:.0f} | {1e3 * middle:.0f} | {1e3 * late:.0f} | {late / middle:.1f} | "
            f"{max(self.gaps):.1f} | {counts} |"
        )


COUNTED = ("preemptions", "preempted_tokens_recomputed", "preempted_tokens_swapped_in", "evictions", "steps")


def serve(core: EngineCore, workload: Workload) -> Served:
    before, begin = core.stats(), time.perf_counter()
    for index, (prompt, tokens) in enumerate(zip(workload.prompts, workload.max_tokens, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        core.add_request(
            EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params, arrival_s=time.monotonic())
        )
    last: dict[str, float] = {}
    gaps: list[float] = []
    while core.has_work():
        outputs, now = core.step(), time.perf_counter()
        for output in outputs:
            if output.request_id in last:
                gaps.append(now - last[output.request_id])
            last[output.request_id] = now
    after = core.stats()
    counts = {name: getattr(after, name) - getattr(before, name) for name in COUNTED}
    return Served(time.perf_counter() - begin, workload.output_tokens, gaps, counts)


def in_mode(mode: str, wanted: int, pool_share: float) -> tuple[int, bool, str]:
    """Returns the frames of the pool, whether there are as many in host memory, and the preemption mode."""
    if mode == "roomy":
        return 2 * wanted, False, "auto"
    return int(pool_share * wanted), mode != "none", "auto" if mode == "none" else mode


def engine(dtype: str, frames: int, has_host: bool, preemption_mode: str, **settings: Any) -> EngineCore:
    path = str(resolve_model(MODEL))
    frame_bytes = BLOCK_ELEMENTS * getattr(torch, dtype).itemsize
    core = EngineCore(
        EngineConfig(
            model=path,
            dtype=dtype,
            max_model_len=2048,
            kv_memory=frames * frame_bytes,
            block_size=BLOCK,
            speculative_config="off",
            kv_host_memory=frames * frame_bytes if has_host else 0,
            preemption_mode=preemption_mode,  # type: ignore[arg-type]
            **settings,
        )
    )
    assert core.ready.num_frames == frames
    return core


def target(text: str) -> float | str:
    return text if text in ("auto", "off") else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="mixed", choices=list(SHAPES))
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--pool-share", type=float, default=0.5)
    parser.add_argument("--target-tpot-ms", default="auto", help="auto, off or milliseconds; several by commas")
    parser.add_argument("--modes", default="roomy,recompute,swap,auto")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    print(heading(describe_machine()), end="\n\n")
    text = tokenize(MODEL)
    wanted = blocks_wanted(make(arguments.workload, text))
    print(f"| dtype | mode | target | tokens/s | gap ms, median | p99 | ratio | longest, s | {' | '.join(COUNTED)} |")
    print("| --- | --- | --- |" + " ---: |" * (5 + len(COUNTED)))
    for dtype in arguments.dtype.split(","):
        cores = {
            (mode, one): engine(dtype, *in_mode(mode, wanted, arguments.pool_share), target_tpot_ms=target(one))
            for mode in arguments.modes.split(",")
            for one in arguments.target_tpot_ms.split(",")
        }
        for core in cores.values():
            serve(core, make("tiny", text))  # warm-up
        for round in range(arguments.rounds):
            for (mode, one), core in cores.items():
                served = serve(core, make(arguments.workload, text, round))
                print(f"| {dtype} | {mode} | {one} | {served.row}", flush=True)
        for core in cores.values():
            core.close()


if __name__ == "__main__":
    main()
