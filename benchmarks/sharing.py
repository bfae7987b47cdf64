"""Measures what sequences that fork share: blocks saved by parallel sampling and beam search, and the effect on speed.

    python -m benchmarks.sharing [--workloads alpaca,sharegpt] [--requests 8] [--modes n2,n4,n6,beam2,beam4,beam6]

Requests of real text have the mean lengths of the two workloads in the PagedAttention paper (arXiv 2309.06180, figure
11), drawn from a log-normal distribution. Blocks saved are 1 - blocks held / blocks that the same sequences would hold
each for itself, over all steps: after each step, distinct blocks in all tables against entries of all tables. At most
as much could be saved as there are blocks whose tokens, and all before them, are those of another. Nothing else is
shared: the prefix cache is off. Each mode then runs against as many independent requests as it has sequences,
of the same prompts and lengths, in turn; medians of the rounds. With `--rounds 0` blocks are counted and nothing timed.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.engines import MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.peers.plots import plot_shares
from benchmarks.peers.workloads import tokenize

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.scheduling.sequence import Sequence

RESULTS = Path(__file__).parent / "results"
SPREAD = 0.5
"""Standard deviation of the logarithm of a length."""


@dataclass(frozen=True)
class Workload:
    """Holds mean lengths in tokens, and the shares of blocks that the paper reports for it, in per cent."""

    prompt_len: int
    output_len: int
    published: dict[str, tuple[float, float]]


WORKLOADS = {
    "alpaca": Workload(19, 58, {"n": (6.1, 9.8), "beam": (37.6, 55.2)}),
    "sharegpt": Workload(161, 338, {"n": (16.2, 30.5), "beam": (44.3, 66.3)}),
}


def draw_requests(workload: Workload, count: int, text: list[int], seed: int) -> list[tuple[list[int], int]]:
    """Returns (prompt, output length) of each request: lengths with the workload's means, prompts from anywhere."""
    rng = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, round(mean * rng.lognormvariate(-(SPREAD**2) / 2, SPREAD)))

    drawn = [(length(workload.prompt_len), length(workload.output_len)) for _ in range(count)]
    starts = [rng.randrange(len(text) - prompt_len) for prompt_len, _ in drawn]
    return [(text[at : at + prompt_len], out) for at, (prompt_len, out) in zip(starts, drawn, strict=True)]


def forked(mode: str, requests: list[tuple[list[int], int]]) -> list[EngineRequest]:
    """Returns one request for each, whose sequences share their prompt and more."""
    kind, width = split(mode)
    made = []
    for number, (prompt, length) in enumerate(requests):
        params = SamplingParams(n=width, temperature=1.0, seed=number, max_tokens=length, ignore_eos=True)
        beam = BeamSearchParams(width, length, ignore_eos=True) if kind == "beam" else None
        made.append(_request(f"r{number}", prompt, params, beam))
    return made


def independent(mode: str, requests: list[tuple[list[int], int]]) -> list[EngineRequest]:
    """Returns as many requests of one sequence as the mode has sequences."""
    _, width = split(mode)
    made = []
    for number, (prompt, length) in enumerate(requests):
        for index in range(width):
            seed = number * width + index
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=length, ignore_eos=True)
            made.append(_request(f"r{seed}", prompt, params, None))
    return made


def split(mode: str) -> tuple[str, int]:
    """Returns ("n", 4) for "n4"."""
    kind = mode.rstrip("0123456789")
    return kind, int(mode[len(kind) :])


def _request(name: str, prompt: list[int], params: SamplingParams, beam: BeamSearchParams | None) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, arrival_s=0.0, beam=beam)


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, float]:
    """Runs all requests; output tokens per second, the share of blocks saved over all steps, and what could be saved at
    most: if no two blocks of a request held the same tokens behind the same tokens."""
    scheduler, memory = core.scheduler, core.memory
    tokens = entries = held = contents = 0
    watching = 0.0
    for request in requests:
        core.add_request(request)
    begin = time.perf_counter()
    while core.has_work():
        tokens += sum(len(output.new_token_ids) for output in core.step())
        looked = time.perf_counter()
        entries += sum(sequence.table.num_held for sequence in scheduler.state.running)
        held += memory.stats().frames_active
        contents += len({content for sequence in scheduler.state.running for content in contents_of(sequence)})
        watching += time.perf_counter() - looked
    seconds = time.perf_counter() - begin - watching
    saved, possible = 1 - held / entries, 1 - contents / entries
    return {"tokens": tokens, "tokens_per_s": tokens / seconds, "saved": saved, "possible": possible}


def contents_of(sequence: Sequence) -> Iterator[int]:
    """Returns what tells each block of a running sequence from others: the hash of its tokens and of all before it."""
    content, size, length = hash(sequence.request.request_id), 16, sequence.table.length
    for first in range(0, sequence.table.num_held * size, size):
        content = hash((content, first, tuple(sequence.tokens[first : min(first + size, length)])))
        yield content


def measure(core: EngineCore, name: str, modes: list[str], count: int, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each mode."""
    workload = WORKLOADS[name]
    requests = draw_requests(workload, count, tokenize(MODEL), seed=len(name))
    rows = []
    for mode in modes:
        if rounds:
            run(core, independent(mode, requests))  # the first of a mode is slow, whichever it is
        pairs = []
        for number in range(rounds):
            made = [forked(mode, requests), independent(mode, requests)]
            first = number % 2  # they take turns at going first
            runs = {place: run(core, made[place]) for place in (first, 1 - first)}
            pairs.append((runs[0], runs[1]))
        ours = [one for one, _ in pairs] or [run(core, forked(mode, requests))]
        assert all(one["tokens"] == other["tokens"] for one, other in pairs)
        row = {"workload": name, "mode": mode, "saved": ours[0]["saved"], "possible": ours[0]["possible"]}
        row["published"] = workload.published[split(mode)[0]]
        if pairs:
            row["tokens_per_s"] = median(one["tokens_per_s"] for one, _ in pairs)
            row["independent_tokens_per_s"] = median(other["tokens_per_s"] for _, other in pairs)
        rows.append(row)
        print(row_of(row), flush=True)
    return rows


def row_of(row: dict[str, Any]) -> str:
    low, high = row["published"]
    speeds = "| | | |"
    if "tokens_per_s" in row:
        one, other = row["tokens_per_s"], row["independent_tokens_per_s"]
        speeds = f"| {one:.0f} | {other:.0f} | {one / other:.2f} |"
    saved = f"{row['saved']:.1%} | {row['possible']:.1%}"
    return f"| {row['workload']} | {row['mode']} | {saved} | {low:g}–{high:g} % {speeds}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="alpaca,sharegpt")
    parser.add_argument("--modes", default="n2,n4,n6,beam2,beam4,beam6")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--name", default="sharing", help="of the files in benchmarks/results")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(heading(machine), end="\n\n")
    print("| workload | sequences | blocks saved | possible | published | tokens/s | independent | ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    config = EngineConfig(
        model=str(resolve_model(MODEL)), dtype=arguments.dtype, kv_memory="1GiB", max_model_len=2048,
        max_num_seqs=6 * arguments.requests, enable_prefix_caching=False, speculative_config="off",
    )  # fmt: skip
    core = EngineCore(config)
    run(core, forked("beam2", draw_requests(WORKLOADS["alpaca"], 2, tokenize(MODEL), seed=0)))  # warm-up
    rows = []
    for name in arguments.workloads.split(","):
        rows += measure(core, name, arguments.modes.split(","), arguments.requests, arguments.rounds)
    core.close()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{arguments.name}.json"
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))
    plot_shares(rows, f"{machine['cpu']}, {arguments.dtype}", path.with_suffix(".png"))


if __name__ == "__main__":
    main()
