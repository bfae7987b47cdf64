"""Ranks: the other processes of a tensor-parallel model, as rank 0 sees them: it starts them, tells them what to do,
hears their answers, and ends them all when one is lost."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from pagemill.child_process import Child, start_child
from pagemill.config import EngineConfig
from pagemill.errors import RankLostError
from pagemill.executor.numa import Binding, bind_rank
from pagemill.executor.process_group import GroupExchange, Transport, host_meeting
from pagemill.executor.rank_messages import Connect, Start
from pagemill.executor.shared_memory import TIMEOUT_S, SharedExchange, make_memory

MODULE = "pagemill.executor.rank"
_LAST_WORDS_S = 2.0
"""Seconds in which a rank that has dropped its connection should end, so that its exit status is known."""
_LOOK_S = 0.01
_WATCH_S = 0.1
"""Ranks that are a group are looked after so often."""


class Rank(NamedTuple):
    child: Child
    control: Connection
    frames: Connection


class Ranks:
    """Starts the ranks 1, 2, … of a configuration, which begin to load. Errors of theirs are raised where their answers
    are waited for. Once one is lost, everything raises RankLostError, and none of them runs any more.

    transport: by which they exchange on devices that work by themselves; None: on CPUs.
    exchange: rank 0's, for use after `connect`. group: the same, if it is one; None if ranks share memory.
    told: how many messages have been sent that do not come beside the steps.
    """

    def __init__(self, config: EngineConfig, num_threads: int, transport: Transport | None = None) -> None:
        size = config.tensor_parallel_size
        self.told = 0
        self._waiting_until_s: float | None = None
        self._closed = threading.Event()
        self.exchange: SharedExchange | GroupExchange
        self.group: GroupExchange | None = None
        self._begun_s = time.monotonic()
        self._lost: RankLostError | None = None
        self._losing = threading.Lock()
        self._frames = threading.Lock()
        """Held by whoever speaks on the `frames` connections."""
        self._ranks: list[Rank] = []
        self._binding: Binding | None = None
        """Undoes that this thread is bound to rank 0's cores; None: it is not."""
        shared, self._store = None, None
        if sys.platform == "linux" and transport is None:
            shared = make_memory()
        else:
            self.exchange = self.group = GroupExchange(0, size, transport or "gloo")
            self._store = host_meeting()
        try:
            if shared is not None:
                self.exchange = SharedExchange(0, size, os.dup(shared), self._check_running)
            for _ in range(1, size):
                self._ranks.append(start_rank(shared))
            port = None if self._store is None else self._store.port
            for number, rank in enumerate(self._ranks, start=1):
                start = Start(config, number, port, num_threads, transport or "gloo", transport is not None)
                rank.control.send(start)
            if transport is None:
                self._binding = bind_rank(0, size, num_threads)
        except BaseException:
            self.close()
            raise
        finally:
            if shared is not None:
                os.close(shared)

    def __len__(self) -> int:
        """Returns how many there are beside rank 0."""
        return len(self._ranks)

    def connect(self) -> list[str]:
        """Waits until all have loaded, and connects them with rank 0's exchange, which has loaded its own part. Returns
        the name of the attention of each. Raises what kept one from loading."""
        until_s = time.monotonic() + TIMEOUT_S + (time.monotonic() - self._begun_s)
        for rank in self._ranks:
            if not rank.control.poll(max(0.0, until_s - time.monotonic())):
                raise self.lose(_no_answer())
        attention = self.answers()
        if self.group is None:
            return attention
        threading.Thread(target=self._watch, daemon=True, name="ranks").start()
        self.send(Connect())
        try:
            with self.waiting():
                self.group.connect(self._store)
        except RuntimeError as error:
            raise self.lose(error) from error
        self.answers()
        return attention

    def send(self, message: Any) -> None:
        """Sends a message to all."""
        self.told += 1
        self._speak([rank.control for rank in self._ranks], [message] * len(self))

    @contextmanager
    def waiting(self, limit_s: float | None = None) -> Iterator[None]:
        """Holds while the thread that sends may wait for work of a device that other ranks take part in: such a wait
        ends by itself only if they come. So a group is watched: if a rank ends, or the wait takes too long, the ranks
        are lost, and what was waited for raises or brings nothing. limit_s: None for TIMEOUT_S."""
        outermost = self._waiting_until_s is None
        if outermost:
            self._waiting_until_s = time.monotonic() + (TIMEOUT_S if limit_s is None else limit_s)
        try:
            yield
        finally:
            if outermost:
                self._waiting_until_s = None

    def _watch(self) -> None:
        while not self._closed.wait(_WATCH_S):
            until_s = self._waiting_until_s
            try:
                self._check_running()
                if until_s is not None and time.monotonic() > until_s:
                    raise TimeoutError("no answer came in time")
            except (RuntimeError, TimeoutError) as error:
                self.lose(error)
                return

    def answers(self) -> list[Any]:
        """Waits for an answer of each to the last message. Raises the first that is an error, when all have come."""
        return self._hear([rank.control for rank in self._ranks])

    def ask(self, message: Any) -> list[Any]:
        """Sends a message to all, and returns their answers."""
        self.send(message)
        return self.answers()

    def ask_frames(self, messages: Sequence[Any]) -> list[Any]:
        """Asks each for frames, beside what it does otherwise, and returns their answers. Any thread may call it."""
        connections = [rank.frames for rank in self._ranks]
        with self._frames:
            self._speak(connections, messages)
            return self._hear(connections)

    def _speak(self, connections: Sequence[Connection], messages: Sequence[Any]) -> None:
        self.check()
        try:
            for connection, message in zip(connections, messages, strict=True):
                connection.send(message)
        except BaseException as error:
            raise self._broken(error) from error

    def _hear(self, connections: Sequence[Connection]) -> list[Any]:
        self.check()
        try:
            answers = [connection.recv() for connection in connections]
        except BaseException as error:
            raise self._broken(error) from error
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _broken(self, error: BaseException) -> BaseException:
        """Ends all ranks, since a message was cut off. Returns what to raise: an interrupt stays one."""
        lost = self.lose(error)
        return lost if isinstance(error, Exception) else error

    def check(self) -> None:
        """Raises RankLostError if a rank is lost."""
        if self._lost is not None:
            raise self._lost

    def _check_running(self) -> None:
        """Raises RuntimeError if a rank has ended."""
        for number, rank in enumerate(self._ranks, start=1):
            if rank.child.process.poll() is not None:
                raise RuntimeError(f"rank {number} has ended")

    def lose(self, error: BaseException) -> RankLostError:
        """Ends all ranks, since they no longer do the same, and returns what happened to them. Any thread may call it.

        Connections stay open until `close`: another thread may wait at one, and hears of the end there.
        """
        with self._losing:
            if self._lost is None:
                try:
                    self._lost = RankLostError(f"{self._what_happened(error)}; start a new one")
                finally:
                    self._end()
            return self._lost

    def _what_happened(self, error: BaseException) -> str:
        """Returns which rank has ended, and how; or which is stopped; or what went wrong in the exchange with them."""
        until_s = time.monotonic() + (_LAST_WORDS_S if isinstance(error, Exception) else 0.0)
        while True:
            for number, rank in enumerate(self._ranks, start=1):
                if (status := rank.child.process.poll()) is not None:
                    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended ({status})"
                    return f"rank {number} of {len(self) + 1} {how}, and a model in parts needs them all"
            for number, rank in enumerate(self._ranks, start=1):
                if _is_stopped(rank.child.process.pid):
                    return (
                        f"rank {number} of {len(self) + 1} is stopped (SIGSTOP, or a debugger) and did not come for "
                        f"{TIMEOUT_S:g} s, and a model in parts needs them all"
                    )
            if time.monotonic() >= until_s:
                break
            time.sleep(_LOOK_S)
        if isinstance(error, BlockingIOError):
            error = _no_answer()
        return f"ranks lost one another: {type(error).__name__}: {error}"

    def close(self) -> None:
        """Ends all of them now. They hold nothing that needs saving."""
        self._closed.set()
        self._end()  # first: whoever waits for an answer hears of the end, and lets go of the connections
        with self._frames:
            for rank in self._ranks:
                rank.control.close()
                rank.frames.close()

    def _end(self) -> None:
        for rank in self._ranks:
            rank.child.end()
        if self.group is not None:
            self.group.abort()
        if self._binding is not None:
            self._binding.undo()


def start_rank(shared: int | None) -> Rank:
    """Starts a rank's process. shared: descriptor of the memory that all share."""
    child = start_child(MODULE)
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(child.socket, [b"f"], [theirs.fileno(), *([] if shared is None else [shared])])
        for end in (child.socket, ours):
            limit_waits(end)
        return Rank(child, Connection(child.socket.detach()), Connection(ours.detach()))
    except BaseException:
        child.end()
        raise


def limit_waits(end: socket.socket) -> None:
    """Lets nobody wait at a socket for longer than TIMEOUT_S: reading and writing then raise BlockingIOError."""
    limit = struct.pack("@ll", int(TIMEOUT_S), int(TIMEOUT_S % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, limit)


def _is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped, where Linux says so (proc_pid_stat(5): T or t)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _no_answer() -> TimeoutError:
    return TimeoutError(f"no answer came for {TIMEOUT_S:g} s")
