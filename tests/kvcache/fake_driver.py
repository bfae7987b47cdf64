"""FakeDriver: what CUDA's driver does with a card's memory, on memory of the host.

The card is a file in memory, of which addresses are mapped parts. Where nothing is mapped and opened, an access ends
the process, as it would lose a GPU. What the driver would not say, or would say too late, is misuse here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from pagemill.errors import DriverError

GRANULARITY = 2 * mmap.PAGESIZE
POISON = 0x9B
"""A byte of memory that nobody has written yet."""
_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NORESERVE = 0x10, 0x4000
_NOWHERE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Misuse(BaseException):
    """Says that a driver would be asked for what it may not be asked for. Nobody takes it for an error of a driver."""


class FakeDriver:
    """Implements `Driver` for a card of so many bytes.

    fail(begin, count): of the calls to come, from this one on so many fail. calls: the names of all that were made.
    """

    where = torch.device("cpu")
    granularity = GRANULARITY

    def __init__(self, nbytes: int) -> None:
        self.calls: list[str] = []
        self.mapped: dict[int, tuple[int, int]] = {}
        """By address, the bytes that are mapped there, and of which handle."""
        self.opened: set[int] = set()
        self.reserved: dict[int, int] = {}
        self._handles: dict[int, list[int]] = {}
        self._last = 0
        self._file = os.memfd_create("card")
        os.ftruncate(self._file, nbytes)
        self._free = [*range(0, nbytes, GRANULARITY)]
        self._fails = range(0)

    def __del__(self) -> None:
        os.close(self._file)

    @property
    def free_bytes(self) -> int:
        return len(self._free) * GRANULARITY

    def fail(self, begin: int = 0, count: int = 0) -> None:
        self._fails = range(len(self.calls) + begin, len(self.calls) + begin + count)

    def reserve(self, nbytes: int) -> int:
        self._call("reserve", nbytes)
        begin = _map(None, nbytes + GRANULARITY, _NOWHERE)
        address = -(-begin // GRANULARITY) * GRANULARITY
        _give_up(begin, address)
        _give_up(address + nbytes, begin + nbytes + GRANULARITY)
        self.reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        self._call("free", nbytes)
        _rule(self.reserved.get(address) == nbytes, "what is freed is not what was reserved")
        if any(address <= at < address + nbytes for at in self.mapped):
            raise DriverError("addresses that are mapped are not freed")
        _give_up(address, address + nbytes)
        del self.reserved[address]

    def create(self, nbytes: int) -> int:
        self._call("create", nbytes)
        count = nbytes // GRANULARITY
        if count > len(self._free):
            raise DriverError(f"create: {nbytes} bytes are more than the {self.free_bytes} that are free")
        self._last += 1
        self._handles[self._last] = [self._free.pop() for _ in range(count)]
        for place in self._handles[self._last]:
            os.pwrite(self._file, bytes([POISON]) * GRANULARITY, place)
        return self._last

    def release(self, handle: int) -> None:
        self._call("release")
        _rule(handle in self._handles, "a handle is released that is not there")
        _rule(all(of != handle for _, of in self.mapped.values()), "memory is released that is mapped")
        self._free += self._handles.pop(handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._call("map", address, nbytes)
        places = self._handles.get(handle, [])
        _rule(len(places) * GRANULARITY == nbytes, "what is mapped is not a handle's memory as a whole")
        _rule(any(at <= address and address + nbytes <= at + size for at, size in self.reserved.items()), "no address")
        _rule(all(at + size <= address or address + nbytes <= at for at, (size, _) in self.mapped.items()), "two maps")
        _rule(all(of != handle for _, of in self.mapped.values()), "memory is mapped in two places")
        for index, place in enumerate(places):
            _map(address + index * GRANULARITY, GRANULARITY, mmap.MAP_SHARED | _FIXED, self._file, place)
        self.mapped[address] = nbytes, handle

    def open(self, address: int, nbytes: int) -> None:
        self._call("open", address, nbytes)
        at, opened = address, set()
        while at < address + nbytes:
            _rule(at in self.mapped, "what is opened is not mapped")
            opened.add(at)
            at += self.mapped[at][0]
        _rule(at == address + nbytes, "a part of a mapping is opened")
        self.opened |= opened
        assert _libc.mprotect(address, nbytes, _READ_WRITE) == 0

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("unmap", address, nbytes)
        _rule(self.mapped.get(address, (0, 0))[0] == nbytes, "what is unmapped was not mapped as a whole")
        _map(address, nbytes, _NOWHERE | _FIXED)
        self.opened.discard(address)
        del self.mapped[address]

    def tensor(self, address: int, nbytes: int, owner: object) -> Tensor:
        self._call("tensor")
        _rule(address in self.opened, "the first byte of a tensor has no memory")

        class Addresses(ctypes.c_uint8 * nbytes):
            pass

        addresses = Addresses.from_address(address)
        addresses.owner = owner
        return torch.frombuffer(addresses, dtype=torch.uint8)

    def pieces(self, tensor: Tensor) -> Iterator[Tensor]:
        """Gives the parts of a tensor, uint8 [n], that have memory. One that lies elsewhere has."""
        address = tensor.data_ptr()
        if address not in self.reserved:
            yield tensor
            return
        for at in sorted(self.opened):
            if 0 <= (begin := at - address) < len(tensor):
                yield tensor[begin : begin + self.mapped[at][0]]

    def check_empty(self) -> None:
        """Raises Misuse where something was not given back."""
        _rule(not (self.mapped or self.opened or self.reserved or self._handles), "something was not given back")

    def _call(self, name: str, *sizes: int) -> None:
        fails = len(self.calls) in self._fails
        self.calls.append(name)
        _rule(all(size % GRANULARITY == 0 for size in sizes), f"{name} is asked for no whole granules: {sizes}")
        if fails:
            raise DriverError(f"{name} fails here")


def _map(address: int | None, nbytes: int, flags: int, file: int = -1, begin: int = 0) -> int:
    """Maps memory that nobody may use yet."""
    found = _libc.mmap(address, nbytes, _NONE, flags, file, begin)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return found


def _give_up(begin: int, end: int) -> None:
    if begin < end:
        assert _libc.munmap(begin, end - begin) == 0


def _rule(holds: bool, what: str) -> None:
    if not holds:
        raise Misuse(what)
