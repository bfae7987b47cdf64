"""Runs a decoder over a paged pool without an engine: sequences advance by any number of tokens per step, in any mix.

The pool is hostile: frames are handed out in random order, hold NaN until they are written, and hold it again once a
window has left them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pagemill.attention.interface import AttentionBatch, GroupBatch, join_remainders
from pagemill.executor.backend import select_backend
from pagemill.executor.share import frame_shape as frame_shape_of
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layer_groups import add_remainders, group_layers
from pagemill.kvcache.layout import FrameShape, block_major, layer_major
from pagemill.models.decoder import Decoder
from pagemill.models.loading import LoadedModel, load_model

FRAME_BYTES = 30 * 2 * 3 * 64 * 16 * 4
"""Of SmolLM2-135M in float32, blocks of 16: 30 layers, 3 KV heads of 64."""

MODEL = "smollm2-135m"
"""The real model, for tests of many kinds."""


def load_on(device: str, path: str | Path, **settings) -> LoadedModel:
    """Loads a model onto what the engine takes for a device."""
    on = select_backend(device)
    return load_model(path, device=on.device, ops=on.ops, attention=on.attention, decoder=on.decoder, **settings)


def frame_shape(
    windows: Sequence[int | None], kv_heads: int, head_dim: int, block_size: int, element: str
) -> FrameShape:
    """Returns the shape of frames for layers with these windows, whose keys and values have the same width."""
    return FrameShape(group_layers(windows), kv_heads, block_size, head_dim, head_dim, kv_format(element))


def poison(pool: DevicePool) -> None:
    """Fills the whole pool with NaN; integers with ones in all bits, and scales that are NaN."""
    pool.frames.bytes.fill_(255) if pool.dtype.itemsize == 1 else pool.storage.fill_(float("nan"))


class PagedSequences:
    """Sequences that share one pool: `tokens[row]`, of which the cache holds the first `done[row]`."""

    def __init__(
        self,
        decoder: Decoder,
        sequences: Sequence[Sequence[int]],
        *,
        block_size: int = 16,
        kv_dtype: torch.dtype | str | None = None,
        seed: int = 0,
    ) -> None:
        self.decoder = decoder
        self.tokens = [list(sequence) for sequence in sequences]
        self.done = [0] * len(self.tokens)
        self.block_size = block_size
        entries = [-(-len(sequence) // block_size) for sequence in self.tokens]
        spec, format = decoder.spec, kv_format(str(kv_dtype or decoder.dtype))
        self.groups = add_remainders(decoder.groups, format.precise) if format.precise else decoder.groups
        frames = sum(entries) * len(self.groups.groups) + 2
        self.pool = DevicePool(
            frames,
            frame_shape_of(spec, decoder.groups, block_size, format),
            decoder.device,
            layer_major if decoder.device.type == "cpu" else block_major,
        )
        poison(self.pool)
        self._free = list(range(frames))
        random.Random(seed).shuffle(self._free)
        self._tables = [torch.full((len(entries), max(entries) + 1), -1, dtype=torch.int32) for _ in self.groups.groups]

    def step(self, work: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Advances each (row, count) by `count` tokens, all in one batch; returns their logits, each [count, vocab]."""
        token_ids, batch = self.batch(work)
        hidden = self.decoder.forward(token_ids, batch, self.pool)
        for row, count in work:
            self.done[row] += count
            self.release(row)
        return list(torch.split(self.decoder.logits(hidden).cpu(), [count for _, count in work]))

    def run(self, chunk: int | None = None) -> list[Tensor]:
        """Logits of all sequences in full, each [length, vocab]; at most `chunk` tokens of each per step, None: all."""
        parts: list[list[Tensor]] = [[] for _ in self.tokens]
        while work := [(row, min(chunk or left, left)) for row, left in enumerate(self._left()) if left]:
            for (row, _), logits in zip(work, self.step(work), strict=True):
                parts[row].append(logits)
        return [torch.cat(part) for part in parts]

    def run_mixed(self, seed: int = 0) -> list[Tensor]:
        """Like `run`, but every step takes a random choice of sequences, in random order, by random counts."""
        choose = random.Random(seed)
        parts: list[list[Tensor]] = [[] for _ in self.tokens]
        while rows := [row for row, left in enumerate(self._left()) if left]:
            chosen = choose.sample(rows, choose.randint(1, len(rows)))
            work = [(row, min(self._left()[row], choose.choice((1, 1, 3, 17, 40)))) for row in chosen]
            for (row, _), logits in zip(work, self.step(work), strict=True):
                parts[row].append(logits)
        return [torch.cat(part) for part in parts]

    def batch(self, work: Sequence[tuple[int, int]]) -> tuple[Tensor, AttentionBatch]:
        """Token ids and batch of one step; takes the frames that it needs."""
        ends = [self.done[row] + count for row, count in work]
        rows = torch.tensor([row for row, _ in work])
        positions = [torch.arange(self.done[row], end) for (row, _), end in zip(work, ends, strict=True)]
        groups = []
        for table in self._tables:
            slots = []
            for (row, _), span in zip(work, positions, strict=True):
                for entry in range(int(span[0]) // self.block_size, int(span[-1]) // self.block_size + 1):
                    if table[row, entry] < 0:
                        table[row, entry] = self._free.pop()
                slots.append(table[row, span // self.block_size].long() * self.block_size + span % self.block_size)
            groups.append(GroupBatch(self._at(table[rows]), self._at(torch.cat(slots))))
        counts = [count for _, count in work]
        ids = [
            token for (row, _), end in zip(work, ends, strict=True) for token in self.tokens[row][self.done[row] : end]
        ]
        start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        return self._at(torch.tensor(ids)), AttentionBatch(
            query_start=self._at(start),
            context_lens=self._at(torch.tensor(ends, dtype=torch.int32)),
            positions=self._at(torch.cat(positions)),
            groups=join_remainders(groups, self.groups.remainders, self.pool.shape.format.precise),
            max_query_len=max(counts),
            max_context_len=max(ends),
        )

    def _left(self) -> list[int]:
        return [len(tokens) - done for tokens, done in zip(self.tokens, self.done, strict=True)]

    def release(self, row: int) -> None:
        """Gives back, poisoned, the frames that no later token of the row can see."""
        for group, table in zip(self.groups.groups, self._tables, strict=True):
            if group.window is None:
                continue
            for entry in range(max(0, self.done[row] - group.window + 1) // self.block_size):
                if (frame := int(table[row, entry])) >= 0:
                    table[row, entry] = -1
                    self._free.insert(0, frame)
                    for layer in group.layers:
                        for tensor in self.pool.layer(layer):
                            if tensor is not None:
                                tensor[frame] = float("nan") if tensor.is_floating_point() else -1

    def _at(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.decoder.device)
