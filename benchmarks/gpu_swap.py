"""Measures how blocks move between a GPU's pool and host memory, and decode steps beside that.

    python -m benchmarks.gpu_swap [--quick] [--json FILE]

The ceiling is one large copy between the GPU's memory and pinned host memory, in each direction. Held against it are
the frames alone (`GpuFrames`: out of frames into pinned memory, and from there into frames, in the engine's portions),
and the engine's whole way to a host tier that is full, and back. Blocks lie scattered; few of them make 16 MiB, many
240 MiB. Speeds are medians of runs behind a first one, which takes its pinned memory from the system. Once more, the
pool is as an engine's: it has addresses for the whole GPU, where torch counts elements in 64 bits.

Then decode steps of Llama 3 8B's shape, each one CUDA graph, run alone, and while blocks are asked to move in both
directions before each step: an eighth, a half, and all of what the bus could move meanwhile. The host asks for a step
while the one before it runs. Last, how long host memory takes to be pinned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch
from benchmarks.gpu_decode import BLOCK_SIZE, Sizes, Step, captured, decode_batch, decode_step, random_weights
from benchmarks.moving_blocks import FramesAlone, ThroughHostTier, Way, wait_for
from benchmarks.on_gpu import heading, keep, need_gpu, parser_for

from pagemill.executor.backend import Backend, select_backend
from pagemill.executor.device import CudaDevice, Device
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.frame_access import FrameAccess
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.layout import FrameShape, block_major
from pagemill.kvcache.pages_ahead import PagesAhead, PooledFrames

SHAPES = {"Llama 3 8B": (32, 8, 128), "SmolLM2 135M": (30, 3, 64)}
"""Layers, KV heads and their dimensions."""
ENGINES = "Llama 3 8B"
"""The shape whose blocks move once more in a pool with addresses for the whole GPU."""
FEW_BYTES, MANY_BYTES = 16 << 20, 240 << 20
BUS_BYTES = 1 << 30
TIER_BYTES = 2 << 30
PARTS = (0.125, 0.5, 1.0)
"""Shares of what the bus moves during a step; each is asked for beside the step."""
ROWS, CONTEXT = 32, 4096


@dataclass(frozen=True)
class Bus:
    """Holds bytes per second of one large copy: out of the GPU, and back."""

    out: float
    back: float


@dataclass(frozen=True)
class Move:
    """Holds the speed of a way in one direction, as bytes per second, the first run's, and the share of the bus."""

    shape: str
    way: str
    direction: str
    blocks: int
    block_bytes: int
    bytes_per_s: float
    first_bytes_per_s: float
    share: float


@dataclass(frozen=True)
class Beside:
    """Holds what a step takes beside moving blocks. part: of the bus that was asked for; slower: than alone, by so much
    of its time; out_share, back_share: of the bus that were moved."""

    way: str
    part: float
    blocks: int
    ms: float
    slower: float
    out_share: float
    back_share: float


@dataclass(frozen=True)
class Pinning:
    """Holds how long host memory takes to be pinned: as torch does it, and whole, on huge pages."""

    nbytes: int
    pinned_s: float
    whole_s: float


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure_bus(device: Device, nbytes: int, times: int = 5) -> Bus:
    host, there = device.pinned(nbytes), torch.empty(nbytes, dtype=torch.uint8, device=device.where)

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        device.copy(source, target)
        device.synchronize()

    copy(host, there)
    back = min(seconds(lambda: copy(host, there)) for _ in range(times))
    out = min(seconds(lambda: copy(there, host)) for _ in range(times))
    return Bus(nbytes / out, nbytes / back)


def measure_pinning(device: Device, nbytes: int) -> Pinning:
    kept: list[torch.Tensor] = []
    pinned_s = seconds(lambda: kept.append(device.pinned(nbytes)))
    whole_s = seconds(lambda: kept.append(device.pinned_whole(nbytes)))
    return Pinning(nbytes, pinned_s, whole_s)


def frame_shape(layers: int, kv_heads: int, head_dim: int, format: str) -> FrameShape:
    groups = group_layers([None] * layers)
    return FrameShape(groups, kv_heads, BLOCK_SIZE, head_dim, head_dim, kv_format(format))


def access(pool: DevicePool) -> FrameAccess:
    """Returns how the executor's transfers reach a pool's frames."""
    return PooledFrames(pool, PagesAhead(pool))


def ways_of(frames: FrameAccess, block_bytes: int, capacity: int) -> list[Way]:
    return [FramesAlone(frames, block_bytes), ThroughHostTier(frames, block_bytes, capacity)]


def move_blocks(
    shape: str, frames: FrameAccess, order: Sequence[int], block_bytes: int, bus: Bus, counts: Sequence[int], times: int
) -> list[Move]:
    """Moves blocks in both directions by every way. order: frames, which blocks are taken from and put into in turn."""
    moves = []
    for way in ways_of(frames, block_bytes, max(1, max(counts))):
        way.save(order[: max(counts)])  # the host tier is full from now on
        for blocks in counts:
            for direction, move, ceiling in (("out", way.save, bus.out), ("back", way.load, bus.back)):
                taken = [seconds(partial(move, order[:blocks])) for _ in range(1 + times)]
                first, usual = (blocks * block_bytes / took for took in (taken[0], median(taken[1:])))
                moves.append(Move(shape, way.name, direction, blocks, block_bytes, usual, first, usual / ceiling))
        way.close()
    return moves


def moves_of(
    name: str, shape: FrameShape, device: torch.device, room: int, sizes: Sequence[int], bus: Bus, times: int
) -> list[Move]:
    """Makes a pool, and moves blocks of so many bytes. room: bytes that it has addresses for."""
    block_bytes = block_major(shape, 1).frame_bytes
    counts = [nbytes // block_bytes for nbytes in sizes]
    frames = 2 * max(counts)
    pool = DevicePool(frames, shape, device, block_major, room)
    pool.storage[: frames * block_bytes // pool.dtype.itemsize].normal_()
    if pool.capacity > frames:
        name += f" of {pool.capacity * block_bytes / 1e9:.0f} GB"
    return move_blocks(name, access(pool), torch.randperm(frames).tolist(), block_bytes, bus, counts, times)


def step_s(step: Step, frames: FrameAccess, times: int, before: Callable[[], None]) -> float:
    """Returns the mean seconds of steps, the host asking for one while the one before it runs."""
    wait_for(frames)
    begin, last = time.perf_counter(), None
    for _ in range(times):
        before()
        step()
        mark: Any = frames.mark()
        if last is not None:
            last.synchronize()
        last = mark
    wait_for(frames)
    return (time.perf_counter() - begin) / times


def run_beside(
    step: Step,
    frames: FrameAccess,
    spare: Sequence[int],
    block_bytes: int,
    bus: Bus,
    capacity: int,
    times: int,
    parts: Sequence[float] = PARTS,
) -> list[Beside]:
    """Times steps beside every way and part. spare: frames that no step reads."""
    step_s(step, frames, 3, lambda: None)
    alone = step_s(step, frames, times, lambda: None)
    found = [Beside("none", 0.0, 0, 1e3 * alone, 0.0, 0.0, 0.0)]
    half = len(spare) // 2
    for way in ways_of(frames, block_bytes, capacity):
        way.save([*islice(cycle(spare), capacity)])
        for part in parts:
            blocks = max(1, int(part * alone * min(bus.out, bus.back) / block_bytes))
            out, back = ([*islice(cycle(some), blocks)] for some in (spare[:half], spare[half:]))
            before = way.out, way.back
            took = step_s(step, frames, times, partial(way.begin, out, back))
            out_share = (way.out - before[0]) * block_bytes / (times * took * bus.out)
            back_share = (way.back - before[1]) * block_bytes / (times * took * bus.back)
            found.append(Beside(way.name, part, blocks, 1e3 * took, took / alone - 1, out_share, back_share))
            way.settle()
        way.close()
    return found


def beside_steps(
    sizes: Sizes,
    rows: int,
    context: int,
    bus: Bus,
    times: int,
    *,
    dtype: torch.dtype,
    backend: Backend,
    spare: int,
    capacity: int,
) -> list[Beside]:
    """Makes a model of random weights and a pool, and runs its steps. spare: frames beside those that steps read;
    capacity: of the host tier, in blocks."""
    spec = sizes.spec()
    weights = random_weights(spec, backend.ops, dtype, backend.device)
    decoder = backend.decoder(spec, weights, backend.ops, backend.attention, dtype)
    decoder.reach(context)
    used = rows * -(-context // BLOCK_SIZE)
    format = str(dtype).removeprefix("torch.")
    pool = DevicePool(
        used + spare, frame_shape(sizes.layers, sizes.kv_heads, sizes.head_dim, format), backend.device, block_major
    )
    pool.storage.normal_()
    step = captured(decode_step(decoder, decode_batch(rows, context, used, backend.device), pool))
    scattered = (used + torch.randperm(spare)).tolist()
    return run_beside(step, access(pool), scattered, pool.layout.frame_bytes, bus, capacity, times)


def moves_table(moves: Sequence[Move]) -> str:
    lines = [
        "| shape | way | direction | blocks | MiB | GB/s | share of the bus | first time, GB/s |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for at in moves:
        size = f"{at.blocks} | {at.blocks * at.block_bytes / (1 << 20):.0f}"
        speed = f"{at.bytes_per_s / 1e9:.1f} | {at.share:.0%} | {at.first_bytes_per_s / 1e9:.1f}"
        lines.append(f"| {at.shape} | {at.way} | {at.direction} | {size} | {speed} |")
    return "\n".join(lines)


def beside_table(found: Sequence[Beside]) -> str:
    lines = [
        "| moved beside | asked for | blocks each way | step, ms | slower | share of the bus, out | back |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for at in found:
        shares = f"{at.slower:+.1%} | {at.out_share:.0%} | {at.back_share:.0%}"
        lines.append(f"| {at.way} | {at.part:.0%} | {at.blocks} | {at.ms:.2f} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_for(__doc__, "fewer runs of each, and 1 GiB pinned instead of 8")
    options = parser.parse_args()
    need_gpu(parser)
    times, backend = 5 if options.quick else 15, select_backend("cuda")
    device = CudaDevice(backend.device)
    dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    bus = measure_bus(device, BUS_BYTES)
    print(f"{heading(f'bus {bus.out / 1e9:.1f} GB/s out, {bus.back / 1e9:.1f} GB/s back')}\n", flush=True)
    moves, whole = [], torch.cuda.get_device_properties(backend.device).total_memory
    for name, room in [*((name, 0) for name in SHAPES), (ENGINES, whole)]:
        shape = frame_shape(*SHAPES[name], str(dtype).removeprefix("torch."))
        moves += moves_of(name, shape, backend.device, room, (FEW_BYTES, MANY_BYTES), bus, times)
    print(f"{moves_table(moves)}\n", flush=True)
    sizes = Sizes()
    block_bytes = BLOCK_SIZE * sizes.token_bytes
    spare, capacity = 2 * MANY_BYTES // block_bytes, TIER_BYTES // block_bytes
    beside = beside_steps(
        sizes, ROWS, CONTEXT, bus, 6 * times, dtype=dtype, backend=backend, spare=spare, capacity=capacity
    )
    print(f"{ROWS} rows of {CONTEXT}:\n\n{beside_table(beside)}\n", flush=True)
    pinning = measure_pinning(device, (1 if options.quick else 8) << 30)
    print(
        f"{pinning.nbytes >> 30} GiB are pinned in {pinning.pinned_s:.2f} s by torch, in {pinning.whole_s:.2f} s whole"
    )
    keep(options.json, bus, moves, beside=beside, pinning=pinning)


if __name__ == "__main__":
    main()
