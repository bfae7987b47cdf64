"""Ways to annoy one server over HTTP, chosen at random: a tenant with a key, and callers without one."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from collections import Counter

import httpx

ITEMS = ["[]", "{}", "1", '""', '"a"', '"\\ud800"', "null", "[[]]", "1e999", '{"role":"user","content":"x"}']
FIELDS = ["stop", "bad_words", "allowed_token_ids", "stop_token_ids", "logit_bias", "prompt", "metadata", "tools"]
TEXTS = [
    '"\\ud800"',
    '"' + "x" * 100_000 + '"',
    "9" * 5000,
    "18446744073709551616",
    "-1",
    "[]",
    '{"\\ud800":1}',
    "null",
]
PLACES = ["model", "session_id", "fork_of", "cache_salt", "prompt", "seed", "n", "max_tokens", "priority", "nothing"]
KEPT = "kept"
"""The name of the other tenant's session and pin."""
TRESPASSES = [
    ("GET", f"/v1/sessions/{KEPT}", None),
    ("DELETE", f"/v1/sessions/{KEPT}", None),
    ("POST", f"/v1/sessions/{KEPT}/fork", {"session_id": "stolen"}),
    ("DELETE", f"/v1/pins/{KEPT}", None),
    ("DELETE", f"/v1/pins/{KEPT}?tenant=bystander", None),
    ("GET", "/v1/sessions?tenant=bystander", None),
    ("GET", "/v1/pins?all=true", None),
    ("GET", "/v1/tenants", None),
    ("PUT", "/v1/tenants/bystander", {"max_running": 1}),
    ("POST", "/v1/kv_memory", {"kv_memory": "used"}),
    ("GET", "/metrics", None),
]
"""Requests for what is the other tenant's, or an admin's."""
ENTRIES = [("chat/completions", "messages"), ("responses", "input"), ("messages", "messages"), ("embeddings", "input")]
"""Where lists are taken beside completions: endpoint and field."""
FORMS: list[dict[str, object]] = [
    {"regex": "((a{1000}){1000}){1000}"},
    {"regex": "(a|b)*a(a|b){400}"},
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"json": {"anyOf": [{"const": number} for number in range(3500)]}},
    {"json": {"type": "array", "minItems": 10**9, "items": {"type": "string", "maxLength": 10**9}}},
    {"grammar": 'start: e\ne: e e | "a" | '},
    {"choice": [f"choice {number}" for number in range(4096)]},
]
"""Forms of answers that are dear to compile or to follow."""
LARGEST = 8 << 20
MOST_HELD = 60
NOW = struct.pack("ii", 1, 0)
"""Linger for no time: a connection is reset, as that of a killed client is."""


class Attack:
    """Each way returns soon, whatever the server does. `step` does one of them."""

    def __init__(self, url: str, key: str, admin_key: str, source: str, seed: int) -> None:
        """key: of the tenant that most requests are from. source: the address that they come from."""
        self._url, self._key, self._admin_key, self._source = url, key, admin_key, source
        self._address = (httpx.URL(url).host, httpx.URL(url).port)
        self._random = random.Random(seed)
        self._held: list[socket.socket] = []
        self.statuses: Counter[str] = Counter()
        self.taken: list[str] = []
        """What it got that is not its own."""
        self._ways = [self.half_open, self.slow_body, self.lists, self.large_text, self.deep, self.odd_value]
        self._ways += [self.control, self.broken_http, self.hang_up, self.kill, self.unread, self.too_long]
        self._ways += [self.greedy, self.wrong_key, self.not_unicode, self.sip, self.trespass]
        self._ways += [self.dear_form]

    def step(self) -> None:
        with contextlib.suppress(OSError, httpx.HTTPError):
            self._random.choice(self._ways)()
        while len(self._held) > MOST_HELD:
            self._held.pop(self._random.randrange(len(self._held))).close()

    def close(self) -> None:
        for connection in self._held:
            connection.close()

    def half_open(self) -> None:
        for _ in range(10):
            self._hold(self._random.choice([b"", b"GET", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"]))

    def slow_body(self) -> None:
        length = self._random.choice([f"Content-Length: {LARGEST}", "Transfer-Encoding: chunked"])
        self._hold(self._head(length) + b"{" * self._random.randrange(300_000))

    def too_long(self) -> None:
        with self._connect() as connection:
            connection.sendall(self._head("Content-Length: 9000000") + b"{")
            self.statuses[connection.recv(100).split()[1].decode()] += 1

    def lists(self) -> None:
        item, field = self._random.choice(ITEMS), self._random.choice(FIELDS)
        count = self._random.choice([2000, 100_000, LARGEST // (len(item) + 1) - 50])
        path, beginning = "completions", f'{{"prompt":"x","{field}":['
        if self._random.random() < 0.3:
            path, field = self._random.choice(ENTRIES)
            beginning = f'{{"{field}":['
        self._post(path, beginning + ",".join([item] * count) + "]}")

    def large_text(self) -> None:
        text = self._random.choice(["ab cd ", "a", " ", "\\n", "日"]) * self._random.choice([2000, 100_000, 1_000_000])
        self._post("completions", f'{{"prompt":"{text}","max_tokens":1}}')

    def deep(self) -> None:
        text = self._random.choice(["[", '{"a":', '{"prompt":['])
        self._post("completions", text * self._random.choice([500, 500_000]))

    def dear_form(self) -> None:
        form = self._random.choice(FORMS)
        self._post("completions", json.dumps({"prompt": "x", "max_tokens": 20, "structured_outputs": form}))

    def not_unicode(self) -> None:
        body = b'{"prompt":"' + self._random.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00"]) + b'"}'
        self._post("completions", body)

    def odd_value(self) -> None:
        place, value = self._random.choice(PLACES), self._random.choice(TEXTS)
        self._post("completions", f'{{"max_tokens":1,"{place}":{value},"prompt":"x"}}')

    def control(self) -> None:
        value = self._random.choice(TEXTS)
        self._post("pins", f'{{"name":{value},"prompt":{value}}}')
        with self._client() as http:
            http.headers["Authorization"] = f"Bearer {self._admin_key}"
            size = value if value != "null" else 7
            self._count(http.post("/v1/kv_memory", content=f'{{"kv_memory":{size}}}'))
            self._count(http.put("/v1/tenants/%F0%9F", content=f'{{"weight":{value}}}'))
            for path in ("v1/tenants", "v1/pins", "v1/requests", "v1/sessions", "health"):
                self._count(http.get(f"/{path}"))

    def broken_http(self) -> None:
        head = "Host: localhost\r\n"
        pieces = [
            "GET / HTTP/1.1\r\n\r\n",
            "\x00\xff\x16\x03\x01",
            "GET /\r\n",
            "A" * 100_000,
            f"GET /version HTTP/1.1\r\n{head}\r\n" * 200,
            f"POST /v1/pins HTTP/1.1\r\n{head}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET",
            f"POST /v1/pins HTTP/1.1\r\n{head}Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
            f"GET /v1/models HTTP/1.1\r\n{head}Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        ]
        self._hold(self._random.choice(pieces).encode("latin-1"))

    def hang_up(self) -> None:
        body = {"prompt": "Once", "max_tokens": 50, "stream": True, "n": 2}
        with self._client() as http, http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_raw())

    def kill(self) -> None:
        """Does as a client that is killed in the middle of its stream."""
        with self._connect() as connection:
            connection.sendall(self._completion(max_tokens=100))
            connection.recv(1000)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NOW)

    def unread(self) -> None:
        self._hold(self._completion(max_tokens=200))

    def sip(self) -> None:
        """Reads a few bytes of what it has not read, as slow clients do."""
        for connection in self._held:
            with contextlib.suppress(OSError):
                connection.recv(64, socket.MSG_DONTWAIT)

    def trespass(self) -> None:
        """Reaches for what is not its own."""
        method, path, body = self._random.choice(TRESPASSES)
        with self._client() as http:
            answer = http.request(method, path, json=body)
            self._count(answer)
            if answer.status_code < 400:
                self.taken.append(f"{method} {path} was answered: {answer.text[:200]}")

    def greedy(self) -> None:
        """Asks for all rows, sessions and pins that the tenant can have, and more."""
        number = self._random.randrange(1000)
        self._post("completions", json.dumps({"prompt": "Once", "n": 16, "max_tokens": 30}))
        self._post("completions", json.dumps({"prompt": "Hi", "session_id": f"s{number}", "max_tokens": 1}))
        self._post("pins", json.dumps({"name": f"p{number}", "prompt": [number] * 400}))

    def wrong_key(self) -> None:
        key = self._random.choice(["", "wrong", "x" * 10_000, "\t", "bystander's"])
        with self._client() as http:
            headers = {"Authorization": f"Bearer {key}"}
            self._count(http.post("/v1/completions", content=b"[" * 100_000, headers=headers))

    def _head(self, length: str) -> bytes:
        lines = "POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"
        return "\r\n".join([*lines, f"Authorization: Bearer {self._key}", length, "", ""]).encode()

    def _completion(self, **fields: object) -> bytes:
        """Returns a request for a stream."""
        body = json.dumps({"prompt": "Once", "stream": True, "ignore_eos": True, **fields}).encode()
        return self._head(f"Content-Length: {len(body)}") + body

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=5, source_address=(self._source, 0))

    def _hold(self, data: bytes) -> None:
        connection = self._connect()
        self._held.append(connection)
        connection.sendall(data)

    def _client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        transport = httpx.HTTPTransport(local_address=self._source)
        return httpx.Client(base_url=self._url, headers=headers, transport=transport, timeout=20)

    def _post(self, path: str, body: str | bytes) -> None:
        with self._client() as http:
            self._count(http.post(f"/v1/{path}", content=body if isinstance(body, bytes) else body.encode()))

    def _count(self, response: httpx.Response) -> None:
        self.statuses[str(response.status_code)] += 1
