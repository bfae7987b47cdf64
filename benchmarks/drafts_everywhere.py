"""Measures what drafts cost or bring on every workload of the side-by-side benchmark: an engine with them beside one
without.

    python -m benchmarks.drafts_everywhere [--draft ngram|suffix] [--workloads one,two,mixed,prefix,decode,long,crowd]
        [--engines pagemill,pagemill-bf16,pagemill-gguf] [--temperature 0] [--rounds 3]

Both engines serve the same requests, a step of each in turn, so that a shared machine's speed counts for both alike.
The ratio is of the sums of their steps' seconds, prompts included: above 1, drafts bring something. Greedy answers of a
small model repeat themselves; at `--temperature 1` hardly anything repeats. Goal: at least 0.97.
"""

from __future__ import annotations

import argparse
from statistics import median

from benchmarks.in_turns import sums_of_steps
from benchmarks.peers.engines import ENGINES, MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.peers.workloads import STANDARD, Workload, make, tokenize

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.hub import resolve_model
from pagemill.sampling.params import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="ngram", choices=["ngram", "suffix"])
    parser.add_argument("--workloads", default=",".join(STANDARD))
    parser.add_argument("--engines", default="pagemill,pagemill-bf16,pagemill-gguf")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(heading(describe_machine()), end="\n\n")
    print("| engine | workload | on / off | its rounds | drafts per token | accepted |")
    print("| --- | --- | ---: | --- | ---: | ---: |")
    text = tokenize(MODEL)
    for engine in arguments.engines.split(","):
        cores = [open_engine(engine, drafts) for drafts in (None, {"method": arguments.draft})]
        serve(cores, make("tiny", text), arguments.temperature)
        for name in arguments.workloads.split(","):
            before, ratios, generated = cores[1].stats(), [], 0
            for round in range(arguments.rounds):
                workload = make(name, text, round)
                off_s, on_s = serve(cores, workload, arguments.temperature)
                ratios.append(off_s / on_s)
                generated += workload.output_tokens
            after = cores[1].stats()
            drafts, accepted = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
            print(
                f"| {engine} | {name} | {median(ratios):.3f} | {', '.join(f'{ratio:.3f}' for ratio in ratios)} | "
                f"{drafts / generated:.2f} | {accepted / max(1, drafts):.0%} |",
                flush=True,
            )
        for core in cores:
            core.close()


def open_engine(name: str, drafts: dict[str, str] | None) -> EngineCore:
    settings = {"kv_memory": "3GiB", **ENGINES[name].settings, "speculative_config": drafts}
    return EngineCore(EngineConfig(model=str(resolve_model(MODEL)), **settings))


def serve(cores: list[EngineCore], workload: Workload, temperature: float) -> list[float]:
    """Returns the seconds of all steps of each engine."""
    for core in cores:
        for index, (prompt, length) in enumerate(zip(workload.prompts, workload.max_tokens, strict=True)):
            params = SamplingParams(temperature=temperature, seed=index, max_tokens=length, ignore_eos=True)
            core.add_request(
                EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params, arrival_s=0.0)
            )
    return sums_of_steps(cores)


if __name__ == "__main__":
    main()
