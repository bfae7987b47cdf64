"""Times decode steps' attention on a GPU over rows that share a prefix, attended together and each by itself.

    python -m benchmarks.gpu_shared_prefixes [--heads 32] [--kv-heads 8] [--json FILE] [--expect TB_PER_S]

Rows have a prefix in the same frames, and tokens of their own behind it; heads are 128 wide, in bf16. Both ways run
over the same tables, in CUDA graphs, and must give equal bits. Times are medians over 200 ms by
`triton.testing.do_bench`.

--expect needs no GPU: it prints the bytes of keys and values that programs ask for in a layer, and how long these take
where so many terabytes per second are read. What the L2 cache brings of them is not known: the gain is what it would be
without one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from benchmarks.gpu_attention import BLOCK_SIZE, Shape, make_batch, make_cache
from benchmarks.on_gpu import DEVICE, capture, heading, keep, measure_ceilings, median_ms, need_gpu, parser_for

from pagemill.attention.interface import AttentionBatch
from pagemill.attention.triton_backend import TritonAttention, chunk_lengths, most_joined
from pagemill.kvcache.kv_format import kv_format

CASES = [(8, 8192, 256), (64, 1024, 256), (64, 8192, 256), (64, 32768, 256), (256, 8192, 256)]
"""Rows, tokens of the prefix, tokens of their own."""


@dataclass(frozen=True)
class Result:
    """Holds one case. same: the bits are equal."""

    rows: int
    prefix: int
    own: int
    alone_ms: float
    together_ms: float
    same: bool


def keys_in_common(rows: int, prefix: int, own: int, most: int) -> np.ndarray:
    """Returns `AttentionBatch.common` int32 [rows] of such rows."""
    chunk = int(chunk_lengths(np.array([prefix + own], np.int32), rows)[0])
    common = np.full(rows, prefix // chunk * chunk, np.int32)
    common[::most] = 0
    return common


def shared_batch(shape: Shape, rows: int, prefix: int, own: int, frames: int) -> AttentionBatch:
    """Makes rows whose first `prefix` tokens lie in the first row's frames."""
    batch = make_batch(shape, rows, 1, prefix + own, frames)
    tables = batch.groups[0].tables.clone()
    tables[:, : prefix // BLOCK_SIZE] = tables[:1, : prefix // BLOCK_SIZE]
    common = keys_in_common(rows, prefix, own, most_joined(shape.heads // shape.kv_heads))
    group = replace(batch.groups[0], tables=tables)
    return replace(batch, groups=(group,), common=torch.from_numpy(common).to(tables.device))


def run(shape: Shape) -> list[Result]:
    attention = TritonAttention(torch.cuda.get_device_capability())
    frames = max(rows * -(-(prefix + own) // BLOCK_SIZE) for rows, prefix, own in CASES)
    cache, results = make_cache(shape, frames), []
    for rows, prefix, own in CASES:
        batch = shared_batch(shape, rows, prefix, own, frames)
        query = torch.randn(rows, shape.heads, shape.head_dim, device=DEVICE, dtype=torch.bfloat16)

        def timed(batch: AttentionBatch, query: torch.Tensor = query) -> tuple[float, torch.Tensor]:
            replay, (output, _) = capture(lambda: attention.attend(query, cache, batch, 0, scale=shape.head_dim**-0.5))
            return median_ms(replay), output.clone()

        (alone_ms, alone), (together_ms, together) = timed(replace(batch, common=None)), timed(batch)
        results.append(Result(rows, prefix, own, alone_ms, together_ms, torch.equal(alone, together)))
    return results


def table(results: list[Result]) -> str:
    lines = ["| rows | prefix | own | each by itself, ms | together, ms | gain | equal bits |"]
    lines.append("| ---: " * 6 + "| --- |")
    lines += (
        f"| {at.rows} | {at.prefix} | {at.own} | {at.alone_ms:.3f} | {at.together_ms:.3f} "
        f"| {at.alone_ms / at.together_ms:.2f}x | {'yes' if at.same else 'no'} |"
        for at in results
    )
    return "\n".join(lines)


def expectation(shape: Shape, bytes_per_s: float) -> str:
    lines = ["| rows | prefix | own | each by itself, MB, ms | together, MB, ms | gain |", "| ---: " * 6 + "|"]
    for rows, prefix, own in CASES:
        common = keys_in_common(rows, prefix, own, most_joined(shape.heads // shape.kv_heads))
        alone = rows * shape.row_bytes(prefix + own)
        together = alone - int(common.sum()) * shape.token_bytes
        both = (f"{nbytes / 1e6:.0f}, {1e3 * nbytes / bytes_per_s:.3f}" for nbytes in (alone, together))
        lines.append(f"| {rows} | {prefix} | {own} | {' | '.join(both)} | {alone / together:.2f}x |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--expect", type=float, metavar="TB_PER_S", help="model the bytes, and run nothing")
    options = parser.parse_args()
    shape = Shape(options.heads, options.kv_heads, 128, kv_format("bfloat16"))
    if options.expect is not None:
        print(expectation(shape, options.expect * 1e12))
        return
    need_gpu(parser)
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    results = run(shape)
    print(f"{heading(ceilings.both)}\n\n{table(results)}")
    keep(options.json, ceilings, results)


if __name__ == "__main__":
    main()
