"""Draws capacity against the length of the context: K/V resident in 16, 8 and 4 bits, and streamed; modelled.

    python -m benchmarks.replay context [--device h100 --shape llama-3-8b] [--ranks 1] [--contexts 8,16,…,1024]
        [--host-gib 1024] [--output 256]

"resident": as many sequences of a context as the pool holds, at most `--max-num-seqs`, generate together: blocks are
counted by the memory's own rule. "streamed": one sequence, whose oldest blocks lie in host memory where the pool cannot
hold them; each step reads them over the link, after what is computed. The first token's seconds are those of the
prompt's chunks, one after the other, by itself. Step times are a roofline's: *modelled*. Accuracy is not: a model has
to be made for such contexts, and int4 costs quality (docs/performance.md).

Beside it, what others have published: KVQuant (Hooper et al., 2024, abstract) serves LLaMA-7B with a context of one
million tokens on one A100 of 80 GB, with K/V of about 2 bits; KIVI (Liu et al., 2024, abstract) reports up to 4 times
the batch and 2.35 to 3.47 times the throughput with 2 bits.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.replay.output import panels, write_table
from benchmarks.replay.setup import above_zero, add_device_arguments, add_output_argument

from pagemill.memory.block_table import Footprint
from pagemill.simulate.roofline import Roofline, read_device, read_shape
from pagemill.simulate.step_time import StepWork

FORMATS = {"bf16": "auto", "int8": "int8", "int4": "int4"}
STREAMED = "bf16, streamed"
BLOCK = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device_arguments(parser, device="h100", shape="llama-3-8b")
    parser.add_argument("--ranks", type=int, default=1, help="devices that work as one")
    parser.add_argument("--contexts", default="8,16,32,64,128,256,512,1024", help="thousands (1,024) of tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer, for which room is kept")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--host-gib", type=above_zero, default=1024.0, help="host memory of one device for K/V")
    add_output_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    device, shape = read_device(arguments.device), read_shape(arguments.shape)
    rows: list[dict[str, Any]] = []
    rooflines = {name: Roofline(device, shape, arguments.dtype, kv, arguments.ranks) for name, kv in FORMATS.items()}
    print(f"{rooflines['bf16'].description}\n")
    print("| context | K/V | sequences at once | tokens/s of all | ms per token | first token alone | streamed |")
    print("| ---: | --- |" + " ---: |" * 5)
    for context in (1024 * int(each) for each in arguments.contexts.split(",")):
        for name, roofline in rooflines.items():
            rows.append(resident(name, roofline, context, arguments))
        rows.append(streamed(rooflines["bf16"], context, arguments))
        for row in rows[-len(FORMATS) - 1 :]:
            if not row["sequences"]:
                print(f"| {context // 1024}k | {row['kv']} | 0 | | | | |")
                continue
            print(
                f"| {context // 1024}k | {row['kv']} | {row['sequences']} | {row['tokens_per_s']:.0f} | "
                f"{1e3 * row['step_s']:.1f} | {row['first_token_s']:.1f} s | {row['streamed_share']:.0%} |"
            )
    write_table(arguments, "context", rooflines["bf16"].about, rows)
    names = [*FORMATS, STREAMED]
    lines = {
        label: {
            name: [(row["context"] / 1024, row[key]) for row in rows if row["kv"] == name and row[key]]
            for name in names
        }
        for label, key in (("sequences at once", "sequences"), ("tokens/s of all", "tokens_per_s"))
    }
    panels(arguments, "context", "context, thousands of tokens", lines, {}, logarithmic=True)


def resident(name: str, roofline: Roofline, context: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what as many sequences do as the pool holds."""
    groups = roofline.shape.groups
    frames = roofline.kv_bytes // roofline.shape.frame_bytes(BLOCK)
    footprint = Footprint(BLOCK, tuple(group.window for group in groups.groups))
    needed = footprint.frames(context + arguments.output, arguments.max_num_batched_tokens)
    count = min(arguments.max_num_seqs, frames // needed)
    return row_of(name, roofline, context, count, 0, arguments)


def streamed(roofline: Roofline, context: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what one sequence does whose K/V lie in the pool as far as that reaches, and in host memory."""
    shape, layers = roofline.shape, len(roofline.shape.windows)
    held = int(roofline.kv_bytes / (shape.key_bytes * layers))
    away = max(0, context + arguments.output - held)
    fits = away * shape.key_bytes * layers <= arguments.host_gib * 2**30
    return row_of(STREAMED, roofline, context, int(fits), away, arguments)


def row_of(
    name: str, roofline: Roofline, context: int, count: int, away: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Returns a row of the table; away: tokens of the sequence whose K/V are not in the pool."""
    layers, device, chunk = roofline.model.layers, roofline.device, arguments.max_num_batched_tokens
    row = {"context": context, "kv": name, "sequences": count, "tokens_per_s": 0.0, "streamed_share": 0.0}
    if not count:
        return row
    keys = count * layers * context
    link = 0.0 if device.link_bytes_per_s is None else device.efficiency["link"] * device.link_bytes_per_s
    away_s = away * layers * roofline.shape.key_bytes / link if away else 0.0
    step_s = roofline.seconds(StepWork(count, count, count, keys, keys - away * layers)) + away_s
    held = context - away
    first_s = 0.0
    for start in range(0, context, chunk):
        end = min(start + chunk, context)
        tokens = end - start
        pairs = layers * (tokens * (start + end + 1) // 2)
        beyond_s = max(0, end - held) * layers * roofline.shape.key_bytes / link if away else 0.0
        first_s += roofline.seconds(StepWork(1, tokens, int(end == context), pairs, layers * min(end, held))) + beyond_s
    return {
        **row,
        "tokens_per_s": count / step_s,
        "step_s": step_s,
        "first_token_s": first_s,
        "streamed_share": away / (context + arguments.output),
    }
