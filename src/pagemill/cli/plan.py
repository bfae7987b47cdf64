"""`pagemill plan`: how many replicas of which size serve a load, with which settings, and what that costs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pagemill.cli.out_file import check_out_file


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A known shape (llama-3-8b, llama-3-70b, opt-13b, llama-7b, llama-13b, smollm2-135m), a .json file of "
            "one, or a model as `pagemill serve` takes it, of which only the configuration is read.",
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            "--device", help="a100-40, a100-80, h100, h200, l4, server-64, or a .json file of `pagemill calibrate`."
        ),
    ],
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the weights: bfloat16, float16, float32, int8 or float8.")
    ] = "bfloat16",
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            help="Requests: sharegpt (default), alpaca, chat, agents, documents, bursty, or a .json file of one.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="A trace instead of a workload: Azure's .csv, Mooncake's .jsonl."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests per second in all. Default: 10, or those of the trace."),
    ] = None,
    slo_ttft_p99: Annotated[
        float, typer.Option("--slo-ttft-p99", help="The limit on p99 of the time to first token, milliseconds.")
    ] = 2000,
    slo_tpot_p99: Annotated[
        float, typer.Option("--slo-tpot-p99", help="The limit on p99 of the time per output token, milliseconds.")
    ] = 100,
    tensor_parallel_size: Annotated[
        str | None, typer.Option("--tensor-parallel-size", help="Sizes to try, as 1,2. Default: all that are possible.")
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", help="Formats of K/V to try, as auto,int8: the first one is preferred.")
    ] = "auto",
    max_num_seqs: Annotated[str, typer.Option("--max-num-seqs", help="Numbers of sequences to try.")] = "256,1024",
    max_num_batched_tokens: Annotated[
        str, typer.Option("--max-num-batched-tokens", help="Tokens of a step to try.")
    ] = "2048,512,8192",
    kv_host_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-host-memory",
            help="Host memory of a device for evicted K/V, to be tried beside an engine's default there, as much as "
            "the pool. Default: 64GiB where prompts begin alike and the device has a link; 0: none, without a trial.",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            help="Seconds from a request's arrival after which it fails, as its field `timeout`: no more than one in a "
            "hundred may. Default: none, or as the workload or trace says.",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price", help="US dollars per device and hour. Default: the device's own.")
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", help="Requests of one simulation, at least: more is slower and steadier.")
    ] = 300,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the workload. Default: 0.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw the trade-off here, .svg, .png or .pdf; needs pagemill[plot]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say how many replicas serve a load within limits.

    Prints how many of which size, with which settings, and what that costs.

    Each rate is simulated: the scheduler and the memory that serve run over the device's modelled step times. No model
    is loaded, and no weights are downloaded.
    """
    import gc

    from rich.console import Console, Group

    from pagemill.errors import ConfigError
    from pagemill.planner.plot import check_plot, draw
    from pagemill.planner.report import as_dict, table
    from pagemill.planner.request import Asked, read_counts, read_names
    from pagemill.planner.search import make_plan

    if plot is not None:
        check_plot(plot)
        check_out_file("--plot", plot)
    asked = Asked(
        model, device, dtype, workload, trace, rate, slo_ttft_p99, slo_tpot_p99,
        ranks=None if tensor_parallel_size is None else read_counts("tensor_parallel_size", tensor_parallel_size),
        kv_dtype=read_names(kv_cache_dtype),
        max_num_seqs=read_counts("max_num_seqs", max_num_seqs),
        max_num_batched_tokens=read_counts("max_num_batched_tokens", max_num_batched_tokens),
        kv_host_memory=kv_host_memory,
        timeout=timeout,
        price=price,
        requests=requests,
        seed=seed,
    )  # fmt: skip
    gc.freeze()  # what is imported stays: no collection beside the simulations need visit it
    messages = Console(stderr=True, highlight=False)
    with messages.status("") as status:
        found = make_plan(**asked.arguments(), report=lambda line: status.update(f"simulating {line}"))
    if not found.options:
        raise ConfigError("; ".join(f"tensor parallel {ranks}: {why}" for ranks, why in found.refused.items()))
    if plot is not None:
        draw(found, plot)
    if as_json:
        sys.stdout.write(json.dumps(as_dict(found), indent=2, allow_nan=False) + "\n")
        return
    Console(highlight=False, markup=False, emoji=False).print(Group(*table(found)), crop=False)
    if plot is not None:
        sys.stdout.write(f"wrote {plot}\n")
