"""Attacks a server over HTTP for a while, beside one stream whose gaps are measured (`make attack`).

    python tests/attack/attack.py [--seconds 600] [--seed 0] [--threads 8]

Half-open, idle and unread connections, slow and large bodies, long lists, deep JSON, halves of surrogate pairs, broken
HTTP, hang-ups, wrong control requests. Afterwards the server must hold no block, answer a request, have kept its
memory and its log small, and end when it is told to. Prints what it found as JSON, and ends with status 1 if one of
these failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

MODEL = "smollm2-135m"
SETTINGS = ["--max-model-len", "2048", "--kv-memory", "128MiB", "--max-num-seqs", "16", "--request-timeout-s", "3"]
DOORS = ["--allowed-hosts", "x", "--log-level", "warning"]
LIMITS = ["--max-connections", "512", "--max-bodies-bytes", str(64 << 20)]
MOST_MEMORY = 2 << 30
"""Bytes that the front end may have had resident."""
LONGEST_GAP_S = 2.0
"""Between two parts of the stream. Reading 8 MB of lists takes the front end a third of a second on a quiet core."""
MOST_LOG = 64 << 10
LONGEST_END_S = 20.0
REFUSALS = ("400", "413")
"""Statuses that some of the attacks bring, if they arrive."""

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


class Attack:
    """Ways to annoy one server. Each returns soon, whatever the server does."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._address = (httpx.URL(url).host, httpx.URL(url).port)
        self._random = random.Random(seed)
        self._held: list[socket.socket] = []
        self.statuses: Counter[str] = Counter()

    def step(self) -> None:
        """Does one of them."""
        ways = [self.half_open, self.slow_body, self.lists, self.large_text, self.deep, self.odd_value, self.control]
        ways += [self.broken_http, self.hang_up, self.unread, self.too_long]
        way = self._random.choice(ways)
        with contextlib.suppress(OSError, httpx.HTTPError):
            way()
        while len(self._held) > 60:
            self._held.pop(self._random.randrange(len(self._held))).close()

    def close(self) -> None:
        for connection in self._held:
            connection.close()

    def half_open(self) -> None:
        for _ in range(10):
            self._hold(self._random.choice([b"", b"GET", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"]))

    def slow_body(self) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        length = (
            b"Content-Length: 8000000\r\n\r\n" if self._random.random() < 0.5 else b"Transfer-Encoding: chunked\r\n\r\n"
        )
        self._hold(head + length + b"{" * self._random.randrange(300_000))

    def too_long(self) -> None:
        with socket.create_connection(self._address, timeout=5) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n{")
            self.statuses[connection.recv(100).split()[1].decode()] += 1

    def lists(self) -> None:
        item, field = self._random.choice(ITEMS), self._random.choice(FIELDS)
        count = self._random.choice([2000, 100_000, (8 << 20) // (len(item) + 1) - 50])
        path, beginning = "completions", f'{{"prompt":"x","{field}":['
        if self._random.random() < 0.3:
            path, beginning = "chat/completions", '{"messages":['
        self._post(path, beginning + ",".join([item] * count) + "]}")

    def large_text(self) -> None:
        text = self._random.choice(["ab cd ", "a", " ", "\\n", "日"]) * self._random.choice([2000, 100_000, 1_000_000])
        self._post("completions", f'{{"prompt":"{text}","max_tokens":1}}')

    def deep(self) -> None:
        self._post(
            "completions", self._random.choice(["[", '{"a":', '{"prompt":[']) * self._random.choice([500, 500_000])
        )

    def odd_value(self) -> None:
        place, value = self._random.choice(PLACES), self._random.choice(TEXTS)
        self._post("completions", f'{{"max_tokens":1,"{place}":{value},"prompt":"x"}}')

    def control(self) -> None:
        value = self._random.choice(TEXTS)
        self._post("kv_memory", f'{{"kv_memory":{value if value != "null" else 7}}}')
        self._post("pins", f'{{"name":{value},"prompt":{value}}}')
        with httpx.Client(timeout=20) as http:
            self._count(http.put(f"{self._url}/v1/tenants/%F0%9F", content=f'{{"weight":{value}}}'))
            for path in ("metrics", "v1/tenants", "v1/pins", "v1/requests", "health"):
                self._count(http.get(f"{self._url}/{path}"))

    def broken_http(self) -> None:
        pieces = [
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00\xff\x16\x03\x01",
            b"GET /\r\n",
            b"A" * 100_000,
            b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 200,
        ]
        pieces.append(
            b"POST /v1/pins HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET"
        )
        pieces.append(b"POST /v1/pins HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n")
        pieces.append(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        self._hold(self._random.choice(pieces))

    def hang_up(self) -> None:
        body = {"prompt": "Once", "max_tokens": 50, "stream": True, "n": 2}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=20) as response:
            next(response.iter_raw())

    def unread(self) -> None:
        body = json.dumps({"prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        self._hold(head.encode() + b"\r\n\r\n" + body)

    def _hold(self, data: bytes) -> None:
        connection = socket.create_connection(self._address, timeout=5)
        self._held.append(connection)
        connection.sendall(data)

    def _post(self, path: str, body: str) -> None:
        headers = {"Content-Type": "application/json"}
        with httpx.Client(timeout=60) as http:
            self._count(http.post(f"{self._url}/v1/{path}", content=body.encode(), headers=headers))

    def _count(self, response: httpx.Response) -> None:
        self.statuses[str(response.status_code)] += 1


def largest_gap(url: str, stop: threading.Event) -> float:
    """Reads streams, one after another, and returns the longest time between two parts of one, in seconds."""
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True, "priority": -1000}
    largest = 0.0
    while not stop.is_set():
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            response.raise_for_status()
            last = None
            for _ in response.iter_lines():
                now = time.perf_counter()
                largest = max(largest, now - (last or now))
                last = now
                if stop.is_set():
                    break
    return largest


def run(seconds: float, seed: int, num_threads: int) -> dict[str, object]:
    """Attacks a new server. Returns what was found; `failed` lists what must not be so."""
    command = [sys.executable, "-m", "pagemill", "serve", MODEL, "--port", "0", *SETTINGS, *DOORS, *LIMITS]
    failed = []
    with tempfile.NamedTemporaryFile("a") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            url = _url(server, Path(log.name))
            front = psutil.Process(server.pid)
            memory, stop, gaps = [0], threading.Event(), [0.0]
            attacks = [Attack(url, seed * 1000 + number) for number in range(num_threads)]
            reader = threading.Thread(target=lambda: gaps.append(largest_gap(url, stop)))
            reader.start()

            def work(attack: Attack) -> None:
                while not stop.is_set():
                    attack.step()

            threads = [threading.Thread(target=work, args=(attack,)) for attack in attacks]
            for thread in threads:
                thread.start()
            end = time.monotonic() + seconds
            while time.monotonic() < end and server.poll() is None:
                memory.append(front.memory_info().rss)
                time.sleep(0.02)
            stop.set()
            for thread in [*threads, reader]:
                thread.join(90)
            if len(gaps) < 2:
                failed.append("the stream broke off")
            for attack in attacks:
                attack.close()
            failed += _after(url)
        finally:
            began = time.monotonic()
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
            ended_s = time.monotonic() - began
            server.kill()
        written = Path(log.name).read_text()
    statuses = sum((attack.statuses for attack in attacks), Counter())
    found = {
        "answers": dict(sorted(statuses.items())),
        "largest_gap_s": round(max(gaps), 3),
        "memory_mib": max(memory) >> 20,
        "log_bytes": len(written),
        "ended_s": round(ended_s, 2),
        "status": server.returncode,
    }
    limits = {
        "largest_gap_s": LONGEST_GAP_S,
        "memory_mib": MOST_MEMORY >> 20,
        "log_bytes": MOST_LOG,
        "ended_s": LONGEST_END_S,
    }
    failed += [f"{name} is over {limit}" for name, limit in limits.items() if found[name] > limit]
    failed += [f"no attack was refused with {status}" for status in REFUSALS if not statuses[status]]
    failed += ["there were answers of status 500"] * bool(statuses["500"]) + ["status"] * (server.returncode != 0)
    return {**found, "failed": failed, "log": written[-2000:] if failed else ""}


def _url(server: subprocess.Popen[bytes], log: Path) -> str:
    """Returns where the server listens, once it is ready."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        if (found := re.search(r"curl (http://\S+)/v1/", log.read_text())) is not None:
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {log.read_text()}")


def _after(url: str) -> list[str]:
    """Returns what is not as it was before the attack."""
    deadline = time.monotonic() + 60
    with httpx.Client(base_url=url, timeout=60) as http:
        while 'kv_blocks{state="active"} 0.0' not in http.get("/metrics").text:
            if time.monotonic() > deadline:
                return ["blocks are still held"]
            time.sleep(0.2)
        answer = http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
        return [] if answer.status_code == 200 else [f"afterwards: {answer.text}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8)
    options = parser.parse_args()
    found = run(options.seconds, options.seed, options.threads)
    print(json.dumps(found, indent=1))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
