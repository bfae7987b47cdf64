"""A fleet on this machine alone: a front end and a Ray cluster that begin and end with the command.

Ray starts again what dies within it: replicas, its own controller. Where the cluster itself dies (its raylet, its GCS,
or the process that started it), what is left of it is ended, and another is started, while the front end lets requests
wait. Where the front end dies, another is started. It listens on a socket of this process, so new connections wait.
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
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagemill.child_process import start_child
from pagemill.distributed.driver import RELAY, Said
from pagemill.distributed.log_pipe import log_pipe
from pagemill.distributed.plan import FleetPlan
from pagemill.errors import EngineDeadError
from pagemill.frontend.supervisor import RestartLimits

LOGGER = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36
SHUTDOWN_S = 20.0
"""Seconds, beside those in which answers may go on and blocks are written to disk, after which what has not ended is
killed."""

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

    on_ready: is called with what the engines are, once requests are answered; not when others take the place of what
    has died. Raises `EngineDeadError` where the first do not start, or too many have died.
    """
    os.environ.update(ENVIRONMENT, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    _adopt_orphans()
    signals = _Signals()
    with _folder() as folder, signals, log_pipe(Path(folder, "log")) as log_path, _listening(plan) as sock:
        cluster = _Cluster(replace(plan, log_path=log_path), folder)
        front_end = _FrontEnd(plan, folder, sock)
        try:
            _live(cluster, front_end, signals, restarts, on_ready)
            sock.close()
            front_end.stop(signals, plan.limits.drain_timeout + SHUTDOWN_S)
            cluster.stop(signals, plan.keeping_s() + SHUTDOWN_S)
        finally:
            _end_descendants()


def _live(
    cluster: _Cluster, front_end: _FrontEnd, signals: _Signals, restarts: RestartLimits, on_ready: Callable[[str], None]
) -> None:
    """Keeps both parts running until a signal."""
    parts, begun_s, first = (cluster, front_end), deque[float](), True
    for part in parts:
        part.begin()
    while sockets := signals.wait([part.channel for part in parts]):
        for part in parts:
            if part.channel not in sockets:
                continue
            died = part.listen()
            if died is not None:
                if first:
                    raise EngineDeadError(f"the replicas could not be started: {died}")
                _check_restarts(begun_s, restarts, died)
                part.end(but=[each.pid for each in parts if each is not part])
                part.begin()
            elif not first:
                LOGGER.warning("%s again", part.runs)
        if first and cluster.description is not None and front_end.description is not None:
            on_ready(front_end.description)
            first = False


def _listening(plan: FleetPlan) -> socket.socket:
    """Returns the socket of the plan's address."""
    assert plan.address is not None
    family, *_ = socket.getaddrinfo(*plan.address, type=socket.SOCK_STREAM)[0]
    return socket.create_server(plan.address, family=family)


class _Part(ABC):
    """A child process that says when it is ready, and is started again where it dies."""

    module: str
    """Names the module that `start_child` runs."""
    gone: str
    """Says what is gone, where it has died without a word."""
    runs: str
    """Says that it runs again."""
    killed: str
    """Says what is killed, where it has not ended in time."""

    def __init__(self) -> None:
        self.description: str | None = None
        """Says what the engines are, as the process has told; None until it is ready."""

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def channel(self) -> socket.socket:
        return self._child.socket

    def begin(self) -> None:
        """Starts the process."""
        self.description = None
        self._child = start_child(self.module, 0)
        self._stream = self._child.socket.makefile("rwb")
        with contextlib.suppress(OSError):  # it has died already, which is seen where it is listened to
            self._send_plan(self._child.socket, self._stream)
            self._stream.flush()

    def listen(self) -> str | None:
        """Takes what the process has said. Returns why it is gone; None while it is not."""
        try:
            said: Said = pickle.load(self._stream)
        except (EOFError, OSError, pickle.UnpicklingError):
            return self.gone
        if said.error is not None:
            return _last_line(said.error)
        self.description = said.description
        return None

    def stop(self, signals: _Signals, timeout_s: float) -> None:
        """Asks the process for its end and waits for that, but no longer than this, and not after a second signal. Logs
        that it is about to be killed otherwise.

        Does nothing with one that is not ready: it may be busy, and nobody is served by it.
        """
        if self.description is None:
            return
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):
            self._stream.write(b"stop\n")
            self._stream.flush()
        while self._child.process.poll() is None and signals.count < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._child.process.poll() is None:
            LOGGER.warning("%s", self.killed)

    @abstractmethod
    def end(self, but: Collection[int]) -> None:
        """Kills what is left of a process that has died or is about to. but: processes of others."""

    @abstractmethod
    def _send_plan(self, sock: socket.socket, stream: Any) -> None:
        """Tells a process that has just been started what it is to do."""


class _Cluster(_Part):
    """The Ray cluster, with the engines, and the process that starts it."""

    module = "pagemill.distributed.driver"
    gone = "the Ray cluster of this machine is gone"
    runs = "the replicas run"
    killed = "the replicas have not ended in time and are killed; blocks that they had not yet written to disk are lost"

    def __init__(self, plan: FleetPlan, folder: str) -> None:
        super().__init__()
        self._plan, self._folder = plan, folder

    def end(self, but: Collection[int]) -> None:
        _end_descendants(but)

    def _send_plan(self, sock: socket.socket, stream: Any) -> None:
        pickle.dump((self._plan, self._folder), stream)


class _FrontEnd(_Part):
    """The process that answers requests, on a socket of this process."""

    module = "pagemill.distributed.listening_front_end"
    gone = "the front end is gone"
    runs = "the front end runs"
    killed = "the front end has not ended in time and is killed"

    def __init__(self, plan: FleetPlan, folder: str, listening: socket.socket) -> None:
        super().__init__()
        self._plan, self._folder, self._listening = plan, folder, listening

    def end(self, but: Collection[int]) -> None:
        self._child.end()

    def _send_plan(self, sock: socket.socket, stream: Any) -> None:
        socket.send_fds(sock, [b"\0"], [self._listening.fileno()])
        pickle.dump((self._plan, str(Path(self._folder, RELAY))), stream)


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder for what Ray writes, which goes with it.

    Its path is short, whatever TMPDIR says: it holds sockets, whose paths Linux limits to 107 bytes.
    """
    return tempfile.TemporaryDirectory(prefix="pagemill-", dir="/tmp", ignore_cleanup_errors=True)


def _check_restarts(begun_s: deque[float], limits: RestartLimits, why: str) -> None:
    """Notes another start. Raises `EngineDeadError` where there have been too many."""
    now = time.monotonic()
    if (refusal := limits.refusal(begun_s, now)) is not None:
        raise EngineDeadError(f"{why}; {refusal}")
    begun_s.append(now)
    LOGGER.error("%s; another is being started", why)


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

    def wait(self, sockets: list[socket.socket]) -> list[socket.socket]:
        """Waits until sockets have something to read, and returns these; none once a signal to stop has come."""
        readable: list[socket.socket] = []
        while not self.count and not readable:
            readable, *_ = select.select([*sockets, self._woken], [], [])
            if self._woken in readable:
                readable.remove(self._woken)
                self._woken.recv(64)
            while self._ignored:  # logged here: a handler may come in the middle of a line
                name = signal.Signals(self._ignored.pop(0)).name
                LOGGER.warning("%s does nothing in a server of several replicas", name)
        return [] if self.count else readable

    def _note(self, *_: object) -> None:
        self.count += 1
        self._wake.send(b"\0")

    def _ignore(self, number: int, _: object) -> None:
        self._ignored.append(number)
        self._wake.send(b"\0")


def _adopt_orphans() -> None:
    """Makes processes whose parent dies children of this one, so that none is left behind."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_descendants(but: Collection[int] = ()) -> None:
    """Kills all processes that come from this one, but for these children and theirs, and waits for them."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = _descendants(but)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _descendants(but: Collection[int] = ()) -> list[int]:
    """Returns the ids of all processes that come from this one, as Linux lists them, without these and their own."""
    children: dict[int, list[int]] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(place.name))
    found, left = [], [os.getpid()]
    while left:
        left += (its := [pid for pid in children.get(left.pop(), []) if pid not in but])
        found += its
    return found
