"""Offload stores in host memory. `HostStore` keeps blocks as they are, in an arena of a fixed size. `CompressedStore`
compresses them, and they come back to the bit.

Of a floating-point number's bytes, that with sign and exponent differs little within a block, and the others look like
chance. So the first bytes of all elements are put together, then all second ones and so on, before zstd.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray

from pagemill import _kernels
from pagemill.errors import KVMemoryError
from pagemill.kvcache.frame_access import Place, Places, Records
from pagemill.kvcache.offload_tiers import Spill
from pagemill.kvcache.pages import NOT_HUGE, private_memory
from pagemill.memory.tier_shares import TierShares
from pagemill.memory.wanted import longest_unused
from pagemill.memory.work import BlockName

ENTRY_BYTES = 512
"""Bytes that a block takes besides its content: names, and a place in the order of use."""
LEVEL = 1
"""The level of zstd. Higher ones take twice as long and more, and save nothing more of such bytes."""

Content = TypeVar("Content")


class HostTier(ABC, Generic[Content]):
    """Knows the blocks of an offload store in host memory: content and name of each, the one used last at the end, over
    all tenants and by tenant; and those on their way to the tier below.

    size: of the store, as `_size` counts contents. wanted: digests of blocks that leave after all others of a tenant.
    """

    name = "host"
    lasting = False

    def __init__(self, size: int, wanted: Container[bytes] = frozenset()) -> None:
        self.shares = TierShares(size)
        self._wanted = wanted
        self._held: OrderedDict[tuple[bytes, int], tuple[Content, BlockName]] = OrderedDict()
        self._order: dict[str, OrderedDict[tuple[bytes, int], None]] = {}
        self._charged: Counter[str] = Counter()
        self._leaving: dict[tuple[bytes, int], tuple[Content, BlockName]] = {}
        self._lock = threading.RLock()

    def num_blocks(self) -> int:
        return len(self._held)

    def blocks_by_tenant(self) -> dict[str, int]:
        with self._lock:
            return {tenant: len(order) for tenant, order in self._order.items() if order}

    def holds(self, blocks: Sequence[tuple[bytes, int]]) -> list[bool]:
        with self._lock:
            return [block in self._held or block in self._leaving for block in blocks]

    def read(self, blocks: Sequence[tuple[bytes, int]], out: Places) -> list[bool]:
        with self._lock:
            held = [self._held.get(block, self._leaving.get(block)) for block in blocks]
        found = [(place, entry[0]) for place, entry in zip(out, held, strict=True) if entry is not None]
        self._copy_out(found)
        return [entry is not None for entry in held]

    def _copy_out(self, found: Sequence[tuple[Place, Content]]) -> None:
        for place, content in found:
            place[:] = self._record(content).reshape(place.shape)

    def use(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        with self._lock:
            for block in reversed(blocks):
                if block in self._held:
                    self._held.move_to_end(block)
                    self._order[self._held[block][1].tenant].move_to_end(block)

    def names(self) -> list[BlockName]:
        with self._lock:
            return [name for _, name in reversed(self._held.values())]

    def close(self) -> None:
        """Does nothing: the memory goes with the object."""

    @abstractmethod
    def _record(self, content: Content) -> NDArray[np.uint8]: ...

    @abstractmethod
    def _size(self, content: Content) -> int: ...

    def _add(self, name: BlockName, content: Content) -> None:
        self._held[name[:2]] = content, name
        self._order.setdefault(name.tenant, OrderedDict())[name[:2]] = None
        self._charged[name.tenant] += self._size(content)

    def _make_room(self) -> list[tuple[bytes, int]]:
        """Lets blocks leave until the rest has room, and returns them."""
        gone, spared, excess = [], Counter[str](), self._charged.total() - self.shares.size
        for tenant, amount in self.shares.giving(self._charged).items():
            order = self._order[tenant]
            while amount > 0 and excess > 0:
                block, spared[tenant] = longest_unused(order, self._wanted, spared[tenant])
                del order[block]
                self._leaving[block] = self._held.pop(block)
                size = self._size(self._leaving[block][0])
                self._charged[tenant] -= size
                amount -= size
                excess -= size
                gone.append(block)
        return gone

    def _pass_on(self, spill: Spill) -> None:
        """Gives what is leaving to the tier below. It is found here until that has it."""
        try:
            if self._leaving:
                leaving = list(self._leaving.values())
                spill([name for _, name in leaving], [self._record(content) for content, _ in leaving])
        finally:
            with self._lock:
                self._leaving.clear()


class HostStore(HostTier[NDArray[np.uint8]]):
    """Implements `OffloadStore` for `capacity` blocks. Thread-safe, but only one thread at a time may write.

    cores: how many copy blocks; more than one where a device computes, and the host's cores are idle. Then so many
    threads of the kernels copy, for one caller at a time, and places are arrays without gaps. wanted: see `HostTier`.
    Raises KVMemoryError if the memory cannot be had.
    """

    def __init__(
        self, capacity: int, record_bytes: int, cores: int = 1, wanted: Container[bytes] = frozenset()
    ) -> None:
        super().__init__(capacity, wanted)
        self.capacity = capacity
        self._together = cores > 1
        if self._together:
            _kernels.set_num_threads(max(cores, _kernels.num_threads()))
        self._arena = host_arena(capacity, record_bytes)
        self._free = list(self._arena[::-1])
        self._turn = threading.Condition(self._lock)
        self._readers, self._writing = 0, False

    def read(self, blocks: Sequence[tuple[bytes, int]], out: Places) -> list[bool]:
        """Reads beside other threads that do, but not beside one that writes: a block's place may be another's then."""
        with self._turn:
            self._turn.wait_for(lambda: not self._writing)
            self._readers += 1
        try:
            return super().read(blocks, out)
        finally:
            with self._turn:
                self._readers -= 1
                self._turn.notify_all()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds the lock once nobody reads; who wants to read meanwhile comes after."""
        with self._turn:
            self._writing = True
            try:
                self._turn.wait_for(lambda: not self._readers)
                yield
            finally:
                self._writing = False
                self._turn.notify_all()

    def write(self, names: Sequence[BlockName], records: Records, spill: Spill) -> None:
        coming = {}
        with self._lock:
            for name, record in zip(names, records, strict=True):
                if name[:2] not in self._held:
                    self._add(name, record)
                    coming[name[:2]] = name, record
            # What comes and leaves at once has no place, and takes none.
            places = [self._leaving[block][0] for block in self._make_room() if coming.pop(block, None) is None]
        try:
            self._pass_on(spill)
        finally:
            with self._alone():  # nobody reads any more what has left
                self._free += places
            self._keep(coming)

    def _keep(self, coming: Mapping[tuple[bytes, int], tuple[BlockName, NDArray[np.uint8]]]) -> None:
        """Copies records to places, from which they are read then; so far, and meanwhile, from where they came."""
        placed = [(name, self._free.pop(), record) for name, record in coming.values()]
        self._copy([(place, record) for _, place, record in placed])
        with self._alone():  # nobody reads any more what the caller holds
            for name, place, _ in placed:
                self._held[name[:2]] = place, name

    def _copy_out(self, found: Sequence[tuple[Place, NDArray[np.uint8]]]) -> None:
        self._copy(found)

    def _copy(self, pairs: Sequence[tuple[Place, NDArray[np.uint8]]]) -> None:
        if self._together:
            _kernels.copy_records([np.asarray(place) for place, _ in pairs], [record for _, record in pairs])
        else:
            super()._copy_out(pairs)

    def _record(self, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return content

    def _size(self, content: NDArray[np.uint8]) -> int:
        return 1


class CompressedStore(HostTier[bytes]):
    """Implements `OffloadStore`. Thread-safe. Tenants share bytes.

    limit_bytes: the most that contents take, compressed, with ENTRY_BYTES each; nbytes: what they take now.
    itemsize: bytes of a record's elements. wanted: see `HostTier`.
    """

    def __init__(self, limit_bytes: int, itemsize: int, wanted: Container[bytes] = frozenset()) -> None:
        super().__init__(limit_bytes, wanted)
        self.capacity = limit_bytes // ENTRY_BYTES
        self._itemsize = itemsize
        self._compressor = zstandard.ZstdCompressor(LEVEL)

    def write(self, names: Sequence[BlockName], records: Records, spill: Spill) -> None:
        new = {name: record for name, record in zip(names, records, strict=True) if name[:2] not in self._held}
        coming = {name: self._pack(record) for name, record in new.items()}  # before the lock: others would wait for it
        with self._lock:
            for name, content in coming.items():
                self._add(name, content)
            self._make_room()
        self._pass_on(spill)

    @property
    def nbytes(self) -> int:
        return self._charged.total()

    def _size(self, content: bytes) -> int:
        return len(content) + ENTRY_BYTES

    def _pack(self, record: NDArray[np.uint8]) -> bytes:
        planes = np.ascontiguousarray(record.reshape(-1, self._itemsize).T)
        packed: bytes = self._compressor.compress(planes.data)
        return packed

    def _record(self, content: bytes) -> NDArray[np.uint8]:
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(content), dtype=np.uint8)
        return np.ascontiguousarray(planes.reshape(self._itemsize, -1).T).reshape(-1)


def host_arena(capacity: int, record_bytes: int) -> NDArray[np.uint8]:
    """Returns memory for records, uint8 [capacity, record_bytes], on small pages. Blocks are stored beside steps, by a
    thread that takes a core from the kernels meanwhile, and in a virtual machine whose host takes back free memory,
    finding and clearing 2 MiB for one may take as long as half a step. It is taken as it is written. Raises
    KVMemoryError if the system gives no address space for it."""
    nbytes = capacity * record_bytes
    try:
        memory = private_memory(nbytes, NOT_HUGE)
    except (OSError, OverflowError) as error:
        raise KVMemoryError(
            f"the host tier of {nbytes} bytes could not be allocated: {error}; lower kv_host_memory",
            param="kv_host_memory",
        ) from error
    return np.frombuffer(memory, dtype=np.uint8).reshape(capacity, record_bytes)
