"""An engine process started ahead of its use is the one that is used, and none outlives the front end."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from pagemill.child_process import start_child
from pagemill.frontend.spawn import ENGINE, spawn, spawn_ahead


def test_the_process_started_ahead_is_taken_once():
    spawn_ahead()
    spawn_ahead()
    ahead = {child.pid for child in psutil.Process().children()}
    first, second = spawn(), spawn()
    try:
        assert first.process.pid in ahead
        assert second.process.pid not in ahead
        assert first.process.poll() is None
    finally:
        first.end()
        second.end()
    assert first.process.returncode == second.process.returncode == -9


def test_a_child_stands_back_behind_this_process():
    child = start_child(ENGINE, niceness=3)
    try:
        assert os.getpriority(os.PRIO_PROCESS, child.process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 3
        session = Path(f"/proc/{child.process.pid}/autogroup")
        if session.exists():
            assert session.read_text().split()[-1] == "3"
    finally:
        child.end()


def test_one_that_nobody_took_ends_with_the_interpreter():
    code = (
        "from pagemill.frontend import spawn; import sys; spawn.spawn_ahead(); "
        "print(spawn._ahead[0].process.pid, 'typer' in sys.modules, 'asyncio' in sys.modules)"
    )
    pid, *heavy = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert heavy == ["False", "False"]
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")
