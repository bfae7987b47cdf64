"""Kernels compiled before the Python files changed are refused in one line that names the way out."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pagemill.config import EngineConfig
from pagemill.doctor import examine
from pagemill.engine.messages import Failure, Start
from pagemill.engine.queries import FromEngine
from pagemill.engine.wire import Channel
from pagemill.errors import StaleKernelsError
from pagemill.executor.load import open_executor
from pagemill.ops.prepare import check_compiled


def stale(**attributes: str) -> ModuleType:
    module = ModuleType("pagemill._kernels")
    vars(module).update(attributes)
    return module


def test_these_kernels_are_of_these_files() -> None:
    check_compiled()


@pytest.mark.parametrize("attributes", [{}, {"interface": "0" * 64}])
def test_kernels_of_other_files_are_refused(monkeypatch: pytest.MonkeyPatch, attributes: dict[str, str]) -> None:
    monkeypatch.setitem(sys.modules, "pagemill._kernels", stale(**attributes))
    with pytest.raises(StaleKernelsError, match="make build") as caught:
        open_executor(EngineConfig(model="no-such-model"))
    assert "\n" not in caught.value.message
    assert examine()["pagemill"]["kernels"] == f"not usable: {caught.value.message}"


def test_kernels_of_other_sources_are_refused(tmp_path: Path) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(Path(__file__).parents[2] / "csrc", csrc)
    check_compiled(csrc)
    with (csrc / "isa" / "simd.h").open("a") as header:
        header.write("// later\n")
    with pytest.raises(StaleKernelsError, match=r"have sources .*, the files in csrc .*make build"):
        check_compiled(csrc)


def test_the_engine_process_says_it_to_the_front_end() -> None:
    code = (
        "import sys, types; sys.modules['pagemill._kernels'] = types.ModuleType('pagemill._kernels'); "
        "from pagemill.engine.process import run; run(int(sys.argv[1]))"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel: Channel[FromEngine] = Channel(ours, FromEngine)
        channel.send(Start(EngineConfig(model="no-such-model")))
        process = subprocess.run(
            [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE
        )
        [fault] = channel.receive(block=True) or []
    assert isinstance(fault, Failure)
    assert (fault.error_type, process.returncode, process.stderr) == ("StaleKernelsError", 1, b"")
