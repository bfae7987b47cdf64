"""Starts child processes that run a module of this package, with a socket to each.

A child is started afresh (no fork of this process, no second import of `__main__`), so this process needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass

SOCKET_BUFFER_BYTES = 1 << 20
_CHILD = "import sys; sys.path[:] = sys.argv[2:]; from {} import run; run(int(sys.argv[1]))"


@dataclass(eq=False)
class Child:
    """A child process and this process's end of the socket to it. `end` kills it if it still runs, as does the
    interpreter's exit."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def __post_init__(self) -> None:
        self.end = weakref.finalize(self, _end, self.process, self.socket)


def start_child(module: str, niceness: int | None = None) -> Child:
    """Starts a process that runs a module's `run(descriptor)`, with the descriptor of its end of the socket.

    niceness: added to this process's own: how far the child stands back behind it, in a process session of its own, so
        that a Ctrl-C in the terminal reaches this process alone. None: the child belongs to this process's session.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        # The child gets this process's module path, so that it finds the same package wherever it was started from.
        # What it prints goes to stderr: stdout may be somebody's JSON.
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _CHILD.format(module),
                str(theirs.fileno()),
                *(path or os.getcwd() for path in sys.path),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=niceness is not None,
        )
    if niceness is not None:
        _stand_back(process.pid, niceness)
    return Child(process, ours)


def _stand_back(pid: int, niceness: int) -> None:
    """Lets a child go behind this process for a processor. Where Linux shares processors out among process sessions
    first (autogroup), the child's session has a niceness of its own, and that of the process counts for nothing."""
    with contextlib.suppress(OSError):  # it has ended already
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/autogroup", "w") as session:
        session.write(str(niceness))


def _end(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    """Ends a child that nobody closed, also at interpreter exit, and leaves neither orphan nor zombie."""
    sock.close()
    if process.poll() is None:
        process.kill()
        process.wait()
