"""Joins and orders rows of matrices as they are read, and gives them memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

_OWN_MAPPING_BYTES = 1 << 20


class Pairs(NamedTuple):
    """Says which rows rotate in pairs that lie side by side: those of each of `heads` heads behind its first
    `before`."""

    heads: int
    before: int = 0


def kept_rows(joined: Tensor, sizes: Sequence[int], keep: Sequence[slice] | None) -> Tensor:
    """Returns rows of parts of these sizes, which lie one after the other: of each part those to keep, or all."""
    if keep is None:
        return joined
    begins = [sum(sizes[:part]) for part in range(len(sizes))]
    ranges = [joined[at + rows.start : at + rows.stop] for at, rows in zip(begins, keep, strict=True)]
    return torch.cat(ranges) if len(ranges) > 1 else ranges[0]


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """Returns the parts' rows as one tensor; a single part as it is."""
    return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]


def unpaired(rows: Tensor, pairs: Pairs) -> Tensor:
    """Returns the rows with rotary pairs in halves; in `rows` they lie side by side."""
    heads = rows.view(pairs.heads, -1, *rows.shape[1:])
    before, turning = heads[:, : pairs.before], heads[:, pairs.before :]
    halves = turning.reshape(pairs.heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(turning.shape)
    return torch.cat((before, halves), dim=1).view(rows.shape)


def empty_matrix(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns memory for one matrix.

    A large one on CPU gets a mapping of its own, which goes back to the system as a whole. The C library's heap would
    keep holes between the packed weights (measured: a fifth of their size).
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < _OWN_MAPPING_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # small pages do as well
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
