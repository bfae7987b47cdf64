"""Makes the processes of a fleet write to one place."""

from __future__ import annotations

import os
import sys


def write_to(log_path: str | None) -> None:
    """Makes what this process and its children write to stderr go to a file or pipe; None: it goes where it went."""
    if log_path is not None:
        descriptor = os.open(log_path, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, sys.stderr.fileno())
        os.close(descriptor)
