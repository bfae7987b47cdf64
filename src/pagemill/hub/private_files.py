"""Makes folders and files that only their owner may read, and locks files between processes."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from pagemill.errors import ConfigError


def make_folder(param: str, given: str | None, default: Path) -> Path:
    """Returns the folder that setting `param` names, or the default one; makes it, for its owner alone, where it is
    missing. Raises ConfigError."""
    folder = default if given is None else Path(given)
    try:
        folder = folder.expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{param} is {str(folder)!r}, where no folder can be made: {error}; name another one", param=param
        ) from error
    return folder


def open_private(path: Path) -> int:
    """Opens a file that its owner alone can read, and makes it where there is none."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def lock_alone(file: int) -> bool:
    """Locks a file, unless others have locked it; returns whether it is locked alone now."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
