"""An engine process that dies is started again: what had given nothing is computed anew, to the bit, the rest can be
sent again, and what was set stays set."""

import contextlib
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from pagemill import TenantLimits
from pagemill.errors import ConfigError, EngineDeadError, EngineRestartingError
from pagemill.frontend.supervisor import RestartLimits

SEEDED = {"model": "smollm2-135m", "temperature": 1.0, "seed": 7, "ignore_eos": True}
TEXT = {**SEEDED, "prompt": "The museum", "max_tokens": 40}
ENDLESS = {**SEEDED, "prompt": "Once", "max_tokens": 500}
RULES = "Answer in one short and friendly sentence, and say so when you do not know the answer at all. " * 2


@pytest.fixture(scope="module")
def server(serving, tmp_path_factory):
    """Two sequences run at once, so that a third request waits."""
    disk = {"kv_disk_memory": "16MiB", "kv_disk_path": str(tmp_path_factory.mktemp("kv"))}
    with serving(max_model_len=512, kv_memory="48MiB", max_num_seqs=2, max_engine_restarts=2, **disk) as server:
        yield server


def events(lines):
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def text_of(parts):
    return "".join(part["choices"][0]["text"] for part in parts)


def kill(server):
    """Returns what /health says while another engine is started, and what /live does."""
    os.kill(server.llm.engine_pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (health := httpx.get(f"{server.url}/health")).status_code == 200:
        assert time.monotonic() < deadline
    return health, httpx.get(f"{server.url}/live")


def wait_until_well(server):
    deadline = time.monotonic() + 30
    while httpx.get(f"{server.url}/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def streaming(server, body):
    """Begins a stream, and gives its lines."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        yield response.iter_lines()


def test_what_had_given_nothing_is_sent_again_and_what_was_set_stays(server):
    pool = ThreadPoolExecutor(4)

    def post(body):
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

    def stream(body):
        with streaming(server, body) as lines:
            return events(lines)

    def state():
        return (
            server.run(server.llm.ready()).kv_bytes,
            server.run(server.llm.stats()).tenants["other"].limits.max_running,
            [(pin.name, pin.num_tokens) for pin in server.run(server.llm.pins())],
        )

    expected = post(TEXT).json()["choices"][0]["text"]
    server.run(server.llm.set_tenant("other", TenantLimits(max_running=1)))
    server.run(server.llm.resize_kv_memory("64MiB"))
    server.run(server.llm.pin(RULES, name="rules"))
    before = state()

    with streaming(server, ENDLESS) as lines:  # has given something when the engine dies
        next(lines)
        twice = pool.submit(post, ENDLESS)  # sees two engines die
        while server.stats().running < 2:
            time.sleep(0.01)
        session = {**TEXT, "session_id": "s"}
        waiting = [pool.submit(stream, TEXT), pool.submit(post, session)]
        while server.stats().waiting < 2:
            time.sleep(0.01)
        health, live = kill(server)
        late = pool.submit(post, TEXT)  # arrives while there is no engine
        assert (health.status_code, health.json()["status"], live.status_code) == (503, "restarting", 200)
        assert "SIGKILL" in health.json()["error"]
        with pytest.raises(EngineRestartingError):
            server.stats()
        *_, last = events(lines)
    assert last["error"]["type"] == "service_unavailable_error"
    assert "send this again" in last["error"]["message"]
    assert text_of(waiting[0].result()) == expected
    assert waiting[1].result().json()["choices"][0]["text"] == expected
    assert late.result().json()["choices"][0]["text"] == expected
    assert state() == before
    assert server.run(server.llm.sessions())[0].num_turns == 1
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'engine_restarts_total{model_name="smollm2-135m"} 1.0' in metrics
    assert 'requests_sent_again_total{model_name="smollm2-135m"} 3.0' in metrics
    assert re.search(r'request_success_total\{.*finished_reason="error".*\} 1.0', metrics)

    assert not twice.done()
    again = pool.submit(post, TEXT)
    while server.stats().running < 2:
        time.sleep(0.01)
    kill(server)
    refused = twice.result()
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert again.result().json()["choices"][0]["text"] == expected
    wait_until_well(server)
    assert state() == before
    server.run(server.llm.unpin("rules"))
    server.wait_until_idle()


def test_limits_of_restarts_are_checked():
    with pytest.raises(ConfigError, match="max_engine_restarts is -1"):
        RestartLimits(max_engine_restarts=-1)
    with pytest.raises(ConfigError, match="engine_restart_window_s is 0"):
        RestartLimits(engine_restart_window_s=0)
    assert issubclass(EngineRestartingError, EngineDeadError)
