"""The access log: one line for each request, bounded under attack, with an id that the client knows, never with its
words."""

import asyncio
import io
import json
import logging
import re
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from pagemill.errors import ConfigError
from pagemill.server.access.limits import ServerLimits
from pagemill.server.access.server_access import ServerAccess
from pagemill.server.logs import access_log, output
from pagemill.server.logs.access_log import AccessLog, Lines
from pagemill.server.logs.output import AUDIT, LogWriter, ServerLogs, as_json, as_text, fields, logging_to
from pagemill.server.run import server_config
from waiting import wait_until

SECRET = "Xylophone"


@pytest.fixture
def lines(caplog):
    """The fields of lines of the access log, as they come."""
    caplog.set_level(logging.INFO, "pagemill.access")
    caplog.set_level(logging.INFO, "pagemill.audit")
    return lambda message="request": [record.fields for record in caplog.records if record.message == message]


async def answering(scope, receive, send):
    """Answers with the status in the path; nothing where that is 0."""
    status = int(scope["path"].strip("/"))
    if status:
        await send({"type": "http.response.start", "status": status, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"ok"})


def ask(app, path="/200", **headers):
    async def get():
        transport = httpx.ASGITransport(app, client=("10.0.0.9", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
            return await http.get(path)

    return asyncio.run(get())


def test_an_id_comes_and_goes(lines):
    app = AccessLog(answering)
    answer = ask(app, "/204?prompt=" + SECRET, **{"X-Request-Id": "order-7/a"})
    assert (answer.headers["x-request-id"], answer.headers["a"]) == ("order-7/a", "b")
    assert answer.headers["x-content-type-options"] == "nosniff"
    (line,) = lines()
    assert line.pop("duration_ms") >= 0
    assert line == {"request_id": "order-7/a", "client": "10.0.0.9", "method": "GET", "path": "/204", "status": 204}
    given = ask(app).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", given)
    assert lines()[-1]["request_id"] == given


def test_failures_of_the_server_stay_where_only_warnings_are_logged(caplog):
    caplog.set_level(logging.WARNING, "pagemill.access")
    for path in ("/200", "/404", "/500", "/503"):
        ask(AccessLog(answering), path)
    found = [(record.levelname, record.fields["status"]) for record in caplog.records if record.message == "request"]
    assert found == [("WARNING", 500), ("WARNING", 503)]


@pytest.mark.parametrize("wrong", ["", "two words", "x" * 129, "\u00e9"])
def test_a_wrong_id_is_refused(lines, wrong):
    answer = ask(AccessLog(answering), **{"X-Request-Id": wrong.encode("latin-1")})
    assert answer.status_code == 400
    assert "1 to 128 printable ASCII characters" in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"] == lines()[-1]["request_id"] != wrong


def test_a_proxy_is_believed_where_it_is_named(lines):
    for proxies, client in (
        ([], "10.0.0.9"),
        (["10.0.0.8,127.0.0.1"], "10.0.0.9"),
        (["127.0.0.1", "10.0.0.0/8"], "9.9.9.9"),
        (["*"], "9.9.9.9"),
    ):
        access = ServerAccess(forwarded_allow_ips=proxies)
        config = server_config(AccessLog(answering), ServerLimits(), print, access.forwarded_allow_ips)
        config.load()
        ask(config.loaded_app, **{"X-Forwarded-For": "9.9.9.9"})
        assert lines()[-1]["client"] == client
    with pytest.raises(ConfigError, match="forwarded_allow_ips has 'nginx', which is neither an address"):
        ServerAccess(forwarded_allow_ips=["127.0.0.1,nginx"])


def test_refusals_write_so_many_lines(lines, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(access_log, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    app = AccessLog(answering)
    for _ in range(access_log.MOST_LINES + 5):
        ask(app, "/401")
    assert len(lines()) == access_log.MOST_LINES
    ask(app, "/200")
    assert (lines()[-1]["status"], "left_out" in lines()[-1]) == (200, False)
    clock[0] = 1.0
    ask(app, "/401")
    assert lines()[-1]["left_out"] == 5


def test_lines_of_a_kind_come_back(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(access_log, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    allowed = Lines()
    assert sum(allowed.allow(1) for _ in range(1000)) == access_log.MOST_LINES
    clock[0] = 3600.0
    assert sum(allowed.allow(1) for _ in range(1000)) == access_log.MOST_LINES
    assert allowed.take_left_out(1) == 2000 - 2 * access_log.MOST_LINES
    assert allowed.take_left_out(1) is None


def test_a_server_logs_tokens_and_no_words(served, lines, caplog):
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5, "ignore_eos": True}
    with httpx.Client(base_url=f"{served.url}/v1", timeout=60) as http:
        answer = http.post("/chat/completions", json=body, headers={"X-Request-Id": "one"})
        usage = answer.json()["usage"]
        with http.stream("POST", "/chat/completions", json={**body, "stream": True}) as stream:
            streamed = stream.headers["x-request-id"]
            stream.read()
        http.post("/chat/completions", json={"messages": SECRET}, headers={"X-Request-Id": "three"})
        http.get("/pins", params={"cache_salt": SECRET})
        http.head("/models", headers={"X-Request-Id": "head"})
        http.post("/kv_memory", json={"kv_memory": http.get("/kv_memory").json()["kv_memory"]})
    deadline = time.monotonic() + 10
    while len(lines()) < 7 and time.monotonic() < deadline:
        time.sleep(0.02)
    by_id = {line["request_id"]: line for line in lines()}
    for line in (by_id["one"], by_id[streamed]):
        assert (line["status"], line["tenant"], line["path"]) == (200, "default", "/v1/chat/completions")
        assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], 5)
        assert 0 < line["first_token_ms"] <= line["duration_ms"]
    assert by_id[streamed]["cached_tokens"] > 0
    assert by_id["three"]["status"] == 400
    assert (by_id["head"]["status"], by_id["head"]["path"]) == (200, "/v1/models")
    (audit,) = lines("KV pool resized")
    assert audit["kv_bytes"] > 0
    assert SECRET not in "".join(map(str, (vars(record) for record in caplog.records)))


def test_a_stream_that_breaks_off_says_why(served, lines, caplog):
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=f"{served.url}/v1", timeout=60) as http:
        late = {**body, "timeout": 0.5}
        assert "timeout" in http.post("/completions", json=late, headers={"X-Request-Id": "late"}).text
        with http.stream("POST", "/completions", json=body, headers={"X-Request-Id": "left"}) as stream:
            next(stream.iter_raw())
        http.post("/completions", json={**body, "max_tokens": 2}, headers={"X-Request-Id": "whole"})
    wait_until(lambda: {"late", "left", "whole"} <= {line["request_id"] for line in lines()}, "three lines")
    found = {
        one.fields["request_id"]: (one.levelname, one.fields["status"], one.fields.get("broke_off"))
        for one in caplog.records
        if one.message == "request"
    }
    assert found == {
        "late": ("WARNING", 200, "timeout_error"),
        "left": ("INFO", 200, "client_gone"),
        "whole": ("INFO", 200, None),
    }


def record(message, *args, level=logging.INFO, **values):
    return logging.makeLogRecord(
        {"msg": message, "args": args, "levelno": level, "created": 0.0015, **fields(none=None, **values)}
    )


def test_a_line_of_text():
    line = as_text(record("a %s", "word", path="/v1/models", odd='two words\n"x"', number=1.5, limits={"a": None}))
    assert line == (
        '1970-01-01T00:00:00.001Z info    a word path=/v1/models odd="two words\\n\\"x\\"" number=1.5 limits={"a":null}'
    )


def test_a_line_of_json():
    line = json.loads(as_json(record("request", path="/\n", status=200)))
    assert line == {
        "time": "1970-01-01T00:00:00.001Z",
        "level": "info",
        "message": "request",
        "path": "/\n",
        "status": 200,
    }
    try:
        raise ValueError("no")
    except ValueError as error:
        failed = record("failed", level=logging.ERROR)
        failed.exc_info = (ValueError, error, error.__traceback__)
    assert "ValueError: no" in json.loads(as_json(failed))["traceback"]
    assert "ValueError: no" in as_text(failed)


def test_a_reader_that_stops_stops_nobody(monkeypatch):
    monkeypatch.setattr(output, "MAX_LINES", 10)
    monkeypatch.setattr(output, "CLOSE_S", 0.2)
    goes_on, written = threading.Event(), io.StringIO()
    slow = SimpleNamespace(write=lambda text: goes_on.wait(20) and written.write(text), flush=lambda: None)
    writer = LogWriter(slow, as_text)
    began = time.monotonic()
    for number in range(100):
        writer.emit(record("line", number=number))
    writer.close()
    assert time.monotonic() - began < 5
    goes_on.set()
    deadline = time.monotonic() + 10
    while "left out" not in written.getvalue() and time.monotonic() < deadline:
        writer.emit(record("line", number=101))
        time.sleep(0.02)
    found = re.search(r"warning (\d+) lines were left out: the log was not read fast enough", written.getvalue())
    assert int(found[1]) >= 80


def test_administrative_acts_are_logged_at_every_level():
    written = io.StringIO()
    loggers = (logging.getLogger("pagemill"), AUDIT)
    before = [logger.level for logger in loggers]
    with logging_to(written, ServerLogs(log_level="error", log_format="json")):
        logging.getLogger("pagemill.access").warning("request")
        AUDIT.info("tenant set", extra=fields(tenant="a"))
    assert [json.loads(line)["message"] for line in written.getvalue().splitlines()] == ["tenant set"]
    assert [logger.level for logger in loggers] == before, "what logs next in this process does so as it did"


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="log_level is 'loud'; it must be one of info, warning, error"):
        ServerLogs(log_level="loud")
