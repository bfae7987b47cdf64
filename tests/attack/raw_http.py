"""Requests that break the rules of HTTP or of JSON, each with the statuses that it may be answered with."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BAD, CLOSED = "400", ""
ENOUGH = 1 << 16
PATIENCE_S = 20.0
MORE_S = 0.3
"""How long something more may take to come behind an answer."""


def requests(key: str) -> dict[str, tuple[bytes, set[str], str]]:
    """Returns by name: what is sent, how it may be answered, and words that the answer must have."""
    head = f"{HEAD}Authorization: Bearer {key}\r\n"

    def posted(body: bytes) -> bytes:
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    return {
        "no host": (b"GET /version HTTP/1.1\r\n\r\n", {BAD}, ""),
        "two hosts": (b"GET /version HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", {BAD}, ""),
        "no version": (b"GET /version\r\n\r\n", {BAD, CLOSED}, ""),
        "not HTTP": (b"\x16\x03\x01\x00\xff", {BAD, CLOSED}, ""),
        "a null in a header": (b"GET /version HTTP/1.1\r\nHost: localhost\r\nA: \x00\r\n\r\n", {BAD}, ""),
        "a space before the colon": (b"GET /version HTTP/1.1\r\nHost : localhost\r\n\r\n", {BAD}, ""),
        "a long head": (b"GET /version HTTP/1.1\r\nA: " + b"x" * (17 << 10), {BAD, "431"}, ""),
        "two lengths": (f"{head}Content-Length: 1\r\nContent-Length: 2\r\n\r\n{{}}".encode(), {BAD}, ""),
        "a negative length": (f"{head}Content-Length: -1\r\n\r\n".encode(), {BAD}, ""),
        "a length with a sign": (f"{head}Content-Length: +2\r\n\r\n{{}}".encode(), {BAD}, ""),
        "a length in hexadecimal": (f"{head}Content-Length: 0x2\r\n\r\n{{}}".encode(), {BAD}, ""),
        "a length of many digits": (f"{head}Content-Length: {'9' * 30}\r\n\r\n".encode(), {BAD, "413"}, ""),
        "a length that is too long": (f"{head}Content-Length: 9000000\r\n\r\n".encode(), {"413"}, "8388608"),
        "another coding": (f"{head}Transfer-Encoding: gzip\r\n\r\n".encode(), {BAD, "501"}, ""),
        "a coding behind chunks": (f"{head}Transfer-Encoding: chunked, gzip\r\n\r\n".encode(), {BAD, "501"}, ""),
        "a coding that hides": (f"{head}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n".encode(), {BAD, "501"}, ""),
        "a chunk without a size": (f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode(), {BAD}, ""),
        "a chunk of many digits": (f"{head}Transfer-Encoding: chunked\r\n\r\n{'f' * 30}\r\n".encode(), {BAD}, ""),
        "a chunk that goes on": (f"{head}Transfer-Encoding: chunked\r\n\r\n1\r\n{{}}\r\n0\r\n\r\n".encode(), {BAD}, ""),
        "invalid UTF-8": (posted(b'{"prompt":"\xff"}'), {BAD}, "can't decode byte 0xff"),
        "an overlong character": (posted(b'{"prompt":"\xc0\x80"}'), {BAD}, "can't decode byte"),
        "half of a pair": (posted(b'{"prompt":"\\ud800"}'), {BAD}, "half of a surrogate pair"),
        "half of a pair as a name": (posted(b'{"\\ud800":1}'), {BAD}, "ud800"),
        "a bias of many digits": (posted(b'{"prompt":"x","logit_bias":{"%s":1}}' % (b"9" * 5000)), {BAD}, "logit_bias"),
        "deep lists": (posted(b"[" * 50_000), {BAD}, "too deep in one another"),
        "deep objects": (posted(b'{"a":' * 300_000), {BAD}, "too deep in one another"),
        "no JSON": (posted(b"{"), {BAD}, "is not JSON"),
        "an empty body": (posted(b""), {BAD}, ""),
    }


def wrong_answers(address: tuple[str, int], key: str) -> list[str]:
    """Sends all of them, and returns what was answered otherwise."""
    wrong, asked = [], requests(key)
    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(lambda one: _answer(address, one[0]), asked.values())]
    for (name, (_, allowed, words)), (status, text) in zip(asked.items(), answers, strict=True):
        if status not in allowed or words not in text:
            wrong.append(f"{name}: {status or 'closed'} {text[-300:]!r}")
    return wrong + _smuggled(address, key)


def _smuggled(address: tuple[str, int], key: str) -> list[str]:
    """Returns what was answered where a body's length is said twice: a request behind the shorter one must not be
    answered, for a proxy before this server may have taken it for the body."""
    hidden = "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"{HEAD}Authorization: Bearer {key}\r\nContent-Length: {5 + len(hidden)}\r\nTransfer-Encoding: chunked\r\n"
    _, text = _answer(address, f"{head}\r\n0\r\n\r\n{hidden}".encode())
    return ["a hidden request was answered"] if '"version"' in text else []


def _answer(address: tuple[str, int], data: bytes) -> tuple[str, str]:
    """Returns the status of the first answer, and all that has come until the server or we wait."""
    received = b""
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        try:
            connection.sendall(data)
            while len(received) < ENOUGH and (part := connection.recv(ENOUGH)):
                received += part
                connection.settimeout(MORE_S)
        except OSError:
            pass
    words = received.split(maxsplit=2)
    return words[1].decode("latin-1") if len(words) > 1 else "", received.decode("utf-8", "replace")
