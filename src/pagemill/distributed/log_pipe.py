"""The pipe through which the processes of a fleet log to the stderr of the one that serves it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

LOG_BYTES = 1 << 16


@contextlib.contextmanager
def log_pipe(path: Path) -> Iterator[str]:
    """Gives a pipe's path; what is written to it appears on this process's stderr."""
    os.mkfifo(path, 0o600)
    descriptor = os.open(path, os.O_RDWR)

    def copy() -> None:
        while (data := os.read(descriptor, LOG_BYTES)) != b"\0":
            _write(data)

    thread = threading.Thread(target=copy, name="log", daemon=True)
    thread.start()
    try:
        yield str(path)
    finally:
        time.sleep(0.05)  # what has just been written stands alone in the pipe, and the end behind it
        os.write(descriptor, b"\0")
        thread.join(1.0)
        os.close(descriptor)


def _write(data: bytes) -> None:
    """Writes to stderr. What it does not take is lost: who logs must not wait for ever where it is closed or full."""
    with contextlib.suppress(OSError, ValueError):
        while data and sys.stderr is not None:
            data = data[os.write(sys.stderr.fileno(), data) :]
