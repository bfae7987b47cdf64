"""Measures what a precision costs in quality: perplexity of a fixed real text, and greedy agreement, beside the
`--base`'s.

    python -m benchmarks.quality [--settings bfloat16,gguf,int8] [--base float32]
        [--gates] [--within 1] [--windows 8] [--length 1024] [--prompts 8]

Settings are joined by "+": a dtype (float32, bfloat16), a quantization (gguf, int8), "kv=DTYPE" for the cache's.
Perplexity is of each window's tokens after the first, given those before, over windows spread evenly over the text;
its difference from the base's has the standard error of the mean of the tokens' own differences.
Agreement: the share of greedy tokens equal to the base's, each given the same tokens before it, the base's own.
Repeats: random tokens come twice; the share of the second ones that are the most likely. Only attention to the first
ones tells them: damaged keys bring it down at once.
With --gates, the command fails if a KV format misses its own bound (`kvcache/kv_quality.py`) beside a base that differs
in nothing else, unless the format is labelled as one that does. With --within, it fails if any setting's perplexity is
more than so many percent from the base's.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import get_args

from pagemill.arguments import arguments_of
from pagemill.config import EngineConfig
from pagemill.doctor import cpu_model
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest, SequenceOutput
from pagemill.hub import resolve_model
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.kv_quality import GATES, Gate
from pagemill.sampling.params import SamplingParams, TokenLogprobs
from pagemill.text.tokenizer import Tokenizer

TEXT = Path(__file__).parent / "peers/alice.txt"
ANSWER = 64
MOST_COMMON = 5000
"""Token ids below it are drawn for repeats."""

DTYPES = get_args(arguments_of(EngineConfig)["dtype"].kind)
QUANTIZATIONS = get_args(get_args(arguments_of(EngineConfig)["quantization"].kind)[0])  # or None


def settings_of(text: str) -> dict[str, str]:
    """Raises ValueError for a part that is no setting."""
    settings = {"dtype": "float32"}
    for part in text.split("+"):
        if part in DTYPES:
            settings["dtype"] = part
        elif part in QUANTIZATIONS:
            settings["quantization"] = part
        elif part.startswith("kv="):
            settings["kv_cache_dtype"] = part[3:]
        else:
            raise ValueError(f"{part!r} is neither of {', '.join((*DTYPES, *QUANTIZATIONS))} nor kv=DTYPE")
    return settings


def gate_of(settings: dict[str, str], base: dict[str, str]) -> Gate | None:
    """Returns the bound of a KV format, where the settings differ from the base's in nothing else; else None."""
    if settings | {"kv_cache_dtype": ""} != base | {"kv_cache_dtype": ""} or "kv_cache_dtype" in base:
        return None
    return GATES.get(kv_format(settings["kv_cache_dtype"]).name)


def verdict(gate: Gate, against: float) -> str:
    """Says how a share by which perplexity differs stands to a bound."""
    if abs(against) * 100 <= gate.within:
        return "within"
    return "missed" if gate.labelled is None else "missed: labelled, not a default"


def make_engine(model: str, settings: dict[str, str], longest: int) -> EngineCore:
    return EngineCore(
        EngineConfig(model=model, max_model_len=longest, max_num_seqs=8, enable_prefix_caching=False, **settings)
    )


def scored(core: EngineCore, prompts: list[list[int]]) -> list[list[TokenLogprobs]]:
    """Returns, for each prompt, its tokens' log probabilities from the second on, beside the most likely one's."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    return [output.prompt_logprobs[1:] for output in run(core, prompts, params)]


def answers(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    return [output.new_token_ids for output in run(core, prompts, params)]


def run(core: EngineCore, prompts: list[list[int]], params: SamplingParams) -> list[SequenceOutput]:
    """Returns one output per prompt, with all of its tokens and prompt log probabilities."""
    found: dict[str, SequenceOutput] = {}
    for index, prompt in enumerate(prompts):
        core.add_request(
            EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params, arrival_s=time.monotonic())
        )
    while core.has_work():
        for output in core.step():
            if output.error is not None:
                raise output.error.to_error()
            first = found.setdefault(output.request_id, output)
            if first is not output:
                first.new_token_ids += output.new_token_ids
                first.prompt_logprobs = [*(first.prompt_logprobs or []), *(output.prompt_logprobs or [])]
    return [found[str(index)] for index in range(len(prompts))]


def logprobs_of(core: EngineCore, windows: list[list[int]]) -> list[float]:
    return [logprobs.logprobs[0] for window in scored(core, windows) for logprobs in window]


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-fmean(logprobs))


def agreement(core: EngineCore, prompts: list[list[int]], expected: list[list[int]]) -> float:
    joined = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    last = [window[-ANSWER:] for window in scored(core, joined)]
    equal = [logprobs.token_ids[1] == logprobs.token_ids[0] for window in last for logprobs in window]
    return sum(equal) / len(equal)


def repeats(core: EngineCore, rows: list[list[int]]) -> float:
    last = [window[len(row) :] for row, window in zip(rows, scored(core, [row + row for row in rows]), strict=True)]
    equal = [logprobs.token_ids[1] == logprobs.token_ids[0] for window in last for logprobs in window]
    return sum(equal) / len(equal)


def random_rows(count: int, length: int) -> list[list[int]]:
    random = Random(0)
    return [[random.randrange(100, MOST_COMMON) for _ in range(length)] for _ in range(count)]


def windows_of(tokens: list[int], count: int, length: int) -> list[list[int]]:
    step = (len(tokens) - length) // max(1, count - 1)
    return [tokens[i * step : i * step + length] for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--settings", default="bfloat16,gguf,gguf+bfloat16,int8")
    parser.add_argument("--base", default="float32", help="settings that the others are compared with")
    parser.add_argument("--gates", action="store_true", help="hold each KV format to its own bound")
    parser.add_argument("--within", type=float, help="percent")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=8, help="of 128 tokens, for the greedy agreement")
    options = parser.parse_args()
    tokens = Tokenizer.from_path(resolve_model(options.model)).encode(TEXT.read_text())
    windows = windows_of(tokens, options.windows, options.length)
    prompts = windows_of(tokens, options.prompts, 128)
    core = make_engine(options.model, settings_of(options.base), options.length + 1)
    exact, expected = logprobs_of(core, windows), answers(core, prompts)
    agreed = options.prompts * ANSWER
    rows = random_rows(4, options.length // 2)
    print(
        f"{cpu_model()}, {options.model}; perplexity of {len(exact)} tokens, agreement on {agreed}, "
        f"repeats of {len(rows)} x {len(rows[0])}\n"
    )
    print(f"| settings | perplexity | against {options.base} | bound | greedy agreement | repeats |")
    print("| --- | ---: | ---: | --- | ---: | ---: |")
    print(f"| {options.base} | {perplexity(exact):.4f} | | | | {repeats(core, rows):.1%} |", flush=True)
    beyond = []
    for text in options.settings.split(","):
        core = make_engine(options.model, settings_of(text), options.length + 1)
        found, share = logprobs_of(core, windows), agreement(core, prompts, expected)
        differences = [a - b for a, b in zip(exact, found, strict=True)]
        against, error = math.expm1(fmean(differences)), stdev(differences) / math.sqrt(len(differences))
        gate = gate_of(settings_of(text), settings_of(options.base)) if options.gates else None
        bound = "" if gate is None else f"{gate.within:g} %, {verdict(gate, against)}"
        quality = f"{perplexity(found):.4f} | {against:+.2%} ± {error:.2%} | {bound} | {share:.1%}"
        print(f"| {text} | {quality} | {repeats(core, rows):.1%} |", flush=True)
        if gate is not None and verdict(gate, against) == "missed":
            beyond.append(f"{text} ({gate.within:g} %)")
        elif options.within is not None and abs(against) * 100 > options.within:
            beyond.append(f"{text} ({options.within:g} %)")
    if beyond:
        raise SystemExit(f"beyond the bound of {options.base}: {', '.join(beyond)}")


if __name__ == "__main__":
    main()
