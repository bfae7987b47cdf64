"""Measures what drafts, KV formats, quantized weights and prefix hits bring alone and together, for one user.

    python -m benchmarks.compound [--workloads chat,edit,sampled] [--rounds 3] [--weights dense,gguf]

Every combination of {plain, n-gram, draft model} x {bf16, int8, int4_mixed keys and values} x {dense bf16, the GGUF's
integers} has an engine. In each round, engines take turns over the same new piece of text: once cold, and once more
when all of the prompt is in the prefix cache. chat is greedy behind a long history, edit repeats a document of the
prompt, sampled has temperature 1. The draft model is the model itself, the bound of drafts that are all right.

A cell has the tokens per second of whole requests, from their arrival to their end, as a multiple of plain, bf16,
dense and cold (the median over rounds of ratios within a round), and behind it the product of what each of its parts
brings alone. Answers of equal weights and KV format must be equal, whatever drafts and the cache do; "same" is the
share of an answer, from its beginning, that equals the one of dense weights and bf16. Tokens in a GiB are those of
sequences as long as the workload's.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections import defaultdict
from statistics import mean, median
from typing import Any, NamedTuple

from benchmarks.kv_formats import requests_in
from benchmarks.peers.engines import MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.peers.workloads import tokenize
from benchmarks.speculation import Workload, prompts_of

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.sampling.params import SamplingParams

DRAFTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "n-gram": {"method": "ngram"},
    "draft model": {"method": "draft_model", "num_speculative_tokens": 4},
}
FORMATS = ("bfloat16", "int8", "int4_mixed")
WEIGHTS: dict[str, dict[str, str]] = {"dense": {}, "gguf": {"quantization": "gguf"}}
PREFIXES = ("cold", "hit")
GIB = 1 << 30


WORKLOADS = {
    "chat": Workload(1, 0.0, 3000, False, 128),
    "edit": Workload(1, 0.0, 1000, True, 128),
    "sampled": Workload(1, 1.0, 1000, False, 128),
}


class Kind(NamedTuple):
    """Names what an engine has."""

    drafts: str
    format: str
    weights: str


class Cell(NamedTuple):
    """Names what a request has: an engine of a kind, and a prompt that is cold or a hit."""

    drafts: str
    format: str
    weights: str
    prefix: str


PLAIN = Cell("plain", "bfloat16", "dense", "cold")


class Measured:
    """Gathers one workload's speeds and answers by cell, a round each, and drafts by kind."""

    def __init__(self) -> None:
        self.speeds: dict[Cell, list[float]] = defaultdict(list)
        self.answers: dict[Cell, list[list[int]]] = defaultdict(list)
        self.drafts: dict[Kind, list[int]] = {}

    def gain(self, cell: Cell) -> float:
        """Returns a cell's speed as a multiple of `PLAIN`'s."""
        return median(a / b for a, b in zip(self.speeds[cell], self.speeds[PLAIN], strict=True))

    def product(self, cell: Cell) -> float:
        """Returns the product of what each part of a cell brings alone."""
        alone = (PLAIN._replace(**{part: value}) for part, value in cell._asdict().items())
        return math.prod(self.gain(each) for each in alone)

    def same(self, kind: Kind) -> float:
        """Returns the mean share of answers, from their beginning, that equals `PLAIN`'s."""
        return mean(map(same_share, self.answers[Cell(*kind, "cold")], self.answers[PLAIN]))


def same_share(answer: list[int], other: list[int]) -> float:
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(answer, other, strict=True))
    return sum(1 for _ in equal) / len(answer)


def serve(
    core: EngineCore, workload: Workload, prompt: list[int], seed: int, is_hit: bool = False
) -> tuple[float, list[int]]:
    """Returns a request's tokens per second, from its arrival to its end, and its tokens."""
    params = SamplingParams(
        temperature=workload.temperature, seed=seed, max_tokens=workload.new_tokens, ignore_eos=True
    )
    begin, tokens = time.perf_counter(), list[int]()
    salt = str(workload)  # workloads have pieces of one text
    core.add_request(
        EngineRequest(request_id="r", prompt_token_ids=prompt, params=params, arrival_s=0.0, cache_salt=salt)
    )
    while core.has_work():
        for output in core.step():
            tokens += output.new_token_ids
            assert (output.num_cached_tokens > 0) == is_hit, f"{output.num_cached_tokens} tokens were cached"
    return len(tokens) / (time.perf_counter() - begin), tokens


def engine(kind: Kind, model: str) -> EngineCore:
    drafts = DRAFTS[kind.drafts]
    if drafts is not None and drafts["method"] == "draft_model":
        drafts = drafts | {"model": model}
    return EngineCore(EngineConfig(
        model=model, dtype="bfloat16", kv_cache_dtype=kind.format, kv_memory="256MiB", max_model_len=4096,
        max_num_seqs=4, speculative_config=drafts, **WEIGHTS[kind.weights],
    ))  # fmt: skip


def tokens_per_gib(core: EngineCore, workload: Workload) -> float:
    facts = core.executor.facts
    context = workload.text_tokens * (2 if workload.repeats else 1) + workload.new_tokens
    return context * requests_in(GIB // facts.frame_bytes, list(facts.windows), context)


def measure(cores: dict[Kind, EngineCore], workload: Workload, text: list[int], rounds: int) -> Measured:
    measured, order = Measured(), [*cores]
    for core in cores.values():  # kernels, pages, and what drafts bring
        serve(core, workload, *prompts_of(workload, text, 0), 0)
    before = {kind: core.stats() for kind, core in cores.items()}
    for round in range(1, rounds + 1):
        order.append(order.pop(0))
        for kind in order:
            for prefix in PREFIXES:
                speed, answer = serve(cores[kind], workload, *prompts_of(workload, text, round), round, prefix == "hit")
                measured.speeds[Cell(*kind, prefix)].append(speed)
                measured.answers[Cell(*kind, prefix)].append(answer)
    for kind, core in cores.items():
        stats = core.stats()
        counts = stats.draft_tokens, stats.accepted_tokens
        measured.drafts[kind] = [
            now - then
            for now, then in zip(counts, (before[kind].draft_tokens, before[kind].accepted_tokens), strict=True)
        ]
    for cell, answers in measured.answers.items():
        assert answers == measured.answers[cell._replace(drafts="plain", prefix="cold")], f"another answer: {cell}"
    return measured


def report(name: str, measured: Measured, cores: dict[Kind, EngineCore], weights: list[str]) -> None:
    columns = [(each, prefix) for each in weights for prefix in PREFIXES]
    print(f"**{name}**: plain, bf16, dense, cold has {median(measured.speeds[PLAIN]):.0f} tokens/s.\n")
    heads = "".join(f" {each}, {prefix} |" for each, prefix in columns)
    print(f"| drafts | K/V | tokens in a GiB |{heads} same | accepted |")
    print(f"| --- | --- | ---: |{' ---: |' * len(columns)} ---: | ---: |")
    for drafts, format in itertools.product(DRAFTS, FORMATS):
        kinds = [Kind(drafts, format, each) for each in weights]
        cells = [Cell(drafts, format, *column) for column in columns]
        gains = "".join(f" {measured.gain(cell):.2f} ({measured.product(cell):.2f}) |" for cell in cells)
        proposed, accepted = map(sum, zip(*(measured.drafts[kind] for kind in kinds), strict=True))
        print(
            f"| {drafts} | {format} | {tokens_per_gib(cores[kinds[0]], WORKLOADS[name]):,.0f} |{gains} "
            f"{' / '.join(f'{measured.same(kind):.0%}' for kind in kinds)} | "
            f"{f'{accepted / proposed:.0%} of {proposed}' if proposed else '–'} |",
            flush=True,
        )
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--weights", default=",".join(WEIGHTS), help="dense must be among them")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(heading(describe_machine()), end="\n\n")
    model, text, weights = str(resolve_model(MODEL)), list(tokenize(MODEL)), options.weights.split(",")
    kinds = map(Kind._make, itertools.product(DRAFTS, FORMATS, weights))
    cores = {kind: engine(kind, model) for kind in kinds}
    for name in options.workloads.split(","):
        report(name, measure(cores, WORKLOADS[name], text, options.rounds), cores, weights)
    for core in cores.values():
        core.close()


if __name__ == "__main__":
    main()
