"""Writes a long context of seeded keys and values into an engine's blocks, and attends it in fp64 without the engine.

What a piece of a layer holds follows from the layer's and the piece's number, so the reference makes it again, piece by
piece, and shares nothing with what it checks: not the blocks, not their places, not the disk they came from.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagemill.attention.interface import AttentionBackend, AttentionBatch, LayerCache
from pagemill.attention.torch_backend import TorchAttention
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.kvcache.pages import advise
from pagemill.memory.digest import extend_chain
from pagemill.models.decoder import Decoder
from pagemill.scheduling.step_plan import StepResult

PIECE = 1024
"""Tokens that are made at a time."""
PIECES_MAPPED = 16
"""Written before their pages are let go of."""
PIECES_AT_ONCE = 8
"""In a product of the reference."""
SAMPLED = 16
"""Tokens of a step of many that the reference attends, the first and the last among them."""
_BITS = {
    torch.bfloat16: (torch.int16, 0x80FF - (1 << 16), 0x3F00),
    torch.float16: (torch.int16, 0x87FF - (1 << 16), 0x3800),
    torch.float32: (torch.int32, 0x80FFFFFF - (1 << 32), 0x3F000000),
}
"""Random bits become ±[0.5, 2): which of them are kept, and which are set."""


class Shape(NamedTuple):
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


def make_piece(layer: int, piece: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Returns keys and values [PIECE, kv_heads, head_dim] of a layer's tokens PIECE * piece .. ."""
    integers, kept, set_ = _BITS[shape.dtype]
    elements = 2 * PIECE * shape.kv_heads * shape.head_dim
    drawn = np.random.Generator(np.random.SFC64([layer, piece])).bytes(elements * shape.dtype.itemsize)
    bits = torch.frombuffer(bytearray(drawn), dtype=integers)
    both = (bits & kept | set_).view(shape.dtype).view(2, PIECE, shape.kv_heads, shape.head_dim)
    return both[0], both[1]


def seed(core: EngineCore, request: EngineRequest, tokens: int) -> None:
    """Caches the request's first `tokens` tokens, whole pieces, as if they had been computed."""
    memory, pool, scheduler = core.memory, core.executor.pool, core.scheduler
    caches = [pool.layer(layer) for layer in range(len(core.executor.decoder.spec.layers))]
    attention = TorchAttention()
    root, digests = core.root(request), list[bytes]()
    extend_chain(digests, root, request.prompt_token_ids[:tokens], memory.block_size)
    table, _ = memory.open([], [], root, 0.0, 0)
    for piece in range(tokens // PIECE):
        end = (piece + 1) * PIECE
        while (shortage := memory.reserve(table, end)) is not None:
            assert memory.stream(table, shortage.missing)
        core.executor.apply(scheduler.state.batch.plan({}))
        scheduler.commit(StepResult(), 0.0)
        frames = torch.tensor(memory.frames(table, piece * PIECE // memory.block_size))
        slots = (frames.unsqueeze(1) * memory.block_size + torch.arange(memory.block_size)).flatten()
        for layer, cache in enumerate(caches):
            attention.write(*make_piece(layer, piece, shape_of(cache)), cache, slots)
        memory.commit(table, end, request.prompt_token_ids, digests)
        if piece % PIECES_MAPPED == 0 and pool.streamed_file is not None:
            for region in pool.streamed_file.regions:
                advise(*region, mmap.MADV_DONTNEED)
    memory.close(table, 0.0)


def shape_of(cache: LayerCache) -> Shape:
    """Returns the shape of the keys and values that are made; for a cache of integers, they are float32."""
    kv_heads, _, head_dim = cache.block_shape
    return Shape(kv_heads, head_dim, cache.key.dtype if cache.key.dtype in _BITS else torch.float32)


class Recorder:
    """Stands in for an engine's attention and keeps queries, their outputs, and new keys and values, layer by layer.
    The engine's layers then run operator by operator, with the same bits."""

    def __init__(self, core: EngineCore) -> None:
        decoder = core.executor.decoder
        self._spec = decoder.spec
        self._attention: AttentionBackend = decoder.attention
        self._written: list[tuple[Tensor, Tensor]] = []
        self._attended: list[tuple[Tensor, Tensor, Tensor]] = []
        self._shape = shape_of(core.executor.pool.layer(0))
        decoder.attention = self
        decoder.forward = lambda *arguments: Decoder.forward(decoder, *arguments)  # type: ignore[method-assign]

    def write(
        self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor, remainder_slots: Tensor | None = None
    ) -> None:
        self._attention.write(key, value, cache, slots, remainder_slots)
        self._written.append((key.clone(), value.clone()))

    def attend(
        self, query: Tensor, cache: LayerCache, batch: AttentionBatch, group: int, **options: object
    ) -> tuple[Tensor, Tensor | None]:
        output, lse = self._attention.attend(query, cache, batch, group, **options)  # type: ignore[arg-type]
        sampled = torch.linspace(0, len(query) - 1, min(len(query), SAMPLED)).long()
        self._attended.append((query[sampled], batch.positions[sampled], output[sampled]))
        return output, lse

    def errors(self, tokens: int) -> Iterator[float]:
        """Returns, by layer, over all steps and heads, and SAMPLED tokens of a step, the greatest deviation of an
        output from attention in fp64 over the `tokens` seeded keys and those that were written since, as a share of the
        mean of |values| under the same weights. Steps began behind the seeded tokens and went on without gaps."""
        layers = len(self._spec.layers)
        for layer in range(layers):
            query, positions, output = (torch.cat(each) for each in zip(*self._attended[layer::layers], strict=True))
            written = tuple(torch.cat(each) for each in zip(*self._written[layer::layers], strict=True))
            of_pieces = (make_piece(layer, piece, self._shape) for piece in range(tokens // PIECE))
            yield _deviation(query, positions, output, _batched(of_pieces, written), self._spec.scale)


def _batched(pieces: Iterator[tuple[Tensor, Tensor]], last: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields several pieces as one, then `last`."""
    waiting: list[tuple[Tensor, Tensor]] = []
    for piece in pieces:
        waiting.append(piece)
        if len(waiting) == PIECES_AT_ONCE:
            yield tuple(map(torch.cat, zip(*waiting, strict=True)))  # type: ignore[misc]
            waiting.clear()
    if waiting:
        yield tuple(map(torch.cat, zip(*waiting, strict=True)))  # type: ignore[misc]
    yield last[0], last[1]


def _deviation(
    query: Tensor, positions: Tensor, output: Tensor, pieces: Iterator[tuple[Tensor, Tensor]], scale: float
) -> float:
    """Compares attention in fp64, softmax folded piece by piece (Milakov and Gimelshein 2018), with `output`.

    query, output [tokens, heads, head_dim] at `positions` [tokens]; pieces of keys and values [n, kv_heads, head_dim]
    from position 0 on.
    """
    tokens, heads, dim = query.shape
    first, state = 0, None
    for key, value in pieces:
        kv_heads = key.shape[1]
        if state is None:
            # [KV heads, query heads of one x tokens, ...]
            q = query.double().view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim) * scale
            state = (
                torch.full(q.shape[:2], -torch.inf, dtype=torch.float64),
                torch.zeros(*q.shape[:2], 2 * dim + 1, dtype=torch.float64),
            )
            limit = positions.repeat(heads // kv_heads)
        v = value.double().transpose(0, 1)
        scores = q @ key.double().permute(1, 2, 0)
        index = torch.arange(first, first + len(key))
        if first + len(key) > int(positions.min()):
            scores = scores.masked_fill(index > limit.unsqueeze(1), -torch.inf)
        highest, sums = state
        risen = torch.maximum(highest, scores.amax(2))
        weights = torch.exp(scores - risen.unsqueeze(2))
        wanted = torch.cat((v, v.abs(), torch.ones(*v.shape[:2], 1, dtype=torch.float64)), 2)
        state = risen, sums * torch.exp(highest - risen).unsqueeze(2) + weights @ wanted
        first += len(key)
    assert state is not None
    sums = state[1] / state[1][:, :, -1:]
    ours = (
        output.double()
        .view(tokens, -1, heads // sums.shape[0], dim)
        .permute(1, 2, 0, 3)
        .reshape(sums.shape[0], -1, dim)
    )
    return float(((ours - sums[:, :, :dim]).abs() / sums[:, :, dim : 2 * dim]).max())
