"""`pagemill bench`: a seeded workload of real text through the serving engine; throughput, latency and memory."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagemill.cli.options import ModelArgument, engine_options, run
from pagemill.errors import ConfigError
from pagemill.sampling.params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from pagemill.frontend.async_llm import AsyncLLM
    from pagemill.frontend.input_processor import Prompt
    from pagemill.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Workload:
    """Describes the requests: lengths in tokens, request_rate in requests per second (0 sends all at once)."""

    num_prompts: int
    input_len: int
    output_len: int
    prefix_len: int
    request_rate: float
    max_concurrency: int
    seed: int


@dataclass(frozen=True)
class Sample:
    """One request as its client saw it. Times in seconds; ttft: to the first token, tpot: per later one."""

    latency: float
    ttft: float
    tpot: float
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Report:
    """The measurements: times in seconds, each as mean, median and 99th percentile over the requests."""

    workload: Workload
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    latency_s: dict[str, float]
    cached_prompt_tokens: int
    preemptions: int
    kv_blocks: int
    engine_peak_memory_bytes: int | None
    engine: str


@engine_options
def bench(
    model: ModelArgument,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests in all.")] = 32,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Tokens of each prompt of its own.")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Tokens of each answer.")] = 64,
    prefix_len: Annotated[int, typer.Option("--prefix-len", min=0, help="Tokens that all prompts begin with.")] = 0,
    request_rate: Annotated[
        float, typer.Option("--request-rate", min=0, help="Requests per second, at random times; 0 sends all at once.")
    ] = 0.0,
    max_concurrency: Annotated[
        int, typer.Option("--max-concurrency", min=0, help="Requests under way at the same time; 0 is no limit.")
    ] = 0,
    text: Annotated[
        Path | None, typer.Option("--text", help="Where prompts come from. Default: Python's manual.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Measure throughput and latency on a workload. --seed also chooses the prompts; answers are greedy."""
    workload = Workload(
        num_prompts, input_len, output_len, prefix_len, request_rate, max_concurrency, settings.get("seed", 0)
    )
    report = run(_bench(model, workload, text, settings))
    if as_json:
        sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
    else:
        from rich.console import Console

        Console().print(_table(report))


async def _bench(model: str, workload: Workload, text: Path | None, settings: dict[str, Any]) -> Report:
    from pagemill.cli.loading import loaded_engine

    corpus = _corpus(text)
    async with loaded_engine(model, settings) as llm:
        prompts = make_prompts(corpus, await llm.tokenizer(), workload)
        # With a salt of its own, so that the warm-up leaves no prefix that the workload could find.
        warm_up: Prompt = {"prompt_token_ids": prompts[0], "cache_salt": "warm-up"}
        await _ask(llm, warm_up, SamplingParams(max_tokens=2, temperature=0.0), "warm-up")
        before = await llm.stats()
        started = time.perf_counter()
        samples = await _run(llm, prompts, workload)
        duration = time.perf_counter() - started
        after = await llm.stats()
        output_tokens = sum(sample.output_tokens for sample in samples)
        return Report(
            workload=workload,
            duration_s=duration,
            output_tokens_per_s=output_tokens / duration,
            total_tokens_per_s=(sum(map(len, prompts)) + output_tokens) / duration,
            requests_per_s=len(samples) / duration,
            ttft_s=_spread([sample.ttft for sample in samples]),
            tpot_s=_spread([sample.tpot for sample in samples]),
            latency_s=_spread([sample.latency for sample in samples]),
            cached_prompt_tokens=sum(sample.cached_tokens for sample in samples),
            preemptions=after.preemptions - before.preemptions,
            kv_blocks=after.frames,
            engine_peak_memory_bytes=_peak_memory(llm.engine_pid),
            engine=(await llm.ready()).description,
        )


def make_prompts(corpus: str, tokenizer: Tokenizer, workload: Workload) -> list[list[int]]:
    """Returns the token ids of equally long pieces of the text, the same ones for the same seed."""
    tokens = tokenizer.encode(corpus, add_special_tokens=False)
    longest = max(workload.prefix_len, workload.input_len)
    if len(tokens) < longest:
        raise ConfigError(
            f"the text has {len(tokens)} tokens; a prompt needs {longest}: give a longer --text", param="text"
        )
    choose = random.Random(workload.seed)

    def piece(length: int) -> list[int]:
        start = choose.randrange(len(tokens) - length + 1)
        return tokens[start : start + length]

    prefix = piece(workload.prefix_len)
    return [prefix + piece(workload.input_len) for _ in range(workload.num_prompts)]


async def _run(llm: AsyncLLM, prompts: list[list[int]], workload: Workload) -> list[Sample]:
    params = SamplingParams(max_tokens=workload.output_len, ignore_eos=True, temperature=0.0)
    places = asyncio.Semaphore(workload.max_concurrency or len(prompts))
    arrivals = random.Random(workload.seed)

    async def one(number: int, prompt: list[int]) -> Sample:
        async with places:
            return await _ask(llm, prompt, params, f"bench-{number}")

    tasks = []
    for number, prompt in enumerate(prompts):
        if number and workload.request_rate:
            await asyncio.sleep(arrivals.expovariate(workload.request_rate))
        tasks.append(asyncio.create_task(one(number, prompt)))
    return await asyncio.gather(*tasks)


async def _ask(llm: AsyncLLM, prompt: Prompt, params: SamplingParams, request_id: str) -> Sample:
    started = time.perf_counter()
    first = 0.0
    tokens = cached = 0
    async for output in llm.generate(prompt, params, request_id):
        first = first or time.perf_counter()
        tokens += sum(len(new.token_ids) for new in output.outputs)
        cached = output.num_cached_tokens
    ended = time.perf_counter()
    return Sample(ended - started, first - started, (ended - first) / max(tokens - 1, 1), tokens, cached)


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


def _peak_memory(pid: int) -> int | None:
    """Returns the most resident memory that a process has had, in bytes; None where /proc does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    peak = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if peak is None else int(peak.split()[1]) * 1024


def _corpus(path: Path | None) -> str:
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --text {path}: {error}", param="text") from error


def _table(report: Report) -> Table:
    from rich.table import Table

    workload = report.workload
    table = Table(title=f"{workload.num_prompts} prompts, {workload.prefix_len} + {workload.input_len} tokens in, "
                        f"{workload.output_len} out", caption=report.engine)  # fmt: skip
    table.add_column("")
    for name in report.ttft_s:
        table.add_column(name, justify="right")
    table.add_row("output tokens/s", f"{report.output_tokens_per_s:.1f}")
    table.add_row("total tokens/s", f"{report.total_tokens_per_s:.1f}")
    table.add_row("requests/s", f"{report.requests_per_s:.2f}")
    spreads = {
        "time to first token, ms": report.ttft_s,
        "time per output token, ms": report.tpot_s,
        "latency, ms": report.latency_s,
    }
    for label, spread in spreads.items():
        table.add_row(label, *(f"{1000 * value:.1f}" for value in spread.values()))
    table.add_row("prompt tokens from the prefix cache", str(report.cached_prompt_tokens))
    table.add_row("preemptions", str(report.preemptions))
    if report.engine_peak_memory_bytes is not None:
        table.add_row("engine's peak memory, MiB", f"{report.engine_peak_memory_bytes / 2**20:.0f}")
    return table
