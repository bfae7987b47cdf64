"""A fleet on this machine alone: a Ray cluster that begins and ends with the command, and comes again if it dies.

Ray starts again what dies within it: replicas, the front end, its own controller. Where the cluster itself dies (its
raylet, or the process that started it), everything that is left of it is ended, and another is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import secrets
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from pagemill.child_process import Child, start_child
from pagemill.distributed.driver import Said
from pagemill.distributed.plan import FleetPlan
from pagemill.errors import EngineDeadError
from pagemill.frontend.supervisor import RestartLimits

LOGGER = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36
SHUTDOWN_S = 20.0
"""Seconds, beside those in which answers may go on, after which what has not ended is killed."""
LOG_BYTES = 1 << 16

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
"""Variables by which Ray sends nothing home, and is silent about what whoever serves a model need not know."""


IGNORED = ("SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that mean something to a single engine's server, and end a process that does not expect them."""


def serve_fleet(plan: FleetPlan, restarts: RestartLimits, on_ready: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM. A second signal ends answers that are under way.

    on_ready: is called with what the engines are, once requests are answered; not when another cluster takes the place
    of one that has died. Raises `EngineDeadError` where the first does not start, or too many have died.
    """
    os.environ.update(ENVIRONMENT, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    _adopt_orphans()
    signals = _Signals()
    begun_s: deque[float] = deque()
    with _folder() as folder, signals, _log_pipe(Path(folder, "log")) as log_path:
        plan = replace(plan, log_path=log_path)
        first = True
        try:
            while not signals.count:
                why = _live_once(plan, folder, signals, on_ready if first else None)
                _end_descendants()
                if signals.count:
                    return
                first = False
                _check_restarts(begun_s, restarts, why)
        finally:
            _end_descendants()


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder for what Ray writes, which goes with it.

    Its path is short, whatever TMPDIR says: it holds sockets, whose paths Linux limits to 107 bytes.
    """
    return tempfile.TemporaryDirectory(prefix="pagemill-", dir="/tmp", ignore_cleanup_errors=True)


def _check_restarts(begun_s: deque[float], limits: RestartLimits, why: str) -> None:
    """Notes another start. Raises `EngineDeadError` where there have been too many."""
    now = time.monotonic()
    while begun_s and now - begun_s[0] > limits.engine_restart_window_s:
        begun_s.popleft()
    if len(begun_s) >= limits.max_engine_restarts:
        raise EngineDeadError(f"{why}; it is not started once more (max_engine_restarts)")
    begun_s.append(now)
    LOGGER.error("%s; another is being started", why)


def _live_once(plan: FleetPlan, folder: str, signals: _Signals, on_ready: Callable[[str], None] | None) -> str:
    """Runs one cluster until a signal, or until it dies; then returns what became of it.

    Raises `EngineDeadError` where the first one, whose `on_ready` is given, does not become ready.
    """
    driver = start_child("pagemill.distributed.driver", 0)
    with driver.socket.makefile("rwb") as stream:
        pickle.dump((plan, folder), stream)
        stream.flush()
        if signals.wait(driver.socket):
            return ""  # nobody is served yet, and the driver is busy: it is killed
        said = _read(stream)
        if said is None or said.error is not None:
            why = "the Ray cluster is gone" if said is None else _last_line(said.error or "")
            if on_ready is not None:
                raise EngineDeadError(f"the replicas could not be started: {why}")
            return why
        if on_ready is not None:
            on_ready(said.description or "")
        else:
            LOGGER.warning("the replicas run again")
        if not signals.wait(driver.socket):
            return "the Ray cluster of this machine is gone"
        with contextlib.suppress(OSError):
            stream.write(b"stop\n")
            stream.flush()
        _await_end(driver, signals, plan.limits.drain_timeout + SHUTDOWN_S)
    return ""


def _await_end(driver: Child, signals: _Signals, timeout_s: float) -> None:
    """Waits until a driver has ended, but no longer than this, and not after a second signal."""
    deadline = time.monotonic() + timeout_s
    while driver.process.poll() is None and signals.count < 2 and time.monotonic() < deadline:
        time.sleep(0.05)


def _read(stream: object) -> Said | None:
    """Returns what a driver has said; None if it is gone."""
    try:
        said: Said = pickle.load(stream)  # type: ignore[arg-type]
    except (EOFError, OSError, pickle.UnpicklingError):
        return None
    return said


def _last_line(text: str) -> str:
    """Returns the last line of an error of Ray, which is what the replica raised."""
    return [line for line in text.strip().splitlines() if line.strip()][-1].strip()


class _Signals:
    """Counts the signals to stop, and wakes up who waits. Others that a server knows are logged, and do nothing."""

    def __init__(self) -> None:
        self.count = 0
        self._ignored: list[int] = []
        self._wake, self._woken = socket.socketpair()

    def __enter__(self) -> None:
        self._before = {each: signal.signal(each, self._note) for each in (signal.SIGINT, signal.SIGTERM)}
        for each in (getattr(signal, name) for name in IGNORED):
            self._before[each] = signal.signal(each, self._ignore)

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._wake.close()
        self._woken.close()

    def wait(self, sock: socket.socket) -> bool:
        """Waits until a socket has something to read, or a signal to stop has come. Returns whether one has."""
        readable: list[socket.socket] = []
        while not self.count and sock not in readable:
            readable, *_ = select.select([sock, self._woken], [], [])
            if self._woken in readable:
                self._woken.recv(64)
            while self._ignored:  # logged here: a handler may come in the middle of a line
                name = signal.Signals(self._ignored.pop(0)).name
                LOGGER.warning("%s does nothing in a server of several replicas", name)
        return self.count > 0

    def _note(self, *_: object) -> None:
        self.count += 1
        self._wake.send(b"\0")

    def _ignore(self, number: int, _: object) -> None:
        self._ignored.append(number)
        self._wake.send(b"\0")


@contextlib.contextmanager
def _log_pipe(path: Path) -> Iterator[str]:
    """Gives a pipe's path; what is written to it appears on this process's stderr."""
    os.mkfifo(path, 0o600)
    descriptor = os.open(path, os.O_RDWR)

    def copy() -> None:
        while (data := os.read(descriptor, LOG_BYTES)) != b"\0":
            os.write(sys.stderr.fileno(), data)

    thread = threading.Thread(target=copy, name="log", daemon=True)
    thread.start()
    try:
        yield str(path)
    finally:
        time.sleep(0.05)  # what has just been written stands alone in the pipe, and the end behind it
        os.write(descriptor, b"\0")
        thread.join(1.0)
        os.close(descriptor)


def _adopt_orphans() -> None:
    """Makes processes whose parent dies children of this one, so that none is left behind."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_descendants() -> None:
    """Kills all processes that come from this one, and waits for them."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = _descendants()
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _descendants() -> list[int]:
    """Returns the ids of all processes that come from this one, as Linux lists them."""
    children: dict[int, list[int]] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(place.name))
    found, left = [], [os.getpid()]
    while left:
        left += (its := children.get(left.pop(), []))
        found += its
    return found
