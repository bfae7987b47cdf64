"""Measures for how long requests of several kinds hold the front end's event loop, in which every stream runs.

    python -m benchmarks.front_end_stalls [--kinds NAME,NAME] [--rounds 3]

Starts a server of its own, sends each kind of request beside one stream, and prints the longest time by which the loop
was late meanwhile, as the server's own metric says it (`pagemill:event_loop_lag_max_seconds`): the least of the
rounds, since whatever else runs on the machine only adds to it. Beside it stand the most of the rounds, the longest gap
between two parts of the stream, in which the engine's steps count too, again the least of the rounds, and the seconds
that a round takes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

MODEL = "smollm2-135m"
SETTINGS = ["--max-model-len", "2048", "--kv-memory", "256MiB", "--max-num-seqs", "256"]
SETTINGS += ["--num-threads", "1"]  # a core is left for the front end, where there are two
LARGEST = 8 << 20
"""Bytes of the largest body that the server takes."""
LAG = re.compile(r"^pagemill:event_loop_lag_max_seconds\S* (\S+)$", re.MULTILINE)
PATIENCE_S = 40.0
JSON = {"Content-Type": "application/json"}


def filled(beginning: str, item: str, end: str) -> str:
    """Returns a body of nearly `LARGEST` bytes that repeats an item."""
    count = (LARGEST - len(beginning) - len(end)) // (len(item.encode()) + 1) - 1
    return beginning + ",".join([item] * count) + end


def post(http: httpx.Client, path: str, body: str | dict[str, object]) -> None:
    """Sends a body, and hangs up where its answer takes long."""
    content = body if isinstance(body, str) else json.dumps(body)
    with contextlib.suppress(httpx.ReadTimeout):
        http.post(f"/v1/{path}", content=content.encode(), headers=JSON, timeout=PATIENCE_S)


def completion(**fields: object) -> Callable[[httpx.Client], None]:
    return lambda http: post(http, "completions", fields)


def raw(path: str, body: str) -> Callable[[httpx.Client], None]:
    return lambda http: post(http, path, body)


def streams(http: httpx.Client, count: int, **fields: object) -> None:
    """Runs so many streams side by side."""

    def one(number: int) -> None:
        body = {"prompt": f"Story {number}", "stream": True, "ignore_eos": True, **fields}
        with http.stream("POST", "/v1/completions", json=body) as response:
            for _ in response.iter_raw():
                pass

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(one, range(count)))


def many_tenants(http: httpx.Client) -> None:
    for number in range(1500):
        http.put(f"/v1/tenants/tenant-{number}", json={})


def many_sessions(http: httpx.Client) -> None:
    for number in range(300):
        post(http, "completions", {**SMALL, "session_id": f"session-{number}"})


def watch(http: httpx.Client) -> None:
    """Reads the KV memory as a stream for some seconds."""
    end = time.monotonic() + 3
    with http.stream("GET", "/v1/kv_map") as response:
        for _ in response.iter_raw():
            if time.monotonic() > end:
                break


def get(path: str) -> Callable[[httpx.Client], object]:
    return lambda http: http.get(path)


PART = {"type": "text", "text": "x"}
MESSAGES = [{"role": "user", "content": [PART] * 4}] * 4096
SMALL: dict[str, object] = {"prompt": "Once", "max_tokens": 1}
ARGUMENTS = json.dumps({"a": [[]] * 15_000})
CALLED = {"id": "x", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
CALLS = [{"role": "user", "content": "x"}, *[{"role": "assistant", "tool_calls": [CALLED]}] * 4]
SCHEMA = {"type": "object", "properties": {f"field {n}": {"type": "string", "maxLength": n} for n in range(1200)}}

KINDS: dict[str, Callable[[httpx.Client], object]] = {
    "nothing": lambda http: time.sleep(1),
    "8 MB of []": raw("completions", filled('{"prompt":[', "[]", "]}")),
    "8 MB of [1]": raw("completions", filled('{"prompt":[', "[1]", "]}")),
    "8 MB of {}": raw("completions", filled('{"prompt":[', "{}", "]}")),
    '8 MB of "a"': raw("completions", filled('{"prompt":[', '"a"', "]}")),
    "8 MB of token ids, one prompt": raw("completions", filled('{"prompt":[', "1234", "]}")),
    "8 MB of token ids, 800 prompts": raw("completions", filled('{"prompt":[', json.dumps([1234] * 2000), "]}")),
    "a million token ids in allowed_token_ids": raw(
        "completions", '{"prompt":"x","max_tokens":1,"allowed_token_ids":[' + "12345," * 1_000_000 + "1]}"
    ),
    "8 MB of messages": raw("chat/completions", filled('{"messages":[', '{"role":"user","content":"x"}', "]}")),
    "8 MB of text": raw("completions", '{"prompt":"' + "ab cd " * (LARGEST // 6 - 100) + '"}'),
    "8 MB of escapes": raw("completions", '{"prompt":"' + "\\n" * (LARGEST // 2 - 100) + '"}'),
    "8 MB in a field that has no effect": raw("completions", filled('{"prompt":"x","metadata":[', "[]", "]}")),
    "8 MB of deep lists": raw("completions", "[" * (LARGEST - 10)),
    "8 MB that is not JSON by its type": lambda http: http.post(
        "/v1/completions", content=b"[]," * (LARGEST // 3 - 10), headers={"Content-Type": "text/plain"}
    ),
    "8 MB of [] for a pin": raw("pins", filled('{"name":"x","prompt":[', "[]", "]}")),
    "8 MB of [] for a tenant": lambda http: http.put(
        "/v1/tenants/x", content=filled('{"weight":[', "[]", "]}").encode(), headers=JSON
    ),
    "64 KiB of []": raw("completions", '{"prompt":[' + "[]," * 21000 + "[]]}"),
    "4,096 messages of 4 parts": raw("chat/completions", json.dumps({"messages": MESSAGES, "max_tokens": 1})),
    "4,096 prompts": completion(prompt=["x"] * 4096, max_tokens=1),
    "1,024 stops and bad words": completion(
        **SMALL, stop=[f"s{n}" for n in range(1024)], bad_words=[f"w{n}" for n in range(1024)]
    ),
    "16,384 biases": completion(**SMALL, logit_bias={str(n): 1 for n in range(16384)}),
    "n 64, 16 tokens, logprobs 20": completion(prompt="Once", n=64, max_tokens=16, logprobs=20, ignore_eos=True),
    "chat, n 64, 16 tokens, top_logprobs 20": lambda http: post(
        http,
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "n": 64,
            "max_tokens": 16,
            "logprobs": True,
            "top_logprobs": 20,
            "ignore_eos": True,
        },
    ),
    "8 x 300 tokens, logprobs 20": completion(prompt="Once", n=8, max_tokens=300, logprobs=20, ignore_eos=True),
    "echo of 1,900 tokens, logprobs 20": completion(prompt=[5] * 1900, echo=True, logprobs=20, max_tokens=1),
    "echo of 1,900 tokens, logprobs 20, streamed": completion(
        prompt=[5] * 1900, echo=True, logprobs=20, max_tokens=1, stream=True
    ),
    "3 echoes of 1,900 tokens, logprobs 20": completion(
        prompt=[[token] * 1900 for token in range(5, 8)], echo=True, logprobs=20, max_tokens=1
    ),
    "2,048 embeddings": raw("embeddings", json.dumps({"input": [[token] for token in range(2048)]})),
    "65,000 lists in arguments of calls": raw("chat/completions", json.dumps({"messages": CALLS, "max_tokens": 1})),
    "a schema of 64 KiB": completion(**SMALL, structured_outputs={"json": SCHEMA}),
    "1 MiB to tokenize": lambda http: http.post("/tokenize", json={"prompt": "ab cd " * 170_000}),
    "524,288 tokens to detokenize": lambda http: http.post("/detokenize", json={"tokens": [1234] * 524_288}),
    "64 streams": lambda http: streams(http, 64, max_tokens=30),
    "64 streams, logprobs 20": lambda http: streams(http, 64, max_tokens=30, logprobs=20),
    "make 1,500 tenants": many_tenants,
    "/metrics": get("/metrics"),
    "/v1/tenants": get("/v1/tenants"),
    "/openapi.json": get("/openapi.json"),
    "make 300 sessions": many_sessions,
    "/v1/sessions": get("/v1/sessions"),
    "/v1/kv_map": watch,
    "/v1/requests of 1,500": lambda http: listing_of_many(http),
}


def listing_of_many(http: httpx.Client) -> None:
    """Lists requests while one has 1,500 prompts under way."""
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": ["x"] * 1500, "max_tokens": 1}
        answer = pool.submit(post, http, "completions", json.dumps(body))
        while not answer.done():
            http.get("/v1/requests")
            time.sleep(0.1)


@contextlib.contextmanager
def server(settings: Sequence[str] = SETTINGS) -> Iterator[str]:
    """Runs a server of its own, and gives its URL."""
    command = [sys.executable, "-m", "pagemill", "serve", MODEL, "--port", "0", *settings]
    with tempfile.NamedTemporaryFile("a") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            while (found := re.search(r"curl (http://\S+)/v1/", Path(log.name).read_text())) is None:
                assert process.poll() is None, Path(log.name).read_text()
                time.sleep(0.1)
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


class Gap:
    """The longest time between two parts of a stream since it was last asked for, in milliseconds."""

    def __init__(self) -> None:
        self._longest_s, self._last_s = 0.0, math.inf

    def note(self) -> None:
        now = time.perf_counter()
        self._longest_s, self._last_s = max(self._longest_s, now - self._last_s), now

    def begin(self) -> None:
        """Says that another stream begins."""
        self._last_s = math.inf

    def longest(self) -> float:
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s * 1000


def stream_until(url: str, stop: threading.Event, gap: Gap) -> None:
    """Reads streams, one after another."""
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True, "priority": -1000}
    while not stop.is_set():
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            gap.begin()
            for _ in response.iter_raw():
                gap.note()
                if stop.is_set():
                    break


def longest_lag(http: httpx.Client) -> float:
    """Returns the longest lag since the last call, in milliseconds."""
    found = LAG.search(http.get("/metrics").text)
    assert found is not None
    return float(found[1]) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="beginnings of names, separated by semicolons")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    wanted = tuple(options.kinds.split(";")) if options.kinds != ",".join(KINDS) else ("",)
    with server() as url, httpx.Client(base_url=url, timeout=120) as http:
        stop, gap = threading.Event(), Gap()
        reader = threading.Thread(target=stream_until, args=(url, stop, gap))
        reader.start()
        try:
            for name, ask in KINDS.items():
                if not name.startswith(wanted):
                    continue
                lags, gaps = [], []
                began = time.perf_counter()
                for _ in range(1 if name.startswith("make") else options.rounds):
                    longest_lag(http)
                    gap.longest()
                    ask(http)
                    time.sleep(0.05)
                    lags.append(longest_lag(http))
                    gaps.append(gap.longest())
                took = (time.perf_counter() - began) / len(lags)
                print(f"| {name} | {min(lags):.1f} | {max(lags):.1f} | {min(gaps):.0f} | {took:.2f} |", flush=True)
        finally:
            stop.set()
            reader.join()


if __name__ == "__main__":
    main()
