"""Connections: half-open, idle and unread ones are closed in time, and never shut out those that ask for something."""

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time

import pytest
import uvicorn

from pagemill.server.limits import OTHER_DESCRIPTORS, ServerLimits, room_for
from pagemill.server.run import server_config

HEAD = b"GET / HTTP/1.1\r\nHost: here\r\n"


async def app(scope, receive, send):
    """Answers with two bytes; under /endless, until the client goes; under /slow, after half a second."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/slow":
        await asyncio.sleep(0.5)
    while scope["path"] == "/endless":
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.contextmanager
def listening(**limits):
    """A server of the small application with these limits: its port, and uvicorn's state."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(server_config(app, ServerLimits(**limits)))
        thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[sock]),))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield sock.getsockname()[1], server.server_state
        finally:
            server.should_exit = server.force_exit = True
            thread.join(20)
            assert not thread.is_alive()


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def status(port, path="/"):
    with connect(port) as connection:
        connection.sendall(HEAD.replace(b" / ", f" {path} ".encode()) + b"Connection: close\r\n\r\n")
        return read_all(connection).split()[1]


def read_all(connection):
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


@pytest.mark.parametrize("beginning", [b"", b"GET / HT", HEAD])
def test_a_head_that_does_not_come_ends_the_connection(beginning):
    with listening(request_timeout_s=0.3) as (port, _), connect(port) as connection:
        connection.sendall(beginning)
        began = time.monotonic()
        assert read_all(connection) == b""
        assert 0.2 < time.monotonic() - began < 5


def test_a_head_that_comes_byte_by_byte_has_no_more_time():
    with listening(request_timeout_s=0.3) as (port, _), connect(port) as connection:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 5:
                connection.sendall(b"x")
                time.sleep(0.03)
        assert time.monotonic() - began < 3


def test_a_second_request_has_its_own_time():
    with listening(request_timeout_s=0.3) as (port, _), connect(port) as connection:
        for _ in range(4):
            time.sleep(0.15)
            connection.sendall(HEAD + b"\r\n")
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                part = connection.recv(65536)
                assert part, "it was closed"
                received += part


def test_a_request_that_takes_longer_is_not_ended():
    with listening(request_timeout_s=0.2) as (port, _):
        assert status(port, "/slow") == b"200"


def test_half_open_connections_give_way():
    with listening(max_connections=8, max_connections_per_client=8) as (port, state), contextlib.ExitStack() as stack:
        first, *_ = [stack.enter_context(connect(port)) for _ in range(40)]
        for _ in range(8):
            assert status(port) == b"200"
        assert len(state.connections) <= 8
        assert read_all(first) == b""


def test_a_client_has_a_share_and_busy_connections_keep_theirs():
    with listening(max_connections=8, max_connections_per_client=2) as (port, _), contextlib.ExitStack() as stack:
        for _ in range(2):
            busy = stack.enter_context(connect(port))
            busy.sendall(HEAD.replace(b" / ", b" /endless ") + b"\r\n")
            assert busy.recv(100)
        with connect(port) as refused:
            answer = read_all(refused)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After" in answer
        assert b'"service_unavailable_error"' in answer
        assert busy.recv(100)


def test_a_client_that_does_not_read_is_left():
    with listening(reading_timeout_s=0.3) as (port, state), connect(port) as connection:
        connection.sendall(HEAD.replace(b" / ", b" /endless ") + b"\r\n")
        deadline = time.monotonic() + 10
        while state.connections:
            time.sleep(0.05)
            assert time.monotonic() < deadline, "it is still connected"


def test_few_descriptors_are_shared_out():
    """With 128 of them and 90 half-open connections, requests are answered and nothing is written to the log."""
    code = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
sys.path[:0] = {[os.getcwd(), os.path.join(os.getcwd(), "tests")]!r}
from server.test_connections import connect, listening, status
with listening() as (port, state):
    print(port, flush=True)
    sys.stdin.read()
"""
    with (
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        port = int(process.stdout.readline())
        for _ in range(90):
            stack.enter_context(connect(port))
        assert [status(port) for _ in range(5)] == [b"200"] * 5
        _, log = process.communicate()
    assert log == b""


def test_the_limit_on_descriptors_is_raised_as_far_as_needed():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        room = room_for(500)
        assert room.connections == 500
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 500 + room.queue + OTHER_DESCRIPTORS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
