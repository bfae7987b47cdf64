"""Measures how fast a prompt's blocks come from a folder that machines share, beside a store of this machine's own.

    python -m benchmarks.shared_folder [--dtype bfloat16] [--tokens 4096] [--rounds 3] [--folder DIR]

An engine computes prompts and is closed. A new one, which has none of that in memory, is asked for the first token of
each: with `kv_disk_shared` (a file for each block), without it (one file), and without a tier, which computes. Medians
over prompts and rounds; the ways take turns. Files are dropped from the page cache before. The first load of an engine
pays for the pool's pages, so each has loaded another prompt before.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.disk_tier import drop_cache
from benchmarks.host_tier import ask
from benchmarks.peers.engines import MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.peers.workloads import tokenize

from pagemill import LLM

PROMPTS = 4
"""The first warms up."""
WAYS = {"shared": {"kv_disk_shared": True}, "own": {}, "computed": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the file system to measure; default: the temporary folder")
    given = parser.parse_args()
    print(heading(describe_machine()), end="\n\n")
    text = tokenize(MODEL)
    prompts = [text[1000 + n * given.tokens :][: given.tokens] for n in range(PROMPTS)]
    times: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:

        def make(way: str) -> LLM:
            tier = WAYS[way]
            settings = {} if tier is None else {"kv_disk_memory": "8GiB", "kv_disk_path": f"{folder}/{way}", **tier}
            return LLM(
                MODEL, dtype=given.dtype, kv_memory="2GiB", max_model_len=given.tokens + 64,
                hf_overrides={"max_position_embeddings": given.tokens + 64}, **settings,
            )  # fmt: skip

        for way, tier in WAYS.items():
            if tier is not None:
                with make(way) as llm:
                    for prompt in prompts:
                        ask(llm, prompt)
        for _ in range(given.rounds):
            for way in WAYS:
                for path in Path(folder).rglob("*"):
                    if path.is_file():
                        drop_cache(path)
                with make(way) as llm:
                    ask(llm, prompts[0])
                    times[way] += [ask(llm, prompt) for prompt in prompts[1:]]
    print(f"| way | found of {given.tokens} | first token, s |\n| :--- | ---: | ---: |")
    for way, found in times.items():
        print(
            f"| {way} | {median(tokens for _, tokens in found):.0f} | {median(seconds for seconds, _ in found):.3f} |"
        )


if __name__ == "__main__":
    main()
