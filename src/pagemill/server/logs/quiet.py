"""Keeps the HTTP server's logs short and silent about prompts, whatever clients send."""

from __future__ import annotations

import logging
import re
import time
import traceback

PERIOD_S = 10.0
"""Seconds in which each place in the code writes one line about errors; the next one says how many were left out."""

LOGGERS = ("uvicorn.error", "asyncio")

_PLACEHOLDER = re.compile(r"(?:^|\s)\S*%")


class Quiet(logging.Filter):
    """Lets one warning or error of a kind through in each period, without the words of its exception.

    The kind is the place in the code that logs, and the place that failed, so there are no more kinds than such places.
    """

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[tuple[object, ...], float] = {}
        self._left_out: dict[tuple[object, ...], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns True for a record that is to be written."""
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[1] if record.exc_info else None
        failed = traceback.extract_tb(error.__traceback__)[-1:] if error is not None else []
        kind = (record.pathname, record.lineno, type(error), *((frame.filename, frame.lineno) for frame in failed))
        now = time.monotonic()
        if now - self._written.get(kind, -PERIOD_S) < PERIOD_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._written[kind] = now
        record.msg, record.args = _wordless(str(record.msg)), ()
        if left_out := self._left_out.pop(kind, 0):
            record.msg += f" (and {left_out} more like this)"
        if error is not None:
            wordless = RuntimeError(f"{type(error).__name__}; what it says is left out, for it may quote a request")
            record.exc_info = (RuntimeError, wordless, error.__traceback__)
        return True


def _wordless(message: str) -> str:
    """Returns a message up to where it shows an object: that may quote a request."""
    line = _PLACEHOLDER.split(message.partition("\n")[0], maxsplit=1)[0]
    return line.partition("(")[0] if line.startswith("Exception in callback") else line


_QUIET = Quiet()


def quieten() -> None:
    """Makes the loggers of the HTTP server write no more than `Quiet` lets through."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_QUIET)
