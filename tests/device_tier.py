"""DeviceTier: a lower tier whose blocks lie in a device's memory, as they would in another GPU's."""

from __future__ import annotations

import threading
from collections import Counter

import torch

from pagemill.memory.tier_shares import TierShares

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class DeviceTier:
    """A OffloadStore with room for `capacity` blocks. What came first makes room."""

    name = "device"
    lasting = False

    def __init__(self, capacity: int, record_bytes: int) -> None:
        self.capacity = capacity
        self.shares = TierShares(capacity)
        self._memory = torch.empty((capacity, record_bytes), dtype=torch.uint8, device=DEVICE)
        self._free = list(range(capacity))
        self._slots = {}
        self._lock = threading.Lock()

    def blocks_by_tenant(self):
        return Counter(name.tenant for _, name in self._slots.values())

    def holds(self, blocks):
        with self._lock:
            return [block in self._slots for block in blocks]

    def read(self, blocks, out):
        with self._lock:
            found = [block in self._slots for block in blocks]
            for block, record, here in zip(blocks, out, found, strict=True):
                if here:
                    record[:] = self._record(block).reshape(record.shape)
        return found

    def use(self, blocks):
        pass

    def write(self, names, records, spill):
        for name, record in zip(names, records, strict=True):
            if name[:2] in self._slots:
                continue
            if not self._free:
                first = next(iter(self._slots))
                try:
                    spill([self._slots[first][1]], [self._record(first)])
                finally:
                    with self._lock:
                        self._free.append(self._slots.pop(first)[0])
            with self._lock:
                slot = self._free.pop()
                self._memory[slot] = torch.tensor(record, device=DEVICE).reshape(-1)
                self._slots[name[:2]] = slot, name

    def names(self):
        return [name for _, name in reversed(self._slots.values())]

    def close(self):
        del self._memory

    def _record(self, block):
        return self._memory[self._slots[block][0]].cpu().numpy().copy()
