"""Measures what compression is worth in host memory: how many blocks it holds, and how fast they come back.

    python -m benchmarks.host_tier [--dtype float32,bfloat16] [--host-memory 384MiB] [--tokens 2048]

Prompts of real text, more than there is room for, go through a pool with room for one of them, so each goes down
to host memory when the next one comes. Then three that are there are asked for again, with another last token: their
first token needs their blocks back. Beside it, what computing prompts took. Medians.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from benchmarks.peers.engines import MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.peers.workloads import tokenize

from pagemill import LLM, SamplingParams
from pagemill.arguments import arguments_of
from pagemill.config import EngineConfig
from pagemill.kvcache.sizing import parse_memory

FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def ask(llm: LLM, token_ids: list[int]) -> tuple[float, int]:
    """Returns the seconds to a prompt's first token, and how many of its tokens were found."""
    begin = time.perf_counter()
    (output,) = llm.generate({"prompt_token_ids": token_ids}, FIRST_TOKEN, use_tqdm=False)
    return time.perf_counter() - begin, output.num_cached_tokens or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--host-memory", default="384MiB")
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    print(heading(describe_machine()), end="\n\n")
    text, tokens = tokenize(MODEL), arguments.tokens
    room = parse_memory("kv_host_memory", arguments.host_memory, 0)
    print("| dtype | kv_host_compression | blocks held | KiB each | against off | computed, s | from host memory, s |")
    print("| :--- | :--- | ---: | ---: | ---: | ---: | ---: |")
    for dtype in arguments.dtype.split(","):
        plain = 0
        for compression in arguments_of(EngineConfig)["kv_host_compression"].choices:
            with LLM(
                MODEL, dtype=dtype, max_model_len=tokens + 64, kv_memory="128MiB", kv_host_memory=arguments.host_memory,
                kv_host_compression=compression,
            ) as llm:  # fmt: skip
                block_bytes = llm.stats().block_bytes
                llm.resize_kv_memory((tokens // 16 + 8) * block_bytes)
                prompts = [text[at : at + tokens] for at in range(0, 8 * room // (5 * block_bytes) * 16, tokens)]
                computed = [ask(llm, prompt)[0] for prompt in prompts]
                llm.client.core.tiers.transfers.flush()
                held = llm.stats().tier_blocks["host"]
                plain = plain or held
                back = [ask(llm, [*prompt[:-1], 0]) for prompt in prompts[-4:-1]]
                assert all(found >= tokens - 16 for _, found in back), "the host tier has no room for three prompts"
            print(
                f"| {dtype} | {compression} | {held} | {room / held / 1024:.0f} | {held / plain:.2f} | "
                f"{median(computed):.2f} | {median(seconds for seconds, _ in back):.3f} |"
            )


if __name__ == "__main__":
    main()
