"""Ranks: the other processes of a tensor-parallel model, as rank 0 sees them: it starts them, tells them what to do,
hears their answers, and ends them all when one is lost."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from pagemill.child_process import Child, start_child
from pagemill.config import EngineConfig
from pagemill.errors import RankLostError
from pagemill.executor.gloo import GlooExchange, host_meeting
from pagemill.executor.rank_messages import Connect, Start
from pagemill.executor.shared_memory import SharedExchange, make_memory

MODULE = "pagemill.executor.rank"
_LAST_WORDS_S = 2.0
"""Seconds in which a rank that has dropped its connection should end, so that its exit status is known."""
_LOOK_S = 0.01


class Rank(NamedTuple):
    child: Child
    control: Connection
    frames: Connection


class Ranks:
    """Starts the ranks 1, 2, … of a configuration, which begin to load. Errors of theirs are raised where their answers
    are waited for. Once one is lost, everything raises RankLostError, and none of them runs any more.

    exchange: rank 0's, for use after `connect`.
    """

    def __init__(self, config: EngineConfig, num_threads: int) -> None:
        size = config.tensor_parallel_size
        self.exchange: SharedExchange | GlooExchange
        shared, self._store = None, None
        if sys.platform == "linux":
            shared = make_memory()
        else:
            self.exchange, self._store = GlooExchange(0, size), host_meeting()
        self._lost: RankLostError | None = None
        self._lock = threading.Lock()
        """Held by whoever speaks on the `frames` connections."""
        self._ranks = [_start(shared) for _ in range(1, size)]
        if shared is not None:
            self.exchange = SharedExchange(0, size, shared, self._check_running)
        port = None if self._store is None else self._store.port
        for number, rank in enumerate(self._ranks, start=1):
            rank.control.send(Start(config, number, port, num_threads))

    def __len__(self) -> int:
        """Returns how many there are beside rank 0."""
        return len(self._ranks)

    @property
    def pids(self) -> list[int]:
        return [rank.child.process.pid for rank in self._ranks]

    def connect(self) -> None:
        """Waits until all have loaded, and connects them with rank 0's exchange. Raises what kept one from loading."""
        self.answers()
        if not isinstance(self.exchange, GlooExchange):
            return
        self.send(Connect())
        try:
            self.exchange.connect(self._store)
        except RuntimeError as error:
            raise self.lose(error) from error
        self.answers()

    def send(self, message: Any) -> None:
        """Sends a message to all."""
        self._speak([rank.control for rank in self._ranks], [message] * len(self))

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
        with self._lock:
            self._speak(connections, messages)
            return self._hear(connections)

    def _speak(self, connections: Sequence[Connection], messages: Sequence[Any]) -> None:
        self.check()
        try:
            for connection, message in zip(connections, messages, strict=True):
                connection.send(message)
        except OSError as error:
            raise self.lose(error) from error

    def _hear(self, connections: Sequence[Connection]) -> list[Any]:
        self.check()
        try:
            answers = [connection.recv() for connection in connections]
        except (EOFError, OSError) as error:
            raise self.lose(error) from error
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

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
        """Ends all ranks, since they no longer do the same, and returns what happened to them."""
        if self._lost is None:
            self._lost = RankLostError(f"{self._what_happened(error)}; start a new one")
            self.close()
        return self._lost

    def _what_happened(self, error: BaseException) -> str:
        """Returns which rank has ended, and how; if none has, what went wrong in the exchange with them."""
        until_s = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < until_s:
            for number, rank in enumerate(self._ranks, start=1):
                if (status := rank.child.process.poll()) is not None:
                    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended ({status})"
                    return f"rank {number} of {len(self) + 1} {how}, and a model in parts needs them all"
            time.sleep(_LOOK_S)
        return f"ranks lost one another: {type(error).__name__}: {error}"

    def close(self) -> None:
        """Ends all of them now. They hold nothing that needs saving."""
        for rank in self._ranks:
            rank.child.end()  # first: whoever waits for an answer hears of the end
            rank.control.close()
            rank.frames.close()


def _start(shared: int | None) -> Rank:
    child = start_child(MODULE)
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(child.socket, [b"f"], [theirs.fileno(), *([] if shared is None else [shared])])
    return Rank(child, Connection(child.socket.detach()), Connection(ours.detach()))
