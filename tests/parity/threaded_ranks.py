"""Ranks of a tensor-parallel model as threads of this process: what they exchange goes through a list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Meeting:
    """Lets threads meet. `widths` keeps what each collective of rank 0 has gathered, `sums` the widths of what it has
    added up."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)
        self.widths: list[list[int]] = []
        self.sums: list[int] = []


class ThreadExchange:
    native = None

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, len(meeting.parts)
        self._meeting = meeting

    def all_gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        assert part.shape[1] == widths[self.rank]
        if self.rank == 0:
            self._meeting.widths.append([*widths])
        return torch.cat(self._all(part), dim=1)

    def all_reduce(self, part: Tensor) -> Tensor:
        if self.rank == 0:
            self._meeting.sums.append(part.shape[1])
        first, *others = self._all(part)
        return sum(others, first)

    def _all(self, part: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.parts[self.rank] = part
        meeting.barrier.wait()
        parts = [each for each in meeting.parts if each is not None]
        meeting.barrier.wait()
        return parts


def on_ranks(size: int, work: Callable[[ThreadExchange], T]) -> tuple[list[T], Meeting]:
    """Returns what each rank's thread brings, and where they have met."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadExchange(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(run, range(size))], meeting
