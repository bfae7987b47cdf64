"""Measures what drafts by n-gram look-up are worth: the same requests with and without, in turn, in one engine.

    python -m benchmarks.speculation [--workloads edit,edit-sampled,prose,crowd] [--dtype float32] [--rounds 3]

edit is one user whose answer repeats a document of the prompt, edit-sampled the same at temperature 1; prose is one
user at temperature 1, where hardly anything repeats; crowd is 64 of these at once. Tokens per second are of all tokens
behind the first of each request; ratios are medians over the rounds, each of another piece of text. In each, the tokens
of both must be the same.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import NamedTuple

from benchmarks.peers.engines import MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.peers.workloads import tokenize

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.sampling.params import SamplingParams

COPY = 8
"""So many tokens of a document's copy are given."""


class Workload(NamedTuple):
    """So many requests, each with a piece of text, or with it twice and what begins it, and tokens of answer."""

    requests: int
    temperature: float
    text_tokens: int
    repeats: bool
    new_tokens: int


WORKLOADS = {
    "edit": Workload(1, 0.0, 160, True, 150),
    "edit-sampled": Workload(1, 1.0, 160, True, 150),
    "prose": Workload(1, 1.0, 80, False, 150),
    "crowd": Workload(64, 1.0, 40, False, 24),
}


def prompts_of(workload: Workload, text: list[int], round: int) -> list[list[int]]:
    prompts, length = [], workload.text_tokens
    for index in range(workload.requests):
        at = (round * workload.requests + index) * length % (len(text) - length)
        piece = text[at : at + length]
        prompts.append([*piece, *piece, *piece[:COPY]] if workload.repeats else piece)
    return prompts


def serve(core: EngineCore, workload: Workload, prompts: list[list[int]], round: int) -> tuple[float, list[list[int]]]:
    """Returns tokens per second behind the first of each request, and all tokens by request."""
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=workload.temperature, seed=1 + round, max_tokens=workload.new_tokens, ignore_eos=True
        )
        core.add_request(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params, arrival_s=0.0))
    tokens: list[list[int]] = [[] for _ in prompts]
    begin, known = 0.0, 0
    while core.has_work():
        for output in core.step():
            tokens[int(output.request_id)] += output.new_token_ids
        if not known and all(tokens):
            begin, known = time.perf_counter(), sum(map(len, tokens))
    return (sum(map(len, tokens)) - known) / (time.perf_counter() - begin), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(heading(describe_machine()), end="\n\n")
    text = list(tokenize(MODEL))
    core = EngineCore(
        EngineConfig(
            model=str(resolve_model(MODEL)), dtype=arguments.dtype, quantization=arguments.quantization,
            max_model_len=1024, kv_memory="512MiB", enable_prefix_caching=False,
            speculative_config={"method": "ngram"},
        )
    )  # fmt: skip
    drafter = core.scheduler.drafter
    print("| dtype | workload | off, tokens/s | on, tokens/s | on / off | each | drafts per token | accepted |")
    print("| --- | --- | ---: | ---: | ---: | --- | ---: | ---: |")
    for name in arguments.workloads.split(","):
        workload = WORKLOADS[name]
        serve(core, workload._replace(new_tokens=8), prompts_of(workload, text, 0), 0)
        speeds: dict[bool, list[float]] = {False: [], True: []}
        before = core.stats()
        for round in range(arguments.rounds):
            prompts, answers = prompts_of(workload, text, round + 1), []
            for on in (round % 2 == 1, round % 2 == 0):
                core.scheduler.drafter = drafter if on else None
                speed, tokens = serve(core, workload, prompts, round)
                speeds[on].append(speed)
                answers.append(tokens)
            assert answers[0] == answers[1], "drafts have changed the answer"
        after = core.stats()
        drafts, accepted = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
        ratios = [on / off for on, off in zip(speeds[True], speeds[False], strict=True)]
        generated = workload.requests * workload.new_tokens * arguments.rounds
        print(
            f"| {arguments.dtype} | {name} | {median(speeds[False]):.1f} | {median(speeds[True]):.1f} | "
            f"{median(ratios):.2f} | {', '.join(f'{ratio:.2f}' for ratio in ratios)} | {drafts / generated:.2f} | "
            f"{accepted / max(1, drafts):.0%} |",
            flush=True,
        )
    core.close()


if __name__ == "__main__":
    main()
