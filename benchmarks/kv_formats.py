"""Compares KV formats: tokens in a GiB, requests in equal memory, and the time of decoding over long contexts, beside
bf16's.

    python -m benchmarks.kv_formats [--formats bfloat16,fp8_e4m3,int8,int4_mixed,int4] [--context 32768] [--rows 1,4]
        [--memory 64GiB] [--rounds 7]

Requests of `--context` tokens are opened in a memory manager with as many frames as the memory has, until one has no
room; tokens in a GiB are theirs. Of int4_mixed, both count the blocks of remainders.

A step decodes one token of each of `--rows` sequences of `--context` tokens: all layers and the head, over a pool of
random keys and values that are scattered over frames. Formats take turns, round by round; times are medians.
"attention" is the time of that operator, "step" of all.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from statistics import median
from typing import NamedTuple

import torch
from benchmarks.peers.engines import MODEL

from pagemill import _kernels
from pagemill.attention.interface import AttentionBatch, GroupBatch, join_remainders
from pagemill.doctor import cpu_model
from pagemill.executor.backend import cpu_backend
from pagemill.hub import resolve_model
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layer_groups import add_remainders
from pagemill.kvcache.layout import FrameShape, layer_major
from pagemill.kvcache.sizing import parse_memory
from pagemill.memory.manager import MemoryManager
from pagemill.models.cpu_decoder import CpuDecoder
from pagemill.models.loading import LoadedModel, load_model

BLOCK_SIZE = 16
WORD = 0x3DCC << 16 | 0xBF40
"""The word of 4-bit numbers with a scale of 0.1 and a low of -0.75."""


CHUNK = 512
"""Tokens of a step while requests are opened."""


class Setup(NamedTuple):
    """A pool and a step over it; seconds of all steps' attention, and of all of them."""

    pool: DevicePool
    batch: AttentionBatch
    attention: list[float]
    step: list[float]


def shape_of(model: LoadedModel, name: str) -> FrameShape:
    spec, groups, format = model.spec, model.decoder.groups, kv_format(name)
    groups = add_remainders(groups, format.precise) if format.precise else groups
    return FrameShape(groups, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim, spec.head_dim, format)


def requests_in(num_frames: int, windows: list[int | None], context: int) -> int:
    """Returns how many requests of so many tokens are open when the next one has no room to grow."""
    manager = MemoryManager(num_frames, BLOCK_SIZE, windows, enable_prefix_caching=False)
    for count in itertools.count():
        table, _ = manager.open([], [], bytes(32), 0.0, 0)
        for end in [*range(CHUNK, context, CHUNK), context]:
            if manager.reserve(table, end) is not None:
                return count
            manager.commit(table, end, [], [])
    raise AssertionError


def make(model: LoadedModel, name: str, context: int, rows: int) -> Setup:
    shape, groups = shape_of(model, name), model.decoder.groups
    entries, sets = -(-context // BLOCK_SIZE), len(shape.groups.groups)
    pool = DevicePool(sets * rows * entries, shape)
    random = torch.Generator().manual_seed(0)
    storage = pool.frames.bytes.view(-1)
    if shape.format.key.scaled:
        for piece in storage.split(1 << 24):
            piece.random_(0, 256, generator=random)
        for layer in range(groups.num_layers):
            for scales in pool.layer(layer)[2:]:
                assert scales is not None
                scales.fill_(WORD if scales.dtype == torch.int32 else 1 / 64)
    else:
        for piece in pool.storage.split(1 << 22):
            piece.copy_(torch.randn(piece.shape, generator=random))
    frames = torch.randperm(sets * rows * entries, generator=random).int().view(sets, rows, entries)
    slots = frames[:, :, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    parts = [GroupBatch(*part) for part in zip(frames, slots, strict=True)]
    batch = AttentionBatch(
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        context_lens=torch.full((rows,), context, dtype=torch.int32),
        positions=torch.full((rows,), context - 1),
        groups=join_remainders(parts, shape.groups.remainders, shape.format.precise),
        max_query_len=1,
        max_context_len=context,
    )
    return Setup(pool, batch, [], [])


def measure(decoder: CpuDecoder, setup: Setup) -> None:
    tokens = torch.arange(1000, 1000 + len(setup.batch.positions))
    before = decoder.operator_seconds()["attention"]
    begin = time.perf_counter()
    decoder.logits(decoder.forward(tokens, setup.batch, setup.pool))
    setup.step.append(time.perf_counter() - begin)
    setup.attention.append(decoder.operator_seconds()["attention"] - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="bfloat16,fp8_e4m3,int8,int4_mixed,int4")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--memory", default="64GiB", help="in which requests are counted")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    backend = cpu_backend()
    torch.set_num_threads(_kernels.num_threads())
    model = load_model(
        resolve_model(MODEL), dtype="bfloat16", device=backend.device, ops=backend.ops, attention=backend.attention,
        decoder=backend.decoder, max_model_len=options.context,
        hf_overrides={"max_position_embeddings": options.context},
    )  # fmt: skip
    assert isinstance(model.decoder, CpuDecoder)
    names, memory = options.formats.split(","), parse_memory("--memory", options.memory, 0)
    shapes = {name: shape_of(model, name) for name in names}
    requests = {
        name: requests_in(
            memory // layer_major(shape, 1).frame_bytes,
            [group.window for group in shape.groups.groups],
            options.context,
        )
        for name, shape in shapes.items()
    }
    print(f"{cpu_model()}, {_kernels.num_threads()} threads, kernels {_kernels.isa()}, contexts of {options.context}\n")
    print(
        f"| format | rows | tokens in 1 GiB | requests in {options.memory} | against bf16 | attention | against bf16 "
        "| step | |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for rows in map(int, options.rows.split(",")):
        setups = {name: make(model, name, options.context, rows) for name in names}
        for _ in range(options.rounds + 1):
            for setup in setups.values():
                measure(model.decoder, setup)
        first: tuple[float, float, float] | None = None
        for name, setup in setups.items():
            attention, step = median(setup.attention[1:]), median(setup.step[1:])
            first = first or (requests[name], attention, step)
            tokens = requests[name] * options.context * 2**30 // memory
            capacity = f"{tokens:,} | {requests[name]} | {requests[name] / first[0]:.2f}x"
            times = f"{attention * 1e3:.1f} ms | {first[1] / attention:.2f}x | {step * 1e3:.1f} ms"
            print(f"| {name} | {rows} | {capacity} | {times} | {first[2] / step:.2f}x |", flush=True)
        del setups, setup
        gc.collect()


if __name__ == "__main__":
    main()
