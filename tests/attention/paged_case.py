"""Random paged batches for the attention tests: scattered frames, poisoned slots, mixed rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attention.reference import reference_attention
from harness import frame_shape, poison
from pagemill import _kernels
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.interface import AttentionBackend, AttentionBatch, GroupBatch, HostLengths, LayerCache
from pagemill.attention.quantize import (
    dequantize,
    narrow,
    quantize_as,
    quantize_int4,
    remainder_of,
    rotate,
    rotated_together,
)
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layout import LayoutMaker, layer_major


@dataclass
class PagedCase:
    """Rows as (context length, query length); keys and values of each row in full, and its part of a scattered pool.

    dtype: the pool's, a torch type or a KV format's name; keys and values that become integers are drawn in float32.
    """

    rows: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype | str = torch.float32
    query_dtype: torch.dtype = torch.float32
    seed: int = 0
    device: str = "cpu"
    layout: LayoutMaker = layer_major
    value_dim: int | None = None
    """Values are so many first numbers of keys; None: they lie beside them, as wide."""

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        held = [-(-context // self.block_size) for context, _ in self.rows]
        self.precise = kv_format(str(self.dtype)).precise
        total = (2 if self.precise else 1) * sum(held) + 3
        frame = frame_shape([None, None], self.kv_heads, self.head_dim, self.block_size, str(self.dtype))
        if self.value_dim is not None:
            frame = replace(frame, value_dim=self.value_dim, values_in_keys=True)
        self.pool = DevicePool(total, frame, self.device, self.layout)
        poison(self.pool)
        frames = torch.randperm(total, generator=random).int()
        self.tables = torch.full((len(self.rows), max([*held, 0]) + 1), -1, dtype=torch.int32)
        taken = 0
        for row, count in enumerate(held):
            self.tables[row, :count] = frames[taken : taken + count]
            taken += count
        self.remainder_tables = torch.full_like(self.tables, -1)
        if self.precise:
            for row, (context, length) in enumerate(self.rows):
                first = max(0, context - length - self.precise + 1) // self.block_size  # that the first query sees
                self.remainder_tables[row, first : held[row]] = frames[taken : taken + held[row] - first]
                taken += held[row] - first

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random)

        shape = (self.kv_heads, self.head_dim)
        drawn = torch.float32 if self.narrow else self.dtype
        self.keys = [(2 * draw(context, *shape)).to(drawn) for context, _ in self.rows]
        self.values = [draw(context, *shape).to(drawn) for context, _ in self.rows]
        if self.value_dim is not None:
            self.values = [key[..., : self.value_dim] for key in self.keys]
        self.queries = [draw(length, self.heads, self.head_dim).to(self.query_dtype) for _, length in self.rows]

    def lse_tolerance(self, backend: AttentionBackend) -> float:
        """Returns how far a backend's log-sum-exp may be from the dense one's.

        Sums are fp32, with three exceptions: products of bf16, over keys and values of 8 bits in floating point too,
        add weights as they are rounded; over integers the CPU takes a shorter exponential for 16-bit queries; and where
        keys have 4 bits, Triton rounds 16-bit queries and keys to fp16 as they are rotated.
        """
        key = self.cache.key.dtype
        if isinstance(backend, CpuAttention) and _kernels.isa() in ("amx_bf16", "avx512_bf16"):
            in_bf16 = key == torch.bfloat16 or (key.is_floating_point and key.itemsize == 1)
            if in_bf16 and self.query_dtype == torch.bfloat16:
                return 5e-3
        if self.narrow and self.query_dtype != torch.float32:
            if isinstance(backend, CpuAttention):
                return 1e-4
            rounded = backend.name.startswith("triton") and key == torch.uint8
            return 3e-3 if rounded else 1e-5
        return 1e-5

    def is_in_bytes(self, backend: AttentionBackend) -> bool:
        """Returns whether a backend makes bytes of queries and weights, and multiplies these."""
        on_bytes = isinstance(backend, CpuAttention) and _kernels.isa() in ("avx512_vnni", "avx512_bf16", "amx_bf16")
        lies_so = self.pool.layout.beside == 4 and self.block_size % 16 == 0 and self.head_dim % 16 == 0
        scaled = self.cache.key_scale is not None
        return on_bytes and lies_so and scaled and self.query_dtype != torch.float32

    @property
    def cache(self) -> LayerCache:
        return self.pool.layer(1)

    def slots(self, row: int, begin: int, end: int, *, of_remainders: bool = False) -> torch.Tensor:
        positions = torch.arange(begin, end)
        tables = self.remainder_tables if of_remainders else self.tables
        frames = tables[row, positions // self.block_size].long()
        return torch.where(frames < 0, -1, frames * self.block_size + positions % self.block_size)

    def write_all(self, backend: AttentionBackend) -> None:
        for row, (context, _) in enumerate(self.rows):
            slots = self.slots(row, 0, context).to(self.device)
            rest = self.slots(row, 0, context, of_remainders=True) if self.precise else None
            value = None if self.value_dim is not None else self.values[row].to(self.device)
            backend.write(self.keys[row].to(self.device), value, self.cache, slots, rest)

    @property
    def narrow(self) -> bool:
        return self.pool.shape.format.itemsize == 1

    def stored(self, tensor: torch.Tensor, *, is_key: bool) -> torch.Tensor:
        """Keys or values as the pool has them, at least in the precision of its dtype."""
        if not self.narrow:
            return tensor
        if self.cache.key_scale is None:
            return narrow(tensor, self.cache.key.dtype).double()
        wide = dequantize(*self._stored(tensor, is_key=is_key))
        return self._turned_back(wide) if is_key and self.cache.key.dtype == torch.uint8 else wide.double()

    def remainders(self, tensor: torch.Tensor, *, is_key: bool) -> torch.Tensor:
        """Returns the remainders that the pool holds beside that."""
        elements, words = self._stored(tensor, is_key=is_key)
        left = remainder_of(tensor, elements, words, is_key=is_key)
        wide = dequantize(*quantize_int4(left, self.head_dim // words.shape[-1]))
        return self._turned_back(wide) if is_key else wide.double()

    def _stored(self, tensor: torch.Tensor, *, is_key: bool) -> tuple[torch.Tensor, torch.Tensor]:
        element = (self.cache.key if is_key else self.cache.value).dtype
        scales = self.cache.key_scale if is_key else self.cache.value_scale
        return quantize_as(element, tensor, scales.shape[2] // self.block_size, is_key=is_key)

    def _in_a_byte(self, query: torch.Tensor, scale: float) -> torch.Tensor:
        # In fp32 as the kernels do it: rotated numbers of 16 bits often lie in the middle of two integers.
        rotated = self.cache.key.dtype == torch.uint8
        together = rotated_together(self.head_dim) if rotated else 1
        wide = (rotate(query) if rotated else query.float()) * torch.tensor(scale / together, dtype=torch.float32)
        most = wide.abs().amax(-1, keepdim=True)
        integers = torch.round(wide * (torch.full_like(most, 127.0) / most))
        return (rotate(integers) if rotated else integers).double() * most.double() / (127 * scale)

    def _steps(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        words = self._stored(values, is_key=False)[1].squeeze(-1)
        if words.dtype == torch.float32:
            return words, torch.zeros_like(words), 1 / 128
        step, low = (half.view(torch.float32) for half in (words & -65536, words << 16))
        return step, low + 7.5 * step, 1 / 32

    def _turned_back(self, wide: torch.Tensor) -> torch.Tensor:
        # Hadamard's matrix is its own inverse, but for a factor.
        return rotate(wide).double() / rotated_together(self.head_dim)

    def batch(self, parts: list[tuple[int, int, int]]) -> tuple[torch.Tensor, AttentionBatch]:
        """Queries and batch of parts (row, begin, end): query tokens begin..end of the row's queries."""
        lengths = [end - begin for _, begin, end in parts]
        first = [self.rows[row][0] - self.rows[row][1] for row, _, _ in parts]
        contexts = [f + end for f, (_, _, end) in zip(first, parts, strict=True)]
        spans = [torch.arange(f + b, f + e) for f, (_, b, e) in zip(first, parts, strict=True)]
        slots = [self.slots(row, f + b, f + e) for f, (row, b, e) in zip(first, parts, strict=True)]
        query = torch.cat([self.queries[row][b:e] for row, b, e in parts]).to(self.device)

        def at(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device)

        of_parts = torch.tensor([row for row, _, _ in parts])
        group = GroupBatch(at(self.tables[of_parts]), at(torch.cat(slots)))
        if self.precise:
            rest = [
                self.slots(row, f + b, f + e, of_remainders=True) for f, (row, b, e) in zip(first, parts, strict=True)
            ]
            rest_group = GroupBatch(at(self.remainder_tables[of_parts]), at(torch.cat(rest)))
            group = replace(group, remainders=rest_group, precise=self.precise)
        return query, AttentionBatch(
            query_start=at(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)),
            context_lens=at(torch.tensor(contexts, dtype=torch.int32)),
            positions=at(torch.cat(spans)),
            groups=(group,),
            max_query_len=max(lengths),
            max_context_len=max(contexts),
            host=HostLengths(*(torch.tensor(each, dtype=torch.int32) for each in (lengths, contexts))),
        )

    def whole(self) -> tuple[torch.Tensor, AttentionBatch]:
        return self.batch([(row, 0, length) for row, (_, length) in enumerate(self.rows)])

    def expected(
        self,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        key_start: torch.Tensor | None = None,
        key_end: torch.Tensor | None = None,
        in_bytes: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `reference_attention` of all queries. in_bytes: as `is_in_bytes` says."""
        queries = [self._in_a_byte(query, scale) for query in self.queries] if in_bytes else self.queries
        results = [
            reference_attention(
                queries[row], self.stored(self.keys[row], is_key=True),
                self.stored(self.values[row], is_key=False),
                torch.arange(context - length, context), scale=scale, window=window, soft_cap=soft_cap,
                key_start=0 if key_start is None else int(key_start[row]),
                key_end=None if key_end is None else int(key_end[row]), precise=self.precise,
                remainders=None if not self.precise else (
                    self.remainders(self.keys[row], is_key=True), self.remainders(self.values[row], is_key=False)
                ),
                steps=self._steps(self.values[row]) if in_bytes else None,
            )
            for row, (context, length) in enumerate(self.rows)
        ]  # fmt: skip
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])
