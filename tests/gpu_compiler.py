"""Compiles Triton's kernels for GPUs that need not be there, as they would be launched, and prints what each takes:
registers per thread, bytes of stack (registers that were spilled), bytes of shared memory.

Scripts `compile*_for_gpus.py` beside the tests say what is launched, and call `main`; `compiled_by` runs one of them
in a process of its own: where TRITON_INTERPRET was set as triton was imported, nothing compiles.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

SHARED = {75: 64, 80: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory of a program by capability. 8.6 and 8.9 have less than 8.0, and take the same code."""
MOST_REGISTERS, STACK = 255, 40
"""The compiler spills a few bytes where fewer registers let another program run beside; where it has no more registers,
it must not spill."""

Case = TypeVar("Case")


def main(
    few: Sequence[tuple[int, Case]],
    usual: Callable[[int], Iterable[tuple[int, Case]]],
    launch: Callable[[int, Case], object],
    *,
    spills: Callable[[int, Case], int] = lambda capability, case: 0,
    check: Callable[[str], None] = lambda ptx: None,
) -> None:
    """Compiles what `launch` would start, and ends the process: with status 1 if a kernel comes out empty, takes more
    shared memory than the smallest GPU that runs its code has, spills for lack of registers, or multiplies tiles that
    Triton multiplies wrongly.

    The command line names capabilities (75 is 7.5), of which the `usual` cases are taken, or none: then the `few`.
    spills: bytes that a case may spill for all that. check: raises AssertionError for code that must not be.
    """
    capabilities = [int(argument) for argument in sys.argv[1:]]
    fits = True
    print("capability  kernel            registers  stack  shared  case")
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        for capability, case in [each for one in capabilities for each in usual(one)] if capabilities else few:
            for name, kernel in _compiled(capability, lambda at=capability, what=case: launch(at, what)):
                check(kernel.asm["ptx"])
                registers, stack, shared = _resources(kernel)
                nothing = "\ttrap;" in kernel.asm["ptx"]  # the compiler has found it without meaning
                limit = max(STACK if registers < MOST_REGISTERS else 0, spills(capability, case))
                over = nothing or stack > limit or shared > SHARED[capability] * 1024
                wrong = _multiplies_wrongly(kernel.asm["ttgir"])
                fits &= not over and not wrong
                said = f"{capability:10}  {name:16}  {registers:9}  {stack:5}  {shared:6}  {case}"
                print(said + "  <- too much" * over + "  <- rows of 64 bytes" * wrong, flush=True)
    sys.exit(not fits)


def compiled_by(script: Path) -> list[list[str]]:
    """Runs a script for its few cases. Returns capability, kernel, registers, stack and shared memory of each kernel.
    Raises AssertionError if one is too large."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split()[:5] for line in done.stdout.splitlines()[1:]]


def _compiled(capability: int, launch: Callable[[], object]) -> list[tuple[str, Any]]:
    """Returns the kernels that `launch` would start, compiled and not started; those that are started again, once."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    kernels = []
    target = GPUTarget("cuda", capability, 32)
    device = SimpleNamespace(
        get_current_device=lambda: capability, get_current_stream=lambda _: 0, get_current_target=lambda: target
    )
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **settings):
        name = self.__name__ + ("_in_chunks" if settings.get("IN_CHUNKS") else "")
        kernel = run(self, *arguments, grid=grid, warmup=True, **settings)
        if all(kernel is not known for _, known in kernels):
            kernels.append((name, kernel))

    triton.runtime.driver.set_active(device)
    with mock.patch.object(JITFunction, "run", compile_only):
        launch()
    return kernels


def _multiplies_wrongly(ttgir: str) -> bool:
    """Returns whether instructions of Hopper multiply tiles in shared memory whose rows have 64 bytes, as Triton 3.6
    and 3.7 do wrongly."""
    layouts = re.findall(r"^(#\w+) = #ttg\.nvmma_shared<\{swizzlingByteWidth = 64,", ttgir, re.MULTILINE)
    products = re.findall(r"ttng\.warp_group_dot .*", ttgir)
    return any(f"{layout}, #smem" in product for layout in layouts for product in products)


def _resources(kernel: Any) -> tuple[int, int, int]:
    """Returns registers per thread, bytes of stack and bytes of shared memory."""
    import triton

    dump = Path(triton.__file__).with_name("backends") / "nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [dump, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))
    return registers, stack, kernel.metadata.shared
