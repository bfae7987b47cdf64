"""Runs a command for so many seconds at most, and tells what became of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

STOPPING_S = 20.0
"""Time to end in, after an interrupt."""
TAIL = 4000
"""Characters of stderr that are kept of a command that failed."""
MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


@dataclass(frozen=True)
class Outcome:
    """Holds what a command did. why: in a line, if it is not done. data: what it wrote for programs."""

    status: Literal["done", "failed", "stopped", "skipped", "not run"]
    why: str
    seconds: float
    printed: str = ""
    errors: str = ""
    data: Any = None
    exit_code: int = 0


def run_command(command: Sequence[str], seconds: float | None, *, shown: bool = False) -> Outcome:
    """Runs a command; interrupts it after `seconds` (None: never), and kills it when that does not end it.

    shown: what it prints goes to the terminal, and is not kept. "skipped" is one whose Python lacks a module.
    """
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        files = {} if shown else {"stdout": printed, "stderr": errors}
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # what was printed stays when it is killed
        process = subprocess.Popen(command, env=environment, **files)
        try:
            in_time = _ends_within(process, seconds)
            if not in_time:
                process.send_signal(signal.SIGINT)
                _ends_within(process, STOPPING_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        taken, said, wrong = time.monotonic() - begin, _read(printed), _read(errors)
    code = process.returncode
    if not in_time:
        return Outcome("stopped", f"it took more than {seconds:.0f} s", taken, said, wrong[-TAIL:], exit_code=code or 1)
    if code == 0:
        return Outcome("done", "", taken, said)
    if missing := MISSING.search(wrong):
        return Outcome("skipped", f"{missing[1]} is not installed", taken, said, exit_code=code)
    lines = [line for line in wrong.splitlines() if line.strip()]
    why = lines[-1] if lines else f"exit status {code}"
    return Outcome("failed", why, taken, said, wrong[-TAIL:], exit_code=code)


def _ends_within(process: subprocess.Popen[str], seconds: float | None) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
