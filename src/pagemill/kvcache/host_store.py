"""The host tier: blocks in host memory, by digest. HostStore keeps them as they are, in an arena of a fixed size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import KVMemoryError
from pagemill.kvcache.advice import NOT_HUGE, private_memory
from pagemill.kvcache.device_frames import pin, unpin
from pagemill.kvcache.lower_tiers import Spill
from pagemill.kvcache.records import Places, Records
from pagemill.memory.work import BlockName

Content = TypeVar("Content")
Leaving = TypeVar("Leaving")


class HostTier(Generic[Content, Leaving]):
    """What a LowerTier in host memory knows of its blocks: each block's content and name, that used last at the end;
    and what is on its way to the tier below.
    """

    name = "host"
    lasting = False

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[bytes, int], tuple[Content, BlockName]] = OrderedDict()
        self._leaving: dict[tuple[bytes, int], Leaving] = {}
        self._lock = threading.Lock()

    def num_blocks(self) -> int:
        return len(self._held)

    def holds(self, blocks: Sequence[tuple[bytes, int]]) -> list[bool]:
        with self._lock:
            return [block in self._held or block in self._leaving for block in blocks]

    def use(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        with self._lock:
            for block in reversed(blocks):
                if block in self._held:
                    self._held.move_to_end(block)

    def names(self) -> list[BlockName]:
        with self._lock:
            return [name for _, name in reversed(self._held.values())]


class HostStore(HostTier[int, NDArray[np.uint8]]):
    """A LowerTier of `capacity` blocks. Thread-safe. What was used longest ago makes room.

    pinned: in memory that GPUs copy to and from by themselves.
    Raises KVMemoryError if the memory cannot be had.
    """

    def __init__(self, capacity: int, record_bytes: int, pinned: bool = False) -> None:
        super().__init__()
        self.capacity = capacity
        self._arena = _arena(capacity, record_bytes)
        self._pinned = pinned
        if pinned:
            pin(self._arena)
        self._free = list(range(capacity - 1, -1, -1))

    def read(self, blocks: Sequence[tuple[bytes, int]], out: Places) -> list[bool]:
        found = []
        with self._lock:
            for row, block in enumerate(blocks):
                record = self._leaving.get(block)
                if block in self._held:
                    record = self._arena[self._held[block][0]]
                found.append(record is not None)
                if record is not None:
                    out[row][:] = record.reshape(out[row].shape)
        return found

    def write(self, names: Sequence[BlockName], records: Records, spill: Spill) -> None:
        spilled: list[BlockName] = []
        with self._lock:
            for name, record in zip(names, records, strict=True):
                block = name[:2]
                if block in self._held:
                    continue
                if not self._free:
                    slot, old = self._held.popitem(last=False)[1]
                    spilled.append(old)
                    self._leaving[old[:2]] = self._arena[slot].copy()
                    self._free.append(slot)
                slot = self._free.pop()
                self._arena[slot] = record
                self._held[block] = slot, name
        try:
            if spilled:
                spill(spilled, [self._leaving[old[:2]] for old in spilled])
        finally:
            with self._lock:
                self._leaving.clear()

    def close(self) -> None:
        """Nothing may be read or written any more."""
        if self._pinned:
            unpin(self._arena)


def _arena(capacity: int, record_bytes: int) -> NDArray[np.uint8]:
    """[capacity, record_bytes] on small pages. Blocks are stored beside steps, by a thread that takes a core from the
    kernels meanwhile, and in a virtual machine whose host takes back free memory, finding and clearing 2 MiB for one
    may take as long as half a step."""
    nbytes = capacity * record_bytes
    try:
        memory = private_memory(nbytes, NOT_HUGE)
    except (OSError, OverflowError) as error:
        raise KVMemoryError(
            f"the host tier of {nbytes} bytes could not be allocated: {error}; lower kv_host_memory",
            param="kv_host_memory",
        ) from error
    return np.frombuffer(memory, dtype=np.uint8).reshape(capacity, record_bytes)
