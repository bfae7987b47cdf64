"""Connections: half-open, idle and unread ones are closed in time, and never shut out those that ask for something."""

import asyncio
import contextlib
import http.client
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagemill.server.access import limits as server_limits
from pagemill.server.access.connections import client_of
from pagemill.server.access.limits import OTHER_DESCRIPTORS, ServerLimits, room_for
from pagemill.server.access.turns import ListeningServer
from pagemill.server.protocol.events import EventStream
from pagemill.server.run import server_config
from waiting import wait_until

HEAD = b"GET / HTTP/1.1\r\nHost: here\r\n"
LARGE = 20 << 20
SMALL_BUFFER = 4096
BUFFER = 256 << 10


async def app(scope, receive, send):
    """Answers with two bytes; under /endless, until the client goes; under /slow, after half a second; under /large,
    with many; under /broken, with more than small buffers hold and too little to wait, then fails."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/large":
        await send({"type": "http.response.body", "body": b"x" * LARGE})
        return
    if scope["path"] == "/broken":
        await send({"type": "http.response.body", "body": b"x" * 60_000, "more_body": True})
        raise RuntimeError("broken")
    if scope["path"] == "/slow":
        await asyncio.sleep(0.5)
    while scope["path"] == "/endless":
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.contextmanager
def listening(application=app, *, send_buffer=None, tls=None, **limits):
    """A server of a small application with these limits: its port, and uvicorn's state."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        if send_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        server = ListeningServer(server_config(application, ServerLimits(**limits), print, tls=tls))
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


@contextlib.contextmanager
def asking(port, path, room=SMALL_BUFFER):
    """A connection with little room on which a request has been sent."""
    with socket.socket() as connection:
        connection.settimeout(10)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        connection.connect(("127.0.0.1", port))
        connection.sendall(HEAD.replace(b" / ", f" {path} ".encode()) + b"\r\n")
        yield connection


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
    with listening(request_timeout_s=0.3) as (port, _):
        began = time.monotonic()
        with connect(port) as connection:
            connection.sendall(beginning)
            assert read_all(connection) == b""
        assert 0.2 < time.monotonic() - began < 5


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize(("length", "answer"), [(15 << 10, b"200"), (17 << 10, b"400")])
def test_a_head_that_comes_at_once_has_the_same_limit(length, answer, method):
    with listening() as (port, _), connect(port) as connection:
        beginning = HEAD.replace(b"GET", method) + b"X-Long: " + b"x" * length
        connection.sendall(beginning + b"\r\nConnection: close\r\n\r\n")
        began = time.monotonic()
        assert read_all(connection).split()[1] == answer
        assert time.monotonic() - began < 5


def test_a_head_that_comes_byte_by_byte_has_no_more_time():
    with listening(request_timeout_s=0.3) as (port, _), connect(port) as connection:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 5:
                connection.sendall(b"x")
                time.sleep(0.03)
        assert time.monotonic() - began < 3


def test_a_second_request_has_its_own_time():
    with listening(request_timeout_s=1) as (port, _), connect(port) as connection:
        for _ in range(3):
            time.sleep(0.4)
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
        assert b"127.0.0.1 has 2 of at most 2 connections of one address open;" in answer
        assert b"--max-connections-per-client" in answer
        assert busy.recv(100)


def test_a_refusal_for_want_of_places_for_all_says_so_and_is_logged(monkeypatch):
    lines = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "warning", lines.append)
    with listening(max_connections=1, max_connections_per_client=9) as (port, _), asking(port, "/endless") as busy:
        assert busy.recv(100)
        with connect(port) as refused:
            answer = read_all(refused)
    assert b"all clients together have 1 of at most 1 connections open;" in answer
    assert b"--max-connections and" in answer
    assert ["A connection was refused: all clients together have 1 of" in line for line in lines] == [True]


def test_a_client_that_does_not_read_is_left():
    with listening(reading_timeout_s=0.3) as (port, state), connect(port) as connection:
        connection.sendall(HEAD.replace(b" / ", b" /endless ") + b"\r\n")
        wait_until(lambda: not state.connections, "it is still connected")


def test_a_slow_client_gets_all_of_an_answer():
    with (
        listening(request_timeout_s=0.3, reading_timeout_s=1) as (port, _),
        asking(port, "/large", BUFFER) as connection,
    ):
        connection.settimeout(30)
        began, received = time.monotonic(), 0
        while received < LARGE:
            part = connection.recv(256 << 10)
            assert part, f"it was cut after {received} bytes"
            received += len(part)
            time.sleep(max(0, began + 3 * received / LARGE - time.monotonic()))
        assert time.monotonic() - began > 2


@pytest.mark.parametrize("path", ["/large", "/broken"])
def test_an_answer_that_has_ended_is_not_kept_for_a_client_that_does_not_read(path):
    with (
        listening(send_buffer=SMALL_BUFFER, request_timeout_s=60, reading_timeout_s=0.5) as (port, state),
        asking(port, path),
    ):
        wait_until(lambda: state.connections, "it was not connected")
        time.sleep(0.2)
        assert state.connections, "nothing was left to send"
        wait_until(lambda: not state.connections, "it is still connected")


def test_a_connection_gives_way_when_its_answer_has_been_read():
    limits = {"max_connections": 1, "max_connections_per_client": 1, "reading_timeout_s": 2}
    with listening(**limits) as (port, _), asking(port, "/large", BUFFER) as reader:
        received = len(reader.recv(100))
        time.sleep(0.2)
        assert status(port) == b"503"
        while received < LARGE:
            received += len(reader.recv(1 << 20))
        wait_until(lambda: status(port) == b"200", "there is no place", within_s=3)  # uvicorn closes it after 5


def test_a_place_is_given_back_even_if_the_end_fails(monkeypatch):
    ends = H11Protocol.connection_lost

    def failing(connection, error):
        ends(connection, error)
        raise RuntimeError("the end fails")

    monkeypatch.setattr(H11Protocol, "connection_lost", failing)
    with listening(max_connections=2, max_connections_per_client=2) as (port, _):
        for _ in range(2):
            with asking(port, "/endless") as gone:
                assert gone.recv(100)
        wait_until(lambda: status(port) == b"200", "there is no place")


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_whom_an_address_counts_for(address, client):
    assert client_of(address) == client


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
        assert b"the system allows 48 of 8192 connections" in process.stdout.readline()
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


@pytest.mark.parametrize(("most", "reached"), [(10240, 10240), (3000, 2560), (100, 200)])
def test_where_the_system_refuses_descriptors_fewer_are_asked_for(monkeypatch, most, reached):
    taken = [200]

    def setrlimit(_, limits):
        if limits[0] > most:
            raise ValueError("current limit exceeds maximum limit")
        taken[0] = limits[0]

    system = {"RLIMIT_NOFILE": 0, "RLIM_INFINITY": -1, "setrlimit": setrlimit, "getrlimit": lambda _: (taken[0], -1)}
    monkeypatch.setattr(server_limits, "resource", SimpleNamespace(**system))
    room = room_for(100_000)
    assert taken == [reached]
    assert room.connections + room.queue + OTHER_DESCRIPTORS <= reached


def events_app(later):
    """An application that answers with two events by its generator, and between them with those of `later` by the
    connection's writer, if it has one."""

    async def application(scope, receive, send):
        writers = []

        async def events():
            yield "first;"
            for part in later:
                while writers and not writers[0].ready():
                    await asyncio.sleep(0.001)
                if writers:
                    writers[0].write(part)
                else:
                    yield part.decode()
            yield "last;"

        await EventStream(events(), writers.append)(scope, receive, send)

    return application


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_parts_that_are_written_directly_come_in_order_and_whole(version):
    later = [b"%d;" % number * 1000 for number in range(500)]
    whole = b"first;" + b"".join(later) + b"last;"
    with listening(events_app(later), send_buffer=SMALL_BUFFER) as (port, _), connect(port) as connection:
        connection.sendall(HEAD.replace(b"1.1", version.encode()) + b"\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.read() == whole
        assert (answer.getheader("Transfer-Encoding") == "chunked") == (version == "1.1")


def test_what_is_written_directly_to_a_client_that_has_gone_is_dropped():
    went = threading.Event()

    async def application(scope, receive, send):
        writers = []

        async def events():
            yield "first;"
            while writers[0].ready():
                writers[0].write(b"x" * 1000)
                await asyncio.sleep(0)
            went.set()
            yield "more;"
            await asyncio.sleep(20)

        await EventStream(events(), writers.append)(scope, receive, send)

    with listening(application) as (port, state):
        with connect(port) as connection:
            connection.sendall(HEAD + b"\r\n")
            assert connection.recv(100)
        assert went.wait(10)
        wait_until(lambda: not state.tasks, "it goes on")
