"""Measures what the server costs beside its engine, and how many streams it holds.

    python -m benchmarks.server_load [--parts cost,first-byte,streams] [--threads 1] [--streams 4000]

- cost: 64 streams at once, against the engine alone in this process with the same prompts, in turn; and the processor's
  seconds of the server's front end, without its engine.
- first-byte: the time until the first byte of an answer, one request after another beside 64 streams.
- streams: so many streams open at once, and the memory of the front end for each.

The clients read bytes and do not look into them, in one thread of this process. With one thread for the engine, where
there are two cores, the other one is for server and clients. Each part says how late the event loop was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import selectors
import socket
import statistics
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import httpx
from benchmarks.front_end_stalls import JSON, MODEL, server

TOKENS = 64
"""Tokens of an answer where the time per token is measured."""
RUNNING = 64
PROBES = 80
BACKGROUND_TOKENS = 128
"""Tokens of the answers that run beside those probes: the pool has room for all of them."""
FEW_TOKENS = 2
"""Tokens of each of many streams."""
AT_ONCE = 256
"""Sequences that run while many streams are open."""
KIB = 1024
END = b"0\r\n\r\n"
LAGS = re.compile(r"^pagemill:event_loop_lag_(\w+)\{(?:[^}]*\ble=\"([^\"]+)\")?[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(eq=False)
class Stream:
    """One client. Times are seconds of `time.perf_counter()`."""

    sock: socket.socket
    sent_s: float = 0.0
    first_s: float = 0.0
    end: bytes = b""

    def send(self, address: str, body: dict[str, object]) -> None:
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: {JSON['Content-Type']}\r\n"
        self.sent_s, self.end = time.perf_counter(), b""
        self.sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)

    def take(self) -> bool:
        """Takes what has come. Returns whether the answer is whole."""
        data = self.sock.recv(1 << 16)
        if not self.first_s:
            self.first_s = time.perf_counter()
            assert data.startswith(b"HTTP/1.1 200"), data
        self.end = (self.end + data[-len(END) :])[-len(END) :]
        assert data, "the server closed a connection"
        return self.end == END


class Server:
    """A running server as its clients and the system see it."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
        self.address = urllib.parse.urlsplit(url).netloc
        host, port = self.address.split(":")
        self._place = host, int(port)
        self.pid = next(pid for pid in children(os.getpid()) if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def connect(self) -> Stream:
        return Stream(socket.create_connection(self._place))

    def run(self, bodies: list[dict[str, object]]) -> tuple[list[Stream], float]:
        """Runs streams at once, on connections that are made before. Returns them, and the seconds that all took."""
        streams = [self.connect() for _ in bodies]
        selector = selectors.DefaultSelector()
        began_s, left = time.perf_counter(), len(streams)
        for stream, body in zip(streams, bodies, strict=True):
            stream.send(self.address, body)
            selector.register(stream.sock, selectors.EVENT_READ, stream)
        while left:
            for key, _ in selector.select():
                if key.data.take():
                    selector.unregister(key.fileobj)
                    key.data.sock.close()
                    left -= 1
        return streams, time.perf_counter() - began_s

    def processor_s(self) -> float:
        """Returns the processor's seconds that the front end has taken."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self, which: str) -> int:
        """Returns the front end's bytes: VmRSS now, VmHWM at most since `forget_peak`."""
        found = re.search(rf"^{which}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) * KIB

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def lags(self) -> dict[str, float]:
        """Returns the event loop's lags since the start by bucket, and the longest since the last call."""
        return {f"{kind}{le}": float(value) for kind, le, value in LAGS.findall(self.http.get("/metrics").text)}

    def lag_since(self, before: dict[str, float]) -> str:
        now = self.lags()
        looks = now["seconds_count"] - before["seconds_count"]
        late = looks - (now["seconds_bucket0.02"] - before["seconds_bucket0.02"])
        return f"{now['max_seconds'] * 1000:.0f} ms at most, above 20 ms in {late / looks:.2%} of looks"


def children(pid: int) -> list[int]:
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for each in found for child in each]


def body(number: int, tokens: int) -> dict[str, object]:
    return {
        "prompt": f"Story {number}",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def measure_cost(settings: list[str], threads: int, rounds: int) -> None:
    from pagemill import LLM, SamplingParams

    bodies = [body(number, TOKENS) for number in range(RUNNING)]
    prompts = [str(each["prompt"]) for each in bodies]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    count = RUNNING * TOKENS
    with (
        server(settings) as url,
        LLM(MODEL, max_model_len=2048, kv_memory="512MiB", max_num_seqs=RUNNING, num_threads=threads) as llm,
    ):
        asked = Server(url)
        asked.run([body(number, FEW_TOKENS) for number in range(RUNNING)])
        llm.generate(prompts, SamplingParams(max_tokens=FEW_TOKENS), use_tqdm=False)
        ratios, costs = [], []
        before = asked.lags()
        for number in range(rounds):
            llm.reset_prefix_cache()
            began_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            alone_s = time.perf_counter() - began_s
            processor_s, own_s = asked.processor_s(), time.process_time()
            _, took_s = asked.run([{**each, "cache_salt": f"{number}"} for each in bodies])
            costs.append((asked.processor_s() - processor_s) / count)
            ratios.append(alone_s / took_s)
            print(
                f"round {number + 1}: engine alone {count / alone_s:.0f} tokens/s, through HTTP {count / took_s:.0f} "
                f"({ratios[-1]:.3f}); front end {costs[-1] * 1e6:.0f} µs of processor per token, "
                f"{costs[-1] * count / took_s:.1%} of a core; clients {(time.process_time() - own_s) / took_s:.1%}",
                flush=True,
            )
        step_ms = 1000 * took_s / TOKENS
        print(
            f"median: {statistics.median(ratios):.3f} of the engine's throughput; front end "
            f"{statistics.median(costs) * 1e6:.0f} µs per token, {statistics.median(costs) * RUNNING * 1000:.1f} ms of "
            f"processor for each step of {step_ms:.0f} ms; event loop late {asked.lag_since(before)}"
        )


def measure_first_byte(settings: list[str]) -> None:
    with server(settings) as url:
        asked = Server(url)
        background = [asked.connect() for _ in range(RUNNING)]
        selector = selectors.DefaultSelector()
        for number, stream in enumerate(background):
            stream.send(asked.address, body(number, BACKGROUND_TOKENS))
            selector.register(stream.sock, selectors.EVENT_READ, stream)

        def take(stream: Stream) -> bool:
            """Takes what has come of an answer; another one of the background follows where one is whole."""
            whole = stream.take()
            if whole and stream in background:
                stream.send(asked.address, body(background.index(stream), BACKGROUND_TOKENS))
            return whole

        until_s = time.perf_counter() + 3
        while time.perf_counter() < until_s:
            for key, _ in selector.select(0.1):
                take(key.data)
        before, firsts, others = asked.lags(), [], []
        for number in range(PROBES):
            probe = asked.connect()
            selector.register(probe.sock, selectors.EVENT_READ, probe)
            probe.send(asked.address, {**body(1000 + number, 1), "max_tokens": 1})
            ended = False
            while not ended:
                for key, _ in selector.select():
                    whole = take(key.data)
                    ended = ended or (whole and key.data is probe)
            selector.unregister(probe.sock)
            probe.sock.close()
            firsts.append(probe.first_s - probe.sent_s)
            began_s = time.perf_counter()
            asked.http.get("/version")
            others.append(time.perf_counter() - began_s)
        for name, times in (("first byte of an answer", firsts), ("answer of /version", others)):
            ordered = sorted(times)
            p50, p99 = (ordered[int(len(ordered) * share)] * 1000 for share in (0.5, 0.99))
            print(f"{name} beside {RUNNING} streams, of {len(times)}: median {p50:.0f} ms, p99 {p99:.0f} ms")
        print(f"event loop late {asked.lag_since(before)}")


def measure_streams(settings: list[str], count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, count + 256), hard), hard))
    with server(settings) as url:
        asked = Server(url)
        asked.run([body(number, FEW_TOKENS) for number in range(AT_ONCE)])
        asked.forget_peak()
        before, lags, processor_s = asked.memory("VmRSS"), asked.lags(), asked.processor_s()
        streams, took_s = asked.run([body(number, FEW_TOKENS) for number in range(count)])
        each = (asked.memory("VmHWM") - before) / count
        waited = sorted(stream.first_s - stream.sent_s for stream in streams)
        print(
            f"{count} streams of {FEW_TOKENS} tokens, all whole, in {took_s:.1f} s, first bytes after "
            f"{waited[0]:.1f} to {waited[-1]:.1f} s; the front end has {before / KIB**2:.0f} MiB without them and "
            f"{each / KIB:.1f} KiB more for each at most; {1000 * (asked.processor_s() - processor_s) / count:.2f} ms "
            f"of processor for each; event loop late {asked.lag_since(lags)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="cost,first-byte,streams", help="what to measure, separated by commas")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=4000)
    options = parser.parse_args()
    settings = ["--max-model-len", "2048", "--kv-memory", "512MiB", "--num-threads", str(options.threads)]
    settings += ["--log-level", "warning"]
    for part in options.parts.split(","):
        if part == "cost":
            measure_cost([*settings, "--max-num-seqs", str(RUNNING)], options.threads, options.rounds)
        elif part == "first-byte":
            measure_first_byte([*settings, "--max-num-seqs", str(RUNNING + 8)])
        elif part == "streams":
            measure_streams([*settings, "--max-num-seqs", str(AT_ONCE)], options.streams)
        else:
            parser.error(f"there is no part {part!r}; name cost, first-byte or streams")


if __name__ == "__main__":
    main()
