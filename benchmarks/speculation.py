"""Measures what drafts are worth: the same requests with and without, in turn, in one engine.

    python -m benchmarks.speculation [--draft ngram|suffix|self|pair|heads]
        [--workloads edit,edit-sampled,chat,prose,crowd,again,named,forms] [--dtype float32] [--rounds 3] [--drafts 4]
        [--branches 4]

edit is one user whose answer repeats a document of the prompt, edit-sampled the same at temperature 1; chat is one
greedy user, prose one at temperature 1, where hardly anything repeats; crowd is 64 of these at once. In again, named
and forms, four greedy users ask one after the other (see repeated_questions.py). Drafts come from n-gram look-up, and
from other requests' answers beside it (suffix); from the model itself (self), the bound of drafts that are all right;
for a model of random weights, from another of a tenth of its size (pair, see draft_pair.py), over random tokens; or
from Medusa heads (heads), trained before for some minutes on what the model writes (see trained_heads.py).
Tokens per second are of all tokens behind the first of each request; ratios are medians over the rounds, each of
another piece of text. In each, the tokens of both must be the same.

--by-step: drafts are allowed in every other step of one answer, and the tokens per second of both kinds of steps are
compared, over all rounds: what drifts from answer to answer on a shared machine does not count.

Allowed is the ratio that the accepted drafts allow: where a step takes as long with drafts as without, and a pass of
the draft model so much less than the model's as it has fewer products. With --beside chains, off has drafts too, which
do not branch, and allowed is the ratio of steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from benchmarks.draft_pair import save_pair
from benchmarks.peers.engines import MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.peers.workloads import tokenize
from benchmarks.repeated_questions import NAMES, params_of, questions
from benchmarks.trained_heads import heads_for

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.step_plan import DraftWork

COPY = 8
"""The tokens of a document's copy that are given."""


class Workload(NamedTuple):
    """Describes `requests` requests of one kind: each has a piece of text, or it twice and what begins it.

    asked: the kind of `questions` that are asked instead, one after the other.
    """

    requests: int
    temperature: float
    text_tokens: int
    repeats: bool
    new_tokens: int
    asked: str = ""


WORKLOADS = {
    "edit": Workload(1, 0.0, 160, True, 150),
    "edit-sampled": Workload(1, 1.0, 160, True, 150),
    "chat": Workload(1, 0.0, 80, False, 150),
    "prose": Workload(1, 1.0, 80, False, 150),
    "crowd": Workload(64, 1.0, 40, False, 24),
    **{kind: Workload(len(NAMES), 0.0, 0, False, 150, kind) for kind in ("again", "named", "forms")},
}


PAIR = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Passes:
    """Counts the passes of a draft model, between the engine and its drafter."""

    def __init__(self, drafter: Any) -> None:
        self.count = 0
        self.caught_up = 0
        self._drafter = drafter
        self.verified = drafter.verified
        self.answers = drafter.answers
        self.rests = False
        self.branches = True

    def propose(self, room: Any, rows: int, budget: int, limit_s: float, branches: int) -> Any:
        proposed = {} if self.rests else self._drafter.propose(room, rows, budget, limit_s, branches)
        return proposed if self.branches else {sequence: paths[:1] for sequence, paths in proposed.items()}

    def note_step(self, tokens: int, drafts: int, accepted: int, seconds: float, work: DraftWork) -> None:
        self.count += work.passes + (work.caught_up > 0)
        self.caught_up += work.caught_up
        self._drafter.note_step(tokens, drafts, accepted, seconds, work)


def prompts_of(workload: Workload, text: list[int], round: int) -> list[list[int]]:
    if workload.asked:
        return questions(workload.asked, MODEL, round)
    prompts, length = [], workload.text_tokens
    for index in range(workload.requests):
        at = (round * workload.requests + index) * length % (len(text) - length)
        piece = text[at : at + length]
        prompts.append([*piece, *piece, *piece[:COPY]] if workload.repeats else piece)
    return prompts


def add(core: EngineCore, workload: Workload, index: int, prompt: list[int], round: int) -> None:
    settings = {"temperature": workload.temperature, "seed": 1 + round, "max_tokens": workload.new_tokens}
    params = SamplingParams(**{**settings, "ignore_eos": True, **params_of(workload.asked)})
    core.add_request(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params, arrival_s=0.0))


def serve(core: EngineCore, workload: Workload, prompts: list[list[int]], round: int) -> tuple[float, list[list[int]]]:
    """Returns tokens per second behind the first of each request, and all tokens by request."""
    if workload.asked and len(prompts) > 1:
        return serve_in_turn(core, workload, prompts, round)
    for index, prompt in enumerate(prompts):
        add(core, workload, index, prompt, round)
    tokens: list[list[int]] = [[] for _ in prompts]
    begin, known = 0.0, 0
    while core.has_work():
        for output in core.step():
            tokens[int(output.request_id)] += output.new_token_ids
        if not known and all(tokens):
            begin, known = time.perf_counter(), sum(map(len, tokens))
    return (sum(map(len, tokens)) - known) / (time.perf_counter() - begin), tokens


def serve_in_turn(
    core: EngineCore, workload: Workload, prompts: list[list[int]], round: int
) -> tuple[float, list[list[int]]]:
    """Returns what `serve` does, of requests of which each is the only one while it runs."""
    seconds, count, tokens = 0.0, 0, []
    for prompt in prompts:
        speed, answers = serve(core, workload, [prompt], round)
        seconds += (len(answers[0]) - 1) / speed
        count += len(answers[0]) - 1
        tokens += answers
    return count / seconds, tokens


def load(arguments: argparse.Namespace, folder: str) -> tuple[EngineCore, list[int]]:
    """Returns an engine that drafts, and a text for it."""
    model, speculation = str(resolve_model(MODEL)), {"method": arguments.draft}
    if arguments.draft == "heads":
        speculation = {"method": "medusa", "model": str(heads_for(MODEL, Path(arguments.heads or folder)))}
    if arguments.draft in ("self", "pair"):
        draft = model
        if arguments.draft == "pair":
            model, draft = map(str, save_pair(Path(folder), draft_layers=1, later=arguments.later, **PAIR))
        speculation = {"method": "draft_model", "model": draft}
    if arguments.draft != "heads":
        speculation["num_speculative_tokens"] = arguments.drafts
    if arguments.branches is not None:
        speculation["num_speculative_branches"] = arguments.branches
    config = EngineConfig(
        model=model, dtype=arguments.dtype, quantization=arguments.quantization, max_model_len=1024,
        kv_memory="512MiB", enable_prefix_caching=False, speculative_config=speculation,
    )  # fmt: skip
    if arguments.draft == "pair":
        return EngineCore(config), np.random.default_rng(0).integers(3, PAIR["vocab_size"], 100_000).tolist()
    return EngineCore(config), list(tokenize(MODEL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="ngram", choices=["ngram", "suffix", "self", "pair", "heads"])
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=8, help="num_speculative_tokens")
    parser.add_argument("--branches", type=int, help="self, pair, heads: num_speculative_branches")
    parser.add_argument("--heads", help="the folder of the heads, which are trained into it if it has none")
    parser.add_argument("--by-step", action="store_true")
    parser.add_argument(
        "--beside", default="nothing", choices=["nothing", "chains"], help="what off is: no drafts, or no branches"
    )
    parser.add_argument("--later", type=float, default=0.05, help="pair: the less, the more drafts are right")
    arguments = parser.parse_args()
    print(heading(describe_machine()), end="\n\n")
    with tempfile.TemporaryDirectory() as folder:
        core, text = load(arguments, folder)
    (measure_steps if arguments.by_step else measure)(core, text, arguments)
    core.close()


def measure(core: EngineCore, text: list[int], arguments: argparse.Namespace) -> None:
    passes = Passes(core.scheduler.drafter)
    print(
        "| dtype | workload | off, tokens/s | on, tokens/s | on / off | each | drafts per token | accepted | allowed |"
    )
    print("| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |")
    for name in arguments.workloads.split(","):
        workload = WORKLOADS[name]
        serve(core, workload._replace(new_tokens=8), prompts_of(workload, text, 0), 0)
        speeds: dict[bool, list[float]] = {False: [], True: []}
        steps = {False: 0, True: 0}
        before, generated, passes.count, passes.caught_up = core.stats(), 0, 0, 0
        for round in range(arguments.rounds):
            prompts, answers = prompts_of(workload, text, round + 1), []
            for on in (round % 2 == 1, round % 2 == 0):
                core.scheduler.drafter = passes if on or arguments.beside == "chains" else None
                passes.branches = on
                begin = core.stats().steps
                speed, tokens = serve(core, workload, prompts, round)
                steps[on] += core.stats().steps - begin
                speeds[on].append(speed)
                answers.append(tokens)
            generated += sum(map(len, answers[0]))
            assert answers[0] == answers[1], "drafts have changed the answer"
        after = core.stats()
        drafts, accepted = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
        ratios = [on / off for on, off in zip(speeds[True], speeds[False], strict=True)]
        source = core.executor.facts.drafts
        cost = source.cost if source and arguments.beside == "nothing" else 0
        allowed = steps[False] / (steps[True] + passes.count * cost)
        print(
            f"| {arguments.dtype} | {name} | {median(speeds[False]):.1f} | {median(speeds[True]):.1f} | "
            f"{median(ratios):.2f} | {', '.join(f'{ratio:.2f}' for ratio in ratios)} | {drafts / generated:.2f} | "
            f"{accepted / max(1, drafts):.0%} | {allowed:.2f} |",
            flush=True,
        )


def measure_steps(core: EngineCore, text: list[int], arguments: argparse.Namespace) -> None:
    drafter = core.scheduler.drafter = Passes(core.scheduler.drafter)
    beside_nothing = arguments.beside == "nothing"
    print("| dtype | workload | off, tokens/s | on, tokens/s | on / off | its parts | drafts per token | accepted |")
    print("| --- | --- | ---: | ---: | ---: | --- | ---: | ---: |")
    for name in arguments.workloads.split(","):
        workload, ratios = WORKLOADS[name], []
        whole = np.zeros((2, 2))
        before = core.stats()
        for round in range(arguments.rounds):
            part = np.zeros((2, 2))  # off, on: tokens, seconds
            for index, prompt in enumerate(prompts_of(workload, text, round)):
                add(core, workload, index, prompt, round)
            index = round  # the first and the last steps of answers are of both kinds in turn
            while core.has_work():
                state = core.scheduler.state
                generating = len(state.running) == workload.requests and all(one.generates for one in state.running)
                on = index % 2 == 1
                drafter.rests, drafter.branches = (not on and beside_nothing, on)
                index += generating
                begin = time.perf_counter()
                tokens = sum(len(output.new_token_ids) for output in core.step())
                if generating:
                    part[int(on)] += tokens, time.perf_counter() - begin
            whole += part
            ratios.append(part[1, 0] / part[1, 1] / (part[0, 0] / part[0, 1]))
        off, on = whole[:, 0] / whole[:, 1]
        after = core.stats()
        drafts, accepted = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
        print(
            f"| {arguments.dtype} | {name} | {off:.1f} | {on:.1f} | {on / off:.3f} | "
            f"{', '.join(f'{ratio:.2f}' for ratio in ratios)} | {drafts / whole[1, 0]:.2f} | "
            f"{accepted / max(1, drafts):.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
