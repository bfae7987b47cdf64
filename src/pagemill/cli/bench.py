"""`pagemill bench`: a seeded workload of real text through an engine of its own, or any OpenAI server."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from pagemill.cli.bench_report import EngineFigures, Report, Sample
from pagemill.cli.bench_workload import BenchWorkload, make_prompts, read_text
from pagemill.cli.options import ModelArgument, engine_options, refuse_settings, run
from pagemill.cli.remote import ApiKey
from pagemill.sampling.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from pagemill.frontend.async_llm import AsyncLLM
    from pagemill.frontend.input_processor import Prompt

P = TypeVar("P")


@engine_options
def bench(
    model: ModelArgument,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help="Measure the server at this URL, which serves a model under the name MODEL, not an engine of its own.",
        ),
    ] = None,
    api_key: ApiKey = None,
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
    if url is not None:
        refuse_settings({name: value for name, value in settings.items() if name != "seed"}, url)
    workload = BenchWorkload(
        num_prompts, input_len, output_len, prefix_len, request_rate, max_concurrency, settings.get("seed", 0)
    )
    corpus = read_text(text)
    if url is None:
        report = run(_bench(model, workload, corpus, settings))
    else:
        report = run(_bench_url(url, model, api_key, workload, corpus))
    if as_json:
        sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
    else:
        from rich.console import Console

        Console(markup=False, emoji=False).print(report.table())
    if report.failed_requests:
        raise typer.Exit(1)


async def _bench(model: str, workload: BenchWorkload, corpus: str, settings: dict[str, Any]) -> Report:
    from pagemill.cli.loading import loaded_engine

    async with loaded_engine(model, settings) as llm:
        tokenizer = await llm.tokenizer()
        prompts = make_prompts(tokenizer.encode(corpus, add_special_tokens=False), workload)
        # With a salt of its own, so that the warm-up leaves no prefix that the workload could find.
        warm_up: Prompt = {"prompt_token_ids": prompts[0], "cache_salt": "warm-up"}
        await _ask(llm, warm_up, SamplingParams(max_tokens=2, temperature=0.0), "warm-up")
        before = await llm.stats()
        params = SamplingParams(
            max_tokens=workload.output_len, ignore_eos=True, temperature=0.0, output_kind=RequestOutputKind.DELTA
        )
        started = time.perf_counter()
        samples = await send(prompts, workload, lambda number, prompt: _ask(llm, prompt, params, f"bench-{number}"))
        duration = time.perf_counter() - started
        after = await llm.stats()
        figures = EngineFigures(after.preemptions - before.preemptions, after.frames, _peak_memory(llm.engine_pid))
        return Report.of(workload, samples, duration, (await llm.ready()).description, engine=figures)


async def _bench_url(url: str, model: str, api_key: str | None, workload: BenchWorkload, corpus: str) -> Report:
    from pagemill.cli.bench_server import Server

    async with Server(url, model, api_key) as server:
        prompts = await server.prompts(corpus, workload)
        await server.warm_up(prompts[0])
        started = time.perf_counter()
        samples = await send(prompts, workload, lambda _, prompt: server.ask(prompt, workload.output_len))
        duration = time.perf_counter() - started
        return Report.of(workload, server.those_answered(samples), duration, f"{model} at {url}", server.notes)


async def send(
    prompts: Sequence[P], workload: BenchWorkload, ask: Callable[[int, P], Awaitable[Sample | None]]
) -> list[Sample]:
    """Returns the samples of all requests that were answered, and shows how far it is on stderr."""
    from pagemill.cli.loading import RequestsBar

    places = asyncio.Semaphore(workload.max_concurrency or len(prompts))
    with RequestsBar(len(prompts)) as bar:

        async def one(number: int, prompt: P) -> Sample | None:
            async with places:
                sample = await ask(number, prompt)
            bar.ended(0 if sample is None else sample.output_tokens)
            return sample

        tasks = []
        for number, (prompt, pause) in enumerate(zip(prompts, workload.pauses(), strict=True)):
            if pause:
                await asyncio.sleep(pause)
            tasks.append(asyncio.create_task(one(number, prompt)))
        return [sample for sample in await asyncio.gather(*tasks) if sample is not None]


async def _ask(llm: AsyncLLM, prompt: Prompt, params: SamplingParams, request_id: str) -> Sample:
    started = time.perf_counter()
    first = 0.0
    tokens = cached = length = 0
    async for output in llm.generate(prompt, params, request_id):
        first = first or time.perf_counter()
        tokens += sum(len(new.token_ids) for new in output.outputs)
        cached, length = output.num_cached_tokens, len(output.prompt_token_ids)
    ended = time.perf_counter()
    return Sample(ended - started, first - started, (ended - first) / max(tokens - 1, 1), length, tokens, cached)


def _peak_memory(pid: int) -> int | None:
    """Returns the most resident memory that a process has had, in bytes; None where /proc does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    peak = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if peak is None else int(peak.split()[1]) * 1024
