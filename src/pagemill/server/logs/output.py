"""Where a server's log goes: lines of text or JSON, written by a thread, so that a slow reader stops nobody."""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any, Literal, TextIO

import msgspec

from pagemill.arguments import about, check_fields, suggest_arguments
from pagemill.errors import ConfigError, shown

AUDIT = logging.getLogger("pagemill.audit")
"""For what administrators do and who is refused; it is written at every level."""

MAX_LINES = 10_000
"""Lines that wait to be written; more are left out, and the next one says how many."""
CLOSE_S = 2.0
"""Seconds that whoever reads the log may take for the last lines."""

_PLAIN = re.compile(r"[\w./:@%+-]+", re.ASCII)


@suggest_arguments
@dataclass(kw_only=True, frozen=True)
class ServerLogs:
    """Says what a server writes to stderr. Raises `ConfigError` for a wrong value."""

    log_level: Annotated[
        Literal["info", "warning", "error"],
        about(
            "What is logged: info (a line for each request too), warning or error; administrative acts are logged at "
            "every level."
        ),
    ] = "info"
    log_format: Annotated[Literal["text", "json"], about("How a line is written: text or json.")] = "text"
    otlp_traces_endpoint: Annotated[
        str | None,
        about(
            "URL to which spans of requests are sent by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; needs "
            "pagemill[otel]."
        ),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
            raise ConfigError(
                f"otlp_traces_endpoint is {shown(endpoint)}; it must be a URL of a collector's OTLP over HTTP, such as "
                f"http://127.0.0.1:4318/v1/traces",
                param="otlp_traces_endpoint",
            )


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Returns what a line has beside its message, as a logger's `extra`; None is left out."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


class LogWriter(logging.Handler):
    """Hands records to a thread, which formats and writes them. What finds no place is counted and left out."""

    def __init__(self, stream: TextIO, form: Callable[[logging.LogRecord], str]) -> None:
        super().__init__()
        self._stream = stream
        self._form = form
        self._waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(MAX_LINES)
        self._left_out = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = record.getMessage(), None
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._left_out += 1

    def close(self) -> None:
        """Writes what waits, but not for long."""
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)
        super().close()

    def _write(self) -> None:
        while (record := self._waiting.get()) is not None:
            lines = [self._form(record)]
            if left_out := self._left_out:
                self._left_out -= left_out
                message = f"{left_out} lines were left out: the log was not read fast enough"
                lines.append(self._form(logging.makeLogRecord({"msg": message, "levelno": logging.WARNING})))
            try:
                self._stream.write("".join(f"{line}\n" for line in lines))
                self._stream.flush()
            except (OSError, ValueError):  # nobody reads it any more
                return


def as_text(record: logging.LogRecord) -> str:
    """Returns a record as a line: time, level, message, then `name=value` for each field."""
    known = (f" {name}={_word(value)}" for name, value in getattr(record, "fields", {}).items())
    return f"{_time(record)} {_level(record):7} {record.getMessage()}{''.join(known)}{_traceback(record, chr(10))}"


def as_json(record: logging.LogRecord) -> str:
    """Returns a record as one JSON object."""
    line = {"time": _time(record), "level": _level(record), "message": record.getMessage()}
    line |= getattr(record, "fields", {})
    if traceback := _traceback(record, ""):
        line["traceback"] = traceback
    return msgspec.json.encode(line).decode()


@contextmanager
def logging_to(stream: TextIO, settings: ServerLogs) -> Iterator[None]:
    """Makes this process log to a stream; restores the loggers' levels in the end."""
    writer = LogWriter(stream, as_json if settings.log_format == "json" else as_text)
    levels: dict[logging.Logger, str | int] = {
        logging.getLogger("pagemill"): settings.log_level.upper(),
        AUDIT: logging.INFO,
    }
    before = {logger: logger.level for logger in levels}
    logging.getLogger().addHandler(writer)
    for logger, level in levels.items():
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)
        logging.getLogger().removeHandler(writer)
        writer.close()


def _word(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if _PLAIN.fullmatch(text) or not isinstance(value, str) else msgspec.json.encode(text).decode()


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _level(record: logging.LogRecord) -> str:
    return logging.getLevelName(record.levelno).lower()


def _traceback(record: logging.LogRecord, before: str) -> str:
    return before + logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
