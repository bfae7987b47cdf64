"""Calls of CUDA's driver are made as its header declares them, and every error says which call it was, and why."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pagemill.errors import DriverError
from pagemill.kvcache import cuda_driver
from pagemill.kvcache.cuda_driver import PROTOTYPES, CudaDriver
from pagemill.kvcache.device_streams import CudaStreams

WHERE = torch.device("cuda", 3)
TYPES = {
    "unsigned int": ctypes.c_uint,
    "int": ctypes.c_int,
    "size_t": ctypes.c_size_t,
    "unsigned long long": ctypes.c_ulonglong,
    "char": ctypes.c_char,
    "CUresult": ctypes.c_int,
    "CUdevice": ctypes.c_int,
    "CUdevice_attribute": ctypes.c_int,
    "CUdeviceptr": ctypes.c_ulonglong,
    "CUmemGenericAllocationHandle": ctypes.c_ulonglong,
    "CUmemAllocationGranularity_flags": ctypes.c_int,
    "CUmemAllocationProp": cuda_driver.AllocationProp,
    "CUmemAccessDesc": cuda_driver.AccessDesc,
}
"""By CUDA's name, what ctypes passes. An enum is an int."""
CONSTANTS = {
    "CUDA_SUCCESS": cuda_driver.SUCCESS,
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": cuda_driver.MANAGES_ADDRESSES,
    "CU_MEM_ALLOCATION_TYPE_PINNED": cuda_driver.PINNED,
    "CU_MEM_LOCATION_TYPE_DEVICE": cuda_driver.ON_DEVICE,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": cuda_driver.READ_WRITE,
    "CU_MEM_ALLOC_GRANULARITY_MINIMUM": cuda_driver.MINIMUM,
}


@pytest.fixture(scope="session")
def header():
    """Returns the path of CUDA's header, which Triton brings."""
    spec = find_spec("triton")
    if spec is None or not (path := Path(spec.origin).parent / "backends/nvidia/include/cuda.h").exists():
        pytest.skip("no Triton, which brings CUDA's header")
    return path


@pytest.mark.parametrize("name", PROTOTYPES)
def test_arguments_are_those_of_the_header(header, name) -> None:
    """Exported names are those that are called: none of these has a second version, which a macro would name."""
    text = header.read_text()
    (arguments,) = re.findall(rf"^CUresult CUDAAPI {name}\(([^)]*)\);", text, re.MULTILINE)
    assert not re.search(rf"#\s*define\s+{name}\b", text)
    assert [passed(argument) for argument in arguments.split(",")] == [*PROTOTYPES[name]]


def passed(argument: str) -> type:
    """Returns what ctypes passes for an argument as C declares it."""
    kind, stars = re.fullmatch(r"(?:const )?(.+?) ?(\**)\w+", argument.strip()).groups()
    if (kind, stars) == ("char", "**"):
        return ctypes.POINTER(ctypes.c_char_p)
    return ctypes.POINTER(TYPES[kind]) if stars == "*" else TYPES[kind]


@pytest.mark.parametrize("name", CONSTANTS)
def test_numbers_are_those_of_the_header(header, name) -> None:
    (number,) = re.findall(rf"^\s*{name}\s*=\s*(\w+)", header.read_text(), re.MULTILINE)
    assert int(number, 0) == CONSTANTS[name]


@pytest.fixture(scope="session")
def library(header, tmp_path_factory):
    """Returns a library that stands for the driver, compiled against its header."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    made = tmp_path_factory.mktemp("stub") / "libstub.so"
    source = Path(__file__).with_name("stub_cuda.cpp")
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{header.parent}", str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    return made


@pytest.fixture
def use(library, tmp_path, monkeypatch):
    """Returns what uses the library: it returns how that was called. It prints to a file, and heeds variables."""
    log = tmp_path / "log"
    monkeypatch.setenv("STUB_LOG", str(log))

    def use() -> list[str]:
        driver = CudaDriver(WHERE, str(library))
        size = driver.granularity
        address = driver.reserve(5 * size)
        handle = driver.create(size)
        driver.map(address, size, handle)
        driver.open(address, size)
        driver.unmap(address, size)
        driver.release(handle)
        driver.free(address, 5 * size)
        return log.read_text().splitlines()

    return use


def test_arguments_arrive_as_c_reads_them(use) -> None:
    address, handle, size = "fedcba9800000000", "876543210fedcba9", "200000"
    memory = "pinned 1 handles 0 device 1 id 43 meta (nil) flags 0 0 0"
    assert use() == [
        "cuInit 0",
        f"cuMemGetAllocationGranularity minimum 1 {memory}",
        f"cuMemAddressReserve a00000 {size} 0 0",
        f"cuMemCreate {size} {memory} flags 0",
        f"cuMemMap {address} {size} 0 {handle} 0",
        f"cuMemSetAccess {address} {size} device 1 id 43 writes 1 1",
        f"cuMemUnmap {address} {size}",
        f"cuMemRelease {handle}",
        f"cuMemAddressFree {address} a00000",
    ]


@pytest.mark.parametrize("name", [name for name in PROTOTYPES if not name.startswith("cuGetError")])
def test_a_call_that_fails_is_named_with_its_sizes_and_the_drivers_reason(use, monkeypatch, name) -> None:
    monkeypatch.setenv("STUB_FAILS", name)
    sizes = {"cuMemCreate": "0x200000, 0x0", "cuMemUnmap": "0xfedcba9800000000, 0x200000"}.get(name, ".*")
    with pytest.raises(DriverError, match=rf"^{name}\({sizes}\): CUDA_ERROR_OUT_OF_MEMORY, out of memory$"):
        use()


def test_a_device_that_does_not_manage_addresses_is_refused(use, monkeypatch) -> None:
    monkeypatch.setenv("STUB_MANAGES", "0")
    with pytest.raises(DriverError, match="cuda:3 has no virtual memory management, its driver says"):
        use()


def test_a_torch_that_takes_no_addresses_is_an_error_with_a_type(library, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "log"))
    driver = CudaDriver(WHERE, str(library))
    monkeypatch.setattr(torch, "as_tensor", refuse)
    with pytest.raises(DriverError, match="torch does not take 8 bytes at 0x1000 of cuda:3: not registered"):
        driver.tensor(0x1000, 8, None)
    copy = torch.zeros(8, dtype=torch.uint8)
    monkeypatch.setattr(torch, "as_tensor", lambda addresses, device: copy)
    with pytest.raises(DriverError, match="torch copies 8 bytes at 0x1000"):
        driver.tensor(0x1000, 8, None)
    monkeypatch.setattr(torch, "as_tensor", lambda addresses, device: seen.append(addresses) or copy)
    seen, owner = [], object()
    assert driver.tensor(copy.data_ptr(), 8, owner) is copy
    assert seen[0].owner is owner
    interface = {"shape": (8,), "typestr": "|u1", "data": (copy.data_ptr(), False), "strides": None, "version": 3}
    assert seen[0].__cuda_array_interface__ == interface


def refuse(*_, **__):
    raise RuntimeError("not registered")


@pytest.mark.parametrize("name", ["libnot-there.so.1", "libc.so.6"])
def test_a_driver_that_is_not_there_is_an_error_with_a_type(name) -> None:
    with pytest.raises(DriverError, match=rf"CUDA's driver cannot be called \(.*{name.split('.')[0]}"):
        CudaDriver(WHERE, name)


@pytest.mark.parametrize("hip", ["6.4", None])
def test_a_gpu_without_one_says_so_in_one_line_and_once(monkeypatch, caplog, hip) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(CudaDriver.__init__, "__defaults__", ("libnot-there.so.1",))
    streams = CudaStreams(WHERE)
    assert streams.driver is None
    assert streams.driver is None
    (record,) = caplog.records
    why = "torch is made for ROCm, not for CUDA" if hip else "CUDA's driver cannot be called"
    assert record.getMessage().startswith(f"the KV pool on cuda:3 keeps its memory, and cannot grow: {why}")
