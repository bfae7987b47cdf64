"""generate, chat in a pipe, bench and serve as a user runs them: separate processes, the default model."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from pagemill.cli.serve import url_of
from pagemill.namespace import Namespace
from pagemill.sessions.store import SessionStore
from waiting import wait_until

MODEL = "smollm2-135m"
SMALL = ["--max-model-len", "256", "--kv-memory", "32MiB", "--max-num-seqs", "8"]
LONG = ["--max-model-len", "4096", "--kv-memory", "256MiB", "--max-num-seqs", "8"]
COMMAND = [sys.executable, "-m", "pagemill"]
STUCK = """
import time
from pagemill.cli.main import main
from pagemill.text.tokenizer import Tokenizer
encode = Tokenizer.encode
def encode_or_not(self, text, *how, **more):
    return time.sleep(1000) if text == "stuck" else encode(self, text, *how, **more)
Tokenizer.encode = encode_or_not
main()
"""
"""The program, with a text that its tokenizer never ends with."""


def run(*args, **kwargs):
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=120, **kwargs)


def children(pid):
    """Ids of the running child processes, where /proc tells."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def test_generate_as_json():
    prompts = ["-", "1, 2, 3, 4,"]
    result = run("generate", MODEL, *prompts, "--max-tokens", "4", "--json", *SMALL, input="The capital of France is\n")
    assert result.returncode == 0, result.stderr
    first, second = json.loads(result.stdout)
    assert first["text"].startswith(" Paris")
    assert (first["completion_tokens"], first["finish_reason"]) == (4, "length")
    assert (first["prompt"], second["prompt"]) == ("The capital of France is", "1, 2, 3, 4,")
    assert "KV pool" in result.stderr


def test_generate_searches_with_beams():
    prompt = "The capital of France is"
    result = run(
        "generate", MODEL, prompt, "--beam-width", "3", "--length-penalty", "0", "--max-tokens", "4", "--json", *SMALL
    )
    assert result.returncode == 0, result.stderr
    (found,) = json.loads(result.stdout)
    sums = [beam["cumulative_logprob"] for beam in found["beams"]]
    assert len(sums) == 3
    assert sums == sorted(sums, reverse=True)
    assert found["text"] == found["beams"][0]["text"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", MODEL, "x", "--beam-width", "0"], "beam_width is 0"),
        (["generate", MODEL, "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", MODEL, "x", "--beam-width", "2", "--top-k", "3"], "top_k is 3, which has no meaning with"),
        (["generate", MODEL, "x", "--beam-width", "2", "--stop", "."], "stop is ['.'], which has no meaning with"),
        (
            ["generate", MODEL, "x", "--beam-width", "2", "--temperature", "0.7"],
            "temperature is 0.7; it must be 0 or 1",
        ),
        (["generate", MODEL, "x", "--length-penalty", "2"], "give --beam-width"),
        (["generate", MODEL, "x", "", "--kv-memory", "900PiB"], "a prompt is empty, and this model begins none with"),
        (["generate", "no-such-model", "x"], "no-such-model"),
        (["generate", MODEL, "x", "--block-size", "17"], "block_size is 17"),
        (["generate", MODEL, "x", "--temperature", "-1"], "temperature is -1"),
        (["serve", "no-such-model", "--port", "0"], "no-such-model"),
        (["serve", MODEL, "--port", "0", "--routing", "round-robin"], "there is one engine; give --replicas"),
        (
            ["serve", MODEL, "--port", "0", "--host", "0.0.0.0"],
            "0.0.0.0 can be reached from elsewhere",
        ),
        (["generate", MODEL, "x", "--kv-disk-memory", "9GiB", "--kv-disk-path", "/proc/x"], "path is '/proc/x'"),
    ],
)
def test_an_error_is_one_line(args, words):
    result = run(*args)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_bench_reports_what_it_did():
    result = run(
        *["bench", MODEL, "--num-prompts", "3", "--input-len", "8", "--output-len", "4", "--prefix-len", "32"],
        *["--json", *SMALL],
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["workload"]["num_prompts"] == 3
    assert report["output_tokens_per_s"] * report["duration_s"] == pytest.approx(12)
    assert report["total_tokens_per_s"] * report["duration_s"] == pytest.approx(12 + 3 * 40)
    assert report["cached_prompt_tokens"] == 2 * 32  # all but the first request find the prefix
    assert report["engine"]["kv_blocks"] > 0
    assert 0 < report["ttft_s"]["median"] <= report["latency_s"]["median"] <= report["latency_s"]["p99"]
    assert report["ttft_s"]["median"] + 3 * report["tpot_s"]["median"] <= 2 * report["latency_s"]["p99"]


def test_a_conversation_with_a_name_goes_on_after_a_restart(tmp_path):
    kept = ["--session-path", str(tmp_path / "sessions")]
    args = ["chat", MODEL, "--session", "ada", "--temperature", "0", "--max-tokens", "12", *SMALL, *kept]
    args += ["--kv-disk-path", str(tmp_path / "kv")]
    assert run("sessions", "ls", *kept).stdout == f"no sessions are kept in {tmp_path / 'sessions'}\n"
    assert "no sessions are kept in" in run("sessions", "rm", "ada", *kept).stderr
    assert not (tmp_path / "sessions").exists()
    first = run(*args, "--system", "Be brief.", input="My name is Ada. Say hello.\n")
    assert first.returncode == 0, first.stderr
    assert "session 'ada' begins" in first.stderr
    second = run(*args, "--system", "Be brief.", input="What is my name?\n")
    assert "session 'ada' goes on after 1 turn, " in second.stderr
    assert second.stdout.strip()
    assert any((tmp_path / "kv").glob("*/blocks.dat"))
    (row,) = [line.split() for line in run("sessions", "ls", *kept).stdout.splitlines() if line.startswith(" ada")]
    assert row[2] == "2"
    (card,) = json.loads(run("sessions", "ls", "--json", *kept).stdout)
    assert (card["session"], card["turns"], card["tenant"], card["damaged"]) == ("ada", 2, "default", False)
    refused = run(*args, "--system", "Be rude.")
    assert refused.returncode == 1
    assert "goes on after 2 turns, with the system message 'Be brief.', and --system says 'Be rude.'" in refused.stderr
    assert run(*args, input="/reset\n").returncode == 0
    gone = run("sessions", "rm", "ada", *kept)
    assert (gone.returncode, gone.stderr.count("\n")) == (1, 1)
    assert "there is no session 'ada'" in gone.stderr


def test_a_damaged_session_is_listed_and_can_be_deleted(tmp_path):
    path = tmp_path / "sessions"
    store = SessionStore(path, max_sessions=2, timeout_s=None)
    for name in ("ada", "bob"):
        store.commit(store.begin(name, Namespace(), model="m", tokenizer="t"), [1], None)
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE sessions SET num_turns = 7 WHERE name = 'ada'")
    kept = ["--session-path", str(path)]
    listed = run("sessions", "ls", *kept).stdout.splitlines()
    assert ["damaged" in line for line in listed if line.startswith((" ada", " bob"))] == [False, True]
    assert run("sessions", "rm", "ada", *kept).returncode == 0
    assert "damaged" not in run("sessions", "ls", *kept).stdout


def test_serve_pins_a_file_of_prefixes_before_it_is_ready(tmp_path):
    pins = tmp_path / "pins.json"
    assert "which is no file; name one" in run("serve", MODEL, "--port", "0", "--pin-file", str(pins)).stderr
    pins.write_text(json.dumps([{"name": "system", "prompt": "You are a patient teacher. " * 8}]))
    command = [*COMMAND, "serve", MODEL, "--port", "0", "--pin-file", str(pins), "--log-format", "json", *SMALL]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while (line := json.loads(server.stderr.readline()))["message"] != "ready":
            assert server.poll() is None
        answer = httpx.get(f"{line['address']}/v1/pins", headers={"X-Request-Id": "mine"})
        (card,) = answer.json()["data"]
        assert card["name"] == "system"
        line = json.loads(server.stderr.readline())
        assert (line["request_id"], line["path"], line["status"]) == ("mine", "/v1/pins", 200)
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("host", "here", "url"),
    [
        ("0.0.0.0", True, "http://127.0.0.1:80"),
        ("::", True, "http://[::1]:80"),
        ("0.0.0.0", False, "http://0.0.0.0:80"),
        ("fe80::1%eth0", True, "http://[fe80::1%eth0]:80"),
        ("192.168.0.2", True, "http://192.168.0.2:80"),
    ],
)
def test_an_example_reaches_a_server_on_all_addresses(host, here, url):
    assert url_of("http", host, 80, here=here) == url


def test_serve_listens_at_once_and_ends_without_a_trace(tmp_path):
    tenants = str(tmp_path / "tenants.json")
    Path(tenants).write_text('{"tenants": {"one": {}}}')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    pool = concurrent.futures.ThreadPoolExecutor(1)
    server = subprocess.Popen(
        [
            *COMMAND,
            "serve",
            MODEL,
            "--port",
            str(port),
            "--served-model-name",
            "small",
            "--tenants",
            str(tenants),
            *SMALL,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        statuses = []
        early = None  # a request that comes while the model loads
        body = {"model": "small", "prompt": "Hi", "max_tokens": 2}
        deadline = time.monotonic() + 60
        while 200 not in statuses and time.monotonic() < deadline:
            try:
                response = httpx.get(f"{url}/health")
                statuses.append(response.status_code)
                if response.status_code == 503:
                    assert response.json()["status"] == "loading"
                    early = early or pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
            except httpx.ConnectError:
                pass
            time.sleep(0.02)
        assert statuses[0] == 503
        assert statuses[-1] == 200
        busy = run("serve", MODEL, "--port", str(port))
        assert busy.returncode == 1
        assert f"port {port} on 127.0.0.1 is in use" in busy.stderr
        assert busy.stderr.count("\n") == 1
        assert early.result().json()["model"] == "small"
        (engine,) = children(server.pid)
        sizes = [httpx.get(f"{url}/v1/kv_memory").json()["kv_memory"]]
        for sent, smaller in ((signal.SIGUSR1, True), (signal.SIGUSR2, False)):
            server.send_signal(sent)
            while (sizes[-1] < sizes[0]) != smaller and time.monotonic() < deadline:
                time.sleep(0.02)
                sizes.append(httpx.get(f"{url}/v1/kv_memory").json()["kv_memory"])
        assert min(sizes) < sizes[0] == sizes[-1]
        server.send_signal(signal.SIGHUP)
        endless = {**body, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with (
            httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=30) as response,
            httpx.stream("GET", f"{url}/v1/kv_map", timeout=30) as watching,
        ):
            next(response.iter_lines())
            server.send_signal(signal.SIGINT)
            _, messages = server.communicate(timeout=20)
            assert '"error"' not in watching.read().decode()
        assert server.returncode == 0
        assert f"curl {url}/v1/chat/completions" in messages
        assert "Ctrl-C stops the server" in messages
        assert "was read again; tenants: 1, keys: 0" in messages
        assert f"the KV pool has 1 block now, {min(sizes) / 2**20:.1f} MiB" in messages
        assert f" blocks now, {sizes[-1] / 2**20:.1f} MiB" in messages
        assert "Traceback" not in messages
        assert not Path(f"/proc/{engine}").exists()
    finally:
        pool.shutdown()
        server.kill()
        server.wait()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_has_said_that_it_listens_stops_cleanly(stop):
    server = subprocess.Popen([*COMMAND, "serve", MODEL, "--port", "0", *SMALL], stderr=subprocess.PIPE, text=True)
    try:
        while "listening; " not in server.stderr.readline():
            assert server.poll() is None
        server.send_signal(stop)
        _, messages = server.communicate(timeout=20)
        assert server.returncode == 0
        assert "Traceback" not in messages
        assert messages.splitlines()[-1].endswith("the server has stopped")
    finally:
        server.kill()
        server.wait()


def test_a_queue_has_an_end_without_a_tenants_file():
    command = [*COMMAND, "serve", MODEL, "--port", "0", *LONG, "--max-waiting", "2", "--max-num-seqs", "1"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    try:
        while " curl " not in (line := server.stderr.readline()):
            assert server.poll() is None
        url = line.split()[1].removesuffix("/chat/completions")
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as running:
            lines = running.iter_lines()  # which would close the answer at its own end
            next(lines)
            late = {**body, "stream": False, "timeout": 5}
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                asked = [pool.submit(httpx.post, f"{url}/completions", json=late, timeout=60) for _ in range(2)]
                metrics = f"{url.removesuffix('/v1')}/metrics"
                wait_until(lambda: re.search(r"num_requests_waiting\S* 2\b", httpx.get(metrics).text), "none waits")
                refused = httpx.post(f"{url}/completions", json=late, timeout=60)
            assert [refused.status_code, *(answer.result().status_code for answer in asked)] == [429, 408, 408]
            assert int(refused.headers["Retry-After"]) >= 1
            assert "2 sequences of tenant 'default' wait, and max_waiting is 2" in refused.json()["error"]["message"]
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=20)
        assert server.returncode == 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("stop", "num_signals"),
    [pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow), (signal.SIGTERM, 1), (signal.SIGINT, 2)],
)
def test_a_signal_ends_open_requests_with_an_error(stop, num_signals):
    """A stream, a plain request, one whose text never ends being tokenized, and a client that sends half a request and
    then nothing."""
    command = [sys.executable, "-c", STUCK, "serve", MODEL, "--port", "0", "--drain-timeout", "4", *LONG]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    pool = concurrent.futures.ThreadPoolExecutor(2)
    try:
        while " curl " not in (line := server.stderr.readline()):
            assert server.poll() is None
        url = line.split()[1].removesuffix("/chat/completions")
        (engine,) = children(server.pid)
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 4000, "ignore_eos": True}
        plain = pool.submit(httpx.post, f"{url}/completions", json=body, timeout=60)
        address = httpx.URL(url)
        stuck = pool.submit(httpx.post, address.join("/tokenize"), json={"prompt": "stuck"}, timeout=60)
        with (
            socket.create_connection((address.host, address.port)) as silent,
            httpx.Client() as other,
            httpx.stream("POST", f"{url}/completions", json={**body, "stream": True}, timeout=60) as stream,
        ):
            silent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            lines = (line for line in stream.iter_lines() if line)
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            while len(other.get(f"{url}/requests").json()["data"]) < 2:  # the other thread's too
                assert not plain.done()
            assert not stuck.done()
            started = time.monotonic()
            server.send_signal(stop)
            while (late := other.get(f"{url}/models")).status_code == 200:
                assert time.monotonic() < started + 3
            assert (late.status_code, late.headers["retry-after"]) == (503, "1")
            assert "asked to stop" in late.json()["error"]["message"]
            if num_signals == 2:
                server.send_signal(stop)
            *_, last, done = lines
        elapsed = time.monotonic() - started
        _, messages = server.communicate(timeout=20)
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], done) == ("service_unavailable_error", "data: [DONE]")
        assert plain.result().status_code == 503
        assert plain.result().json()["error"] == error
        assert plain.result().headers["retry-after"] == "1"
        assert "send it again when it has started anew" in error["message"]
        with pytest.raises(httpx.HTTPError):
            stuck.result()
        assert server.returncode == 0
        assert "Traceback" not in messages
        assert "Exception" not in messages
        assert not Path(f"/proc/{engine}").exists()
        assert (elapsed > 3.5) == (num_signals == 1)  # a second signal cuts the time short
        assert "of the open connections may go on for 4 s" in messages
    finally:
        pool.shutdown()
        server.kill()
        server.wait()


def test_a_server_whose_engine_dies_starts_it_again_and_ends_when_that_is_too_much():
    url = ""
    once = ["--max-engine-restarts", "1"]
    server = subprocess.Popen(
        [*COMMAND, "serve", MODEL, "--port", "0", *SMALL, *once], stderr=subprocess.PIPE, text=True
    )
    try:
        while "Ctrl-C stops" not in (line := server.stderr.readline()):
            assert server.poll() is None
            url = line.split()[1] if " curl " in line else url
        body = {"messages": [{"role": "user", "content": "Count."}], "stream": True, "ignore_eos": True}
        for _ in range(2):  # the second time it waits until another engine has taken the place of the first
            with httpx.stream("POST", url, json=body, timeout=30) as response:
                lines = response.iter_lines()
                next(lines)
                (engine,) = children(server.pid)
                os.kill(engine, signal.SIGKILL)
                events = [line for line in lines if line.startswith("data: ")]
            error = json.loads(events[-2].removeprefix("data: "))["error"]
            assert error["type"] == "service_unavailable_error"
            assert events[-1] == "data: [DONE]"
        _, messages = server.communicate(timeout=20)
        assert server.returncode == 1
        assert "another is being started (restart 1 of at most 1 in 300 s)" in messages
        assert "error: the engine process is gone (killed by SIGKILL" in messages
        assert "and is not once more (max_engine_restarts)" in messages
        assert "Traceback" not in messages
    finally:
        server.kill()
        server.wait()
