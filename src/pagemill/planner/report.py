"""Tells a plan: a table for people, a dict for programs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from pagemill.planner.replica import Trial
from pagemill.planner.search import Option, Plan
from pagemill.simulate.roofline import Roofline

COLUMNS = ("size", "req/s", "up to", "TTFT", "p99", "TPOT", "p99", "pool", "rows", "$/h", "$/M out")
"""Replicas x devices of each; requests/s of one replica at its share, and up to which rate it holds; latencies in
milliseconds; the share of the pool that is held then, and the rows that run; what all replicas cost."""


def table(plan: Plan) -> list[Table | Text | str]:
    """Returns what is printed of a plan with options, one below the other."""
    refused = [f"tensor parallel {ranks}: {why}" for ranks, why in plan.refused.items()]
    return [_load(plan), _flags(plan), _options(plan), *_binding(plan), *refused]


def _load(plan: Plan) -> str:
    best = plan.options[0]
    output, everything = best.at_share.output_len, best.at_share.length
    return (
        f"{best.size.roofline.description}\n"
        f"{plan.load.rate:.3g} requests/s, {everything - output:.0f} tokens in and {output:.0f} out in the mean; "
        f"limits: {plan.limits}"
    )


def _flags(plan: Plan) -> Text:
    """Returns with what to serve the best option, in one line however narrow the terminal, so that it can be pasted."""
    best = plan.options[0]
    roofline, settings = best.size.roofline, best.size.settings
    cost = "" if best.cost_output is None else f", ${best.cost_output:.2f} per million output tokens"
    memory = roofline.kv_bytes * settings.ranks / 2**30
    host = ""
    if settings.kv_host_memory is not None:
        size = settings.kv_host_memory * settings.ranks / 2**30
        host = f" --kv-host-memory {size:g}GiB" if size else " --kv-host-memory 0"
    kv = "" if settings.kv_dtype == "auto" else f" --kv-cache-dtype {settings.kv_dtype}"
    parallel = f" --tensor-parallel-size {settings.ranks}" if settings.ranks > 1 else ""
    weights = {"int8": " --quantization int8", "float8": ""}.get(roofline.dtype, f" --dtype {roofline.dtype}")
    modelled = _modelled_only(roofline)
    return Text(
        f"Serve it with {best.replicas} x{parallel}{weights} --max-num-seqs {settings.max_num_seqs} "
        f"--max-num-batched-tokens {settings.max_num_batched_tokens} --kv-memory {memory:.1f}GiB"
        f"{kv}{host}{cost}{modelled}\n",
        no_wrap=True,
        overflow="ignore",
    )


def _modelled_only(roofline: Roofline) -> str:
    """Says what of a plan has never been served."""
    if roofline.ranks > 1 and roofline.device.link_bytes_per_s is not None:
        return "\nmodelled; no model has been served on several GPUs yet"
    return ""


def _options(plan: Plan) -> Table:
    title = "*modelled*, one replica at its share, medians and p99 in ms"
    rows = Table(*COLUMNS, title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in rows.columns:
        column.no_wrap, column.justify = True, "right"
    for option in plan.options:
        rows.add_row(*_cells(option))
    return rows


def _cells(option: Option) -> list[str]:
    trial, size = option.at_share, option.size
    return [
        f"{option.replicas} x {size.settings.ranks}",
        f"{trial.rate:.3g}",
        f"{size.capacity:.3g}{'+' if size.capacity == option.most_tried else ''}",
        f"{1e3 * trial.ttft_median_s:.0f}",
        f"{1e3 * trial.ttft_p99_s:.0f}",
        f"{1e3 * trial.tpot_median_s:.1f}",
        f"{1e3 * trial.tpot_p99_s:.1f}",
        f"{trial.pool:.0%}",
        f"{trial.running:.0f}",
        "" if option.price_per_hour is None else f"{option.price_per_hour:.2f}",
        "" if option.cost_output is None else f"{option.cost_output:.2f}",
    ]


def _binding(plan: Plan) -> list[str]:
    lines = ["What breaks first at a higher rate of one replica:"]
    lines += [f"  tensor parallel {option.size.settings.ranks}: {option.binds}" for option in plan.options]
    if plan.options[0].cost_output is None:
        lines.append("no price is known for this device; give one with --price")
    else:
        source = plan.options[0].size.roofline.device.sources.get(
            "price_per_hour", "of the device file, which names no source"
        )
        lines.append(f"price: {source}")
    return lines


def as_dict(plan: Plan) -> dict[str, Any]:
    """Returns all of a plan, the cheapest option first. None stands for latencies of requests that timed out."""
    output, everything = plan.load.tokens_per_request
    return {
        "modelled": True,
        "rate": plan.load.rate,
        "output_tokens_per_request": output,
        "prompt_tokens_per_request": everything - output,
        "slo_ttft_p99_s": plan.limits.ttft_p99_s,
        "slo_tpot_p99_s": plan.limits.tpot_p99_s,
        "options": [_option(option) for option in plan.options],
        "refused": {str(ranks): why for ranks, why in plan.refused.items()},
    }


def _option(option: Option) -> dict[str, Any]:
    size = option.size
    return {
        "replicas": option.replicas,
        "devices": option.devices,
        "settings": asdict(size.settings),
        "kv_memory": size.roofline.kv_bytes,
        "capacity": size.capacity,
        "binds": option.binds,
        "price_per_hour": option.price_per_hour,
        "cost_per_million_output_tokens": option.cost_output,
        "cost_per_million_tokens": option.cost_all,
        "at_share": _trial(option.at_share),
        "trials": [_trial(trial) for trial in size.own_trials],
        "about": size.roofline.about,
    }


def _trial(trial: Trial) -> dict[str, Any]:
    """Returns a trial's fields; None for what is infinite or unknown, which JSON has no number for."""
    fields = asdict(trial)
    return {name: None if isinstance(it, float) and not math.isfinite(it) else it for name, it in fields.items()}
