"""Logs of the HTTP server: what repeats is written once, and no line quotes a request."""

import io
import logging
from types import SimpleNamespace

import pytest

from pagemill.server.access.limits import ServerLimits
from pagemill.server.logs import quiet
from pagemill.server.run import server_config

WORDS = "secret prompt"


@pytest.fixture
def log(monkeypatch):
    """A logger with the filter, and what it has written."""
    clock = [0.0]
    monkeypatch.setattr(quiet, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    logger, written = logging.Logger("test"), io.StringIO()
    logger.addFilter(quiet.Quiet())
    logger.addHandler(logging.StreamHandler(written))
    return logger, written, clock


def test_what_repeats_is_written_once_in_each_period(log):
    logger, written, clock = log
    for at in (0, 1, 2, quiet.PERIOD_S + 1):
        clock[0] = at
        logger.warning("Invalid HTTP request received.")
    assert written.getvalue().splitlines() == [
        "Invalid HTTP request received.",
        "Invalid HTTP request received. (and 2 more like this)",
    ]


def test_different_failures_are_all_written_without_their_words(log):
    logger, written, _ = log

    def first():
        raise ValueError(WORDS)

    def second():
        raise KeyError(WORDS)

    for fail in (first, second, second):
        with pytest.raises(Exception, match=WORDS) as failed:
            fail()
        logger.error("Exception in ASGI application\n%s", WORDS, exc_info=failed.value)
    text = written.getvalue()
    assert WORDS not in text
    assert text.count("Traceback") == 2
    assert "ValueError" in text
    assert "in second" in text


@pytest.mark.parametrize(("name", "kind"), [("uvicorn.error", ValueError), ("asyncio", KeyError)])
def test_a_servers_loggers_write_no_words(name, kind):
    server_config(print, ServerLimits(), print)
    logger, written = logging.getLogger(name), io.StringIO()
    handler = logging.StreamHandler(written)
    logger.addHandler(handler)
    try:
        logger.error("Exception in ASGI application", exc_info=kind(WORDS))
    finally:
        logger.removeHandler(handler)
    assert f"{kind.__name__}; what it says is left out" in written.getvalue()
    assert WORDS not in written.getvalue()


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Exception in callback Connection.read(b'secret prompt')", "Exception in callback Connection.read"),
        ("ASGI callable should return None, but returned '%s'.", "ASGI callable should return None, but returned"),
        ("Executing %s took %.3f seconds", "Executing"),
        ("Invalid HTTP request received (again).", "Invalid HTTP request received (again)."),
    ],
)
def test_a_line_ends_where_an_object_would_stand(log, message, line):
    logger, written, _ = log
    logger.error(message, *[WORDS] * message.count("%"))
    assert written.getvalue() == f"{line}\n"
