"""Checks where a command writes its file, before anything is measured or simulated for nothing."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from pagemill.errors import ConfigError


def check_out_file(flag: str, path: Path) -> None:
    """Makes the folder of a file that a flag names. Raises ConfigError where no file can be written."""
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} is {str(path)!r}, where no file can be written: {error}; name another file",
            param=flag.removeprefix("--"),
        ) from error
