"""Kernels that are started without Triton's own launch are those that it would start."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch

from interpreter import DEVICE

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.jit import native_specialize_impl

from pagemill.ops.triton_kernels import gate
from pagemill.triton_launch import KNOWN, Launcher, kinds_of, launcher

BYTES = torch.zeros(256, dtype=torch.uint8)
TENSORS = [BYTES[begin : begin + 32].view(dtype) for begin in (0, 8, 16) for dtype in (torch.int32, torch.float16)]
INTEGERS = [
    base + more
    for base in (-(1 << 63), -(1 << 31), 0, 1 << 31, 1 << 32, (1 << 63) - 32)
    for more in (0, 1, 2, 15, 16, 17)
] + [-1, -16, (1 << 31) - 1, (1 << 31) - 16, -(1 << 31) - 1, (1 << 63) - 1, 1 << 63]


class Compiled(CompiledKernel):
    """Stands in for a compiled kernel, and notes what it is started with."""

    def __init__(self) -> None:
        self.started: list[tuple[object, ...]] = []

    def __getitem__(self, grid: object) -> object:
        return lambda *arguments: self.started.append((grid, *arguments))


class Kernel:
    """Stands in for a kernel that Triton compiles, and notes what Triton starts."""

    __name__ = "kernel"
    arg_names = ("x", "y", "size", "FIRST", "SECOND")

    def __init__(self) -> None:
        self.arg_names = [*self.arg_names]
        self.started: list[tuple[object, ...]] = []
        self.devices: list[int] = []
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: object) -> object:
        def start(*arguments: object, **constants: object) -> Compiled:
            self.started.append((grid, *arguments, constants))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return start


def test_what_triton_compiles_different_code_for_has_different_kinds() -> None:
    backend = make_backend(GPUTarget("cuda", 90, 32))

    def specialized(value: object, specialize: bool, align: bool) -> object:
        return native_specialize_impl(backend, value, False, specialize, align)

    told_apart = 0
    for a, b in itertools.combinations([None, True, False, 0.5, 16.0, *TENSORS, *INTEGERS], 2):
        ways = itertools.product((False, True), repeat=2)
        if any(specialized(a, *way) != specialized(b, *way) for way in ways):
            told_apart += 1
            assert kinds_of([a])[0] != kinds_of([b])[0], (a, b)
    assert told_apart > 500


def test_what_is_alike_for_triton_is_looked_up_alike() -> None:
    for a, b in ((2, 3), (16, 32), (0, 48), (0.5, 2.0), (TENSORS[0], TENSORS[4])):
        assert kinds_of([a])[0] == kinds_of([b])[0]


def test_a_parameter_of_a_module_is_a_tensor_like_any() -> None:
    parameter = torch.nn.Parameter(torch.zeros(64))
    assert kinds_of([parameter])[0] == kinds_of([parameter.detach()])[0]


@pytest.mark.parametrize("argument", ["16", torch.float32, (1, 2)])
def test_other_arguments_are_refused(argument: object) -> None:
    with pytest.raises(TypeError, match="kernels take tensors"):
        kinds_of([argument])


def test_constants_that_are_not_the_last_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['y', 'SECOND'\] are not the last parameters of kernel"):
        Launcher(Kernel(), y=1, SECOND=2)


@pytest.mark.skipif(not KNOWN, reason="this Triton starts all kernels itself")
def test_a_compiled_kernel_is_started_again_with_addresses_and_constants() -> None:
    kernel, (x, y) = Kernel(), TENSORS[:2]
    start = Launcher(kernel, SECOND="b", FIRST="a", num_warps=8)
    start((1, 2, 3), x, None, 17)
    assert kernel.started == [((1, 2, 3), x, None, 17, {"SECOND": "b", "FIRST": "a", "num_warps": 8})]
    start((4, 5, 6), TENSORS[4], None, 19)
    assert len(kernel.started) == 1
    assert kernel.compiled[0].started == [((4, 5, 6), TENSORS[4].data_ptr(), None, 19, "a", "b")]
    for other in ((x, y, 17), (TENSORS[2], None, 17), (x, None, 16), (x, None, 1), (y, None, 17)):
        before = len(kernel.started)
        start((1, 1, 1), *other)
        assert len(kernel.started) == before + 1, other
    assert len(kernel.compiled[0].started) == 1


def test_launchers_are_the_same_for_the_same_constants_only() -> None:
    kernel = Kernel()
    assert launcher(kernel, FIRST=1, SECOND=2) is launcher(kernel, FIRST=1, SECOND=2)
    assert launcher(kernel, FIRST=1, SECOND=2) is not launcher(kernel, FIRST=True, SECOND=2)


def test_kernels_start_on_the_device_of_their_first_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def on(device: int) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Noting(Kernel):
        def __getitem__(self, grid: object) -> object:
            self.devices.append(current[-1])
            return super().__getitem__(grid)

    kernel, start_of = Noting(), [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: start_of[-1])
    start = Launcher(kernel, FIRST=1, SECOND=2)
    for device in (0, 1, 0, 1):
        start_of.append(device)
        start((1, 1, 1), TENSORS[0], None, 3)
    assert kernel.devices == ([0, 1] if KNOWN else [0, 1, 0, 1]), "each device loads a kernel of its own"
    if KNOWN:
        assert [len(compiled.started) for compiled in kernel.compiled] == [1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_results_are_those_of_tritons_launch(dtype: torch.dtype) -> None:
    """Starts in turn what is aligned and what is not, and rows of 1, 16 and 17 elements, each of them twice."""
    constants = {"GELU": False, "BLOCK": 32, "EARLY": False, "enable_fp_fusion": False}
    start = Launcher(gate, **constants)
    numbers = torch.randn(4000, dtype=dtype, device=DEVICE)
    cases = [
        (numbers[begin : begin + 3 * 2 * size].view(3, 2 * size), size) for begin in (0, 1, 8) for size in (1, 16, 17)
    ]
    expected = []
    for x, size in cases:
        expected.append(torch.zeros(3, size, dtype=dtype, device=DEVICE))
        gate[3, 1](x, expected[-1], size, x.stride(0), **constants)
    for again in range(2):
        if again and DEVICE == "cuda" and KNOWN:
            start.kernel = None  # Triton's launch is not asked any more
        for (x, size), result in zip(cases, expected, strict=True):
            y = torch.zeros(3, size, dtype=dtype, device=DEVICE)
            start((3, 1, 1), x, y, size, x.stride(0))
            assert torch.equal(y, result)
