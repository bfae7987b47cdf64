"""CudaDriver: the calls of CUDA's driver that give addresses of a GPU memory and take it back, by ctypes.

Torch allocates in another way, so these are called beside it, from the library that it runs on (`libcuda`). CUDA's
driver API, section "Virtual Memory Management", describes them; a test holds what is declared here against its header.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any, Protocol

import torch
from torch import Tensor

from pagemill.errors import DriverError

LIBRARY = "libcuda.so.1"

SUCCESS = 0
MANAGES_ADDRESSES = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"""
PINNED = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED"""
ON_DEVICE = 1
"""CU_MEM_LOCATION_TYPE_DEVICE"""
READ_WRITE = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE"""
MINIMUM = 0
"""CU_MEM_ALLOC_GRANULARITY_MINIMUM"""


class Location(ctypes.Structure):
    """Is a CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocFlags(ctypes.Structure):
    """Is what a CUmemAllocationProp has as allocFlags."""

    _fields_ = (
        ("compressionType", c_ubyte),
        ("gpuDirectRDMACapable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class AllocationProp(ctypes.Structure):
    """Is a CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", Location),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", AllocFlags),
    )


class AccessDesc(ctypes.Structure):
    """Is a CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProp), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProp), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(AccessDesc), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
}
"""By name of a call, the types of its arguments. All return a CUresult, an int."""


class Driver(Protocol):
    """Gives addresses of one device memory, and takes it back. All sizes are bytes, and multiples of `granularity`. Its
    calls raise DriverError, and have done nothing then.

    where: the device, as torch names it.
    granularity: the least memory that is given and taken, in bytes.
    """

    where: torch.device
    granularity: int

    def reserve(self, nbytes: int) -> int:
        """Returns the first of so many addresses, which have no memory yet; a multiple of `granularity`."""

    def free(self, address: int, nbytes: int) -> None:
        """Gives back all that `reserve` gave. None of it may be mapped."""

    def create(self, nbytes: int) -> int:
        """Takes memory of the device. Returns a handle of it."""

    def release(self, handle: int) -> None:
        """Gives memory back, once it is not mapped any more."""

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Lets addresses have the memory of a handle, as a whole. Nobody may use them before they are opened."""

    def open(self, address: int, nbytes: int) -> None:
        """Lets the device read and write addresses that are mapped, of one handle or several side by side."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Takes the memory of one handle from addresses. The device may not use them any more, or is lost."""

    def tensor(self, address: int, nbytes: int, owner: object) -> Tensor:
        """Returns addresses, of which the first have memory, as a tensor uint8 [nbytes]. It holds `owner` as long as it
        or a view of it lives."""


class CudaDriver:
    """Implements `Driver` for a GPU of NVIDIA. Raises DriverError where its driver is not there, or cannot do it."""

    def __init__(self, where: torch.device, library: str = LIBRARY) -> None:
        self.where = where
        try:
            self._library = ctypes.CDLL(library)
            for name, arguments in PROTOTYPES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, c_int
        except (OSError, AttributeError) as error:  # no library, or one without these calls
            raise DriverError(f"CUDA's driver cannot be called ({error})") from error
        self._call("cuInit", 0)
        device, found = c_int(), c_int()
        self._call("cuDeviceGet", byref(device), where.index)
        self._call("cuDeviceGetAttribute", byref(found), MANAGES_ADDRESSES, device)
        if not found.value:
            raise DriverError(f"{where} has no virtual memory management, its driver says")
        location = Location(ON_DEVICE, device.value)
        self._memory = AllocationProp(type=PINNED, location=location)
        self._access = AccessDesc(location, READ_WRITE)
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._memory), MINIMUM)
        self.granularity = size.value

    def reserve(self, nbytes: int) -> int:
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), nbytes, self.granularity, 0, 0)
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> int:
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), nbytes, byref(self._memory), 0)
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def open(self, address: int, nbytes: int) -> None:
        self._call("cuMemSetAccess", address, nbytes, byref(self._access), 1)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def tensor(self, address: int, nbytes: int, owner: object) -> Tensor:
        try:
            tensor = torch.as_tensor(Addresses(address, nbytes, owner), device=self.where)
        except (RuntimeError, TypeError, ValueError) as error:
            raise DriverError(f"torch does not take {nbytes} bytes at {address:#x} of {self.where}: {error}") from error
        if tensor.data_ptr() != address:
            raise DriverError(
                f"torch copies {nbytes} bytes at {address:#x} of {self.where}, and does not use them there"
            )
        return tensor

    def _call(self, name: str, *arguments: Any) -> None:
        if (result := getattr(self._library, name)(*arguments)) != SUCCESS:
            sizes = [f"{argument:#x}" for argument in arguments if isinstance(argument, int)]
            raise DriverError(f"{name}({', '.join(sizes)}): {self._described(result)}")

    def _described(self, result: int) -> str:
        """Returns a result's name and what it means, as the driver words them."""
        words = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            if getattr(self._library, name)(result, byref(text)) == SUCCESS and text.value is not None:
                words.append(text.value.decode(errors="replace"))
        return ", ".join(words) or f"error {result}"


class Addresses:
    """Names addresses of a GPU for whoever takes them, by the CUDA Array Interface. It is held as long as they are
    used, and holds `owner`."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
