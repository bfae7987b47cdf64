"""TLS: the server speaks it itself, with the same limits on connections, half-made ones included."""

import contextlib
import gc
import socket
import ssl
import time
import weakref

import httpx
import openai
import pytest
import trustme

from pagemill.errors import ConfigError
from pagemill.server.access.connections import Connection
from pagemill.server.access.server_access import ServerAccess
from pagemill.server.access.tls import Certificate
from server.test_connections import BUFFER, HEAD, LARGE, connect, listening, read_all, wait_until

MODEL = "smollm2-135m"


class Issued:
    """A certificate for this machine in files, and what trusts who has issued it."""

    def __init__(self, folder):
        self.authority = trustme.CA()
        self.certfile, self.keyfile = folder / "cert.pem", folder / "key.pem"
        self.issue()
        self.trusting = ssl.create_default_context()
        self.authority.configure_trust(self.trusting)

    def issue(self):
        """Replaces the certificate; returns its serial number, as clients see it."""
        issued = self.authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(self.keyfile)
        self.certfile.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))


@pytest.fixture(scope="module")
def issued(tmp_path_factory):
    return Issued(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls(issued):
    return Certificate(issued.certfile, issued.keyfile).context


def secured(issued, port, room=None):
    """A connection that has shaken hands."""
    plain = socket.socket()
    plain.settimeout(10)
    if room is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    plain.connect(("127.0.0.1", port))
    return issued.trusting.wrap_socket(plain, server_hostname="localhost")


def status(issued, port, path="/"):
    with secured(issued, port) as connection:
        connection.sendall(HEAD.replace(b" / ", f" {path} ".encode()) + b"Connection: close\r\n\r\n")
        return read_all(connection).split()[1]


def test_openais_client_speaks_with_a_real_server(issued, serving):
    access = ServerAccess(api_key=["sk-a"], ssl_certfile=str(issued.certfile), ssl_keyfile=str(issued.keyfile))
    with serving(access=access, max_model_len=256, max_num_seqs=2, kv_memory="16MiB") as server:
        url = server.url.replace("http:", "https:")
        with (
            httpx.Client(verify=issued.trusting, timeout=60) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key="sk-a", max_retries=0, http_client=http) as client,
        ):
            question = [{"role": "user", "content": "Count to ten."}]
            how = {"model": MODEL, "messages": question, "max_tokens": 12, "temperature": 0}
            whole = client.chat.completions.create(**how).choices[0].message.content
            parts = client.chat.completions.create(**how, stream=True)
            assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health")
        server.wait_until_idle()


def test_requests_follow_each_other_on_a_connection(issued, tls):
    with listening(tls=tls) as (port, _), httpx.Client(verify=issued.trusting) as http:
        for _ in range(3):
            assert http.get(f"https://127.0.0.1:{port}/").text == "ok"


@pytest.mark.parametrize("beginning", [b"", b"\x16\x03\x01\x02", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_half_a_handshake_ends_in_time(tls, beginning):
    with listening(tls=tls, request_timeout_s=0.3) as (port, state), connect(port) as connection:
        connection.sendall(beginning)
        began = time.monotonic()
        read_all(connection)
        assert time.monotonic() - began < 5
        wait_until(lambda: not state.connections, "it is still connected")


def test_half_made_connections_give_way(issued, tls):
    limits = {"max_connections": 4, "max_connections_per_client": 4}
    with listening(tls=tls, **limits) as (port, _), contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(port)).sendall(b"\x16\x03\x01")
        for _ in range(4):
            assert status(issued, port) == b"200"


def test_nothing_is_kept_of_handshakes_that_fail(tls, monkeypatch):
    made, begins = [], Connection.__init__

    def noted(connection, *arguments, **more):
        made.append(weakref.ref(connection))
        begins(connection, *arguments, **more)

    def kept():
        gc.collect()
        return [one for one in (each() for each in made) if one is not None]

    monkeypatch.setattr(Connection, "__init__", noted)  # other servers of this process have connections too
    with listening(tls=tls, max_connections=2, max_connections_per_client=2, reading_timeout_s=0.2) as (port, _):
        with contextlib.ExitStack() as stack:
            for beginning in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01", b"") * 2:
                stack.enter_context(connect(port)).sendall(beginning)
            time.sleep(0.3)
        wait_until(lambda: not kept(), lambda: f"they are kept: {[vars(one) for one in kept()]}")
    assert len(made) == 6


def test_a_busy_connection_keeps_its_place(issued, tls):
    with listening(tls=tls, max_connections=1, max_connections_per_client=1) as (port, _):
        with secured(issued, port) as busy:
            busy.sendall(HEAD.replace(b" / ", b" /endless ") + b"\r\n")
            assert busy.recv(100)
            assert not _answers(issued, port)
            assert busy.recv(100)
        wait_until(lambda: _answers(issued, port), "there is no place")


def _answers(issued, port):
    with contextlib.suppress(OSError, IndexError):
        return status(issued, port) == b"200"


def test_a_slow_client_gets_all_of_an_answer(issued, tls):
    limits = {"request_timeout_s": 0.3, "reading_timeout_s": 1}
    with listening(tls=tls, **limits) as (port, _), secured(issued, port, BUFFER) as connection:
        connection.settimeout(30)
        connection.sendall(HEAD.replace(b" / ", b" /large ") + b"Connection: close\r\n\r\n")
        began, received = time.monotonic(), 0
        while received < LARGE:
            part = connection.recv(256 << 10)
            assert part, f"it was cut after {received} bytes"
            received += len(part)
            time.sleep(max(0, began + 2 * received / LARGE - time.monotonic()))


def test_a_client_that_does_not_read_is_left(issued, tls):
    with listening(tls=tls, reading_timeout_s=0.3) as (port, state), secured(issued, port) as connection:
        connection.sendall(HEAD.replace(b" / ", b" /endless ") + b"\r\n")
        wait_until(lambda: not state.connections, "it is still connected")


def test_another_certificate_is_shown_to_those_who_come(issued):
    certificate = Certificate(issued.certfile, issued.keyfile)

    def serial(port):
        with secured(issued, port) as connection:
            return connection.getpeercert()["serialNumber"]

    with listening(tls=certificate.context) as (port, _):
        before = serial(port)
        issued.issue()
        assert serial(port) == before
        certificate.reload()
        after = serial(port)
        assert after != before
        right = issued.keyfile.read_bytes()
        issued.keyfile.write_text("broken")
        with pytest.raises(ConfigError, match="cannot be used"):
            certificate.reload()
        assert serial(port) == after
        issued.keyfile.write_bytes(right)


def test_a_certificate_that_cannot_be_used_is_refused(issued, tmp_path):
    missing = tmp_path / "none.pem"
    with pytest.raises(ConfigError, match=r"none\.pem'.*No such file"):
        ServerAccess(ssl_certfile=str(missing)).certificate()
    other = Issued(tmp_path)
    with pytest.raises(ConfigError, match=r"(?i)mismatch"):
        ServerAccess(ssl_certfile=str(issued.certfile), ssl_keyfile=str(other.keyfile)).certificate()
    with pytest.raises(ConfigError, match="give ssl_certfile too"):
        ServerAccess(ssl_keyfile=str(other.keyfile))
