"""A soak of a whole server: random clients of several tenants, while its engine is killed, and the server is stopped,
started again, and given other keys, limits and sizes of its pool (`make soak-server`).

    python -m tests.soak.clients [--seconds 600] [--seed 0] [--clients 8] [--pause 4]

Clients stream and do not, chat, complete, embed and tokenize, go on in sessions and responses, fork, pin, call tools,
hold answers to forms, hang up, flood, and send garbage. Every answer must be the one that was given before, when all
was calm; one with a form must have it; what was said in a session must be kept; an error must be one that may come
then, in OpenAI's shape, with a way out, and say when to come again where that helps. In the end nothing runs or waits,
every block is free, descriptors are as before, and the server stops with status 0 and no traceback in its log. Prints
what was done as JSON, and ends with status 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.attack.attacked_server import Server
from tests.soak.asked import CHATS, KNOWN, RESPONSES, SCRIPTS, TURN, whole
from tests.soak.client import Client

SETTINGS = ["--max-model-len", "512", "--kv-host-memory", "8MiB", "--kv-disk-memory", "64MiB", "--max-num-seqs", "8"]
SETTINGS += ["--num-threads", "1", "--drain-timeout", "1", "--max-engine-restarts", "1000", "--log-level", "warning"]
SETTINGS += ["--engine-restart-window-s", "5", "--max-failed-keys", "1000000", "--max-sessions", "100000"]
SETTINGS += ["--chat-template", "tests/data/templates/hermes.jinja"]
SIZE, OTHER_SIZES = "48MiB", ("32MiB", "40MiB", "64MiB")
"""Of the pool: all of them hold every request."""
ADMIN, GUEST = "admin's", "guest"
TENANTS: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {},
    GUEST: {},
    "crowd": {"max_waiting": 4, "max_running": 3, "requests_per_minute": 300},
}
"""Each has its name as a key."""
OTHER_LIMITS: list[dict[str, Any]] = [{}, {"max_running": 3}, {"max_running": 4, "weight": 0.5}, {"max_blocks": "60%"}]
RELOADED_S = 3.0
"""After which a changed file of tenants has been read."""
PATIENCE_S = 30.0
MORE_DESCRIPTORS = 10


class Fate:
    """What happens to the server. The `random` that chooses is its own, so the same seed does the same in turn."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._random, self._tenants = random.Random(seed), folder / "tenants.json"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._settings = [*SETTINGS, "--port", str(port), "--kv-memory", SIZE, "--tenants", str(self._tenants)]
        self._settings += ["--kv-disk-path", str(folder / "kv"), "--session-path", str(folder / "sessions")]
        self.url = f"http://127.0.0.1:{port}"
        self.is_over = threading.Event()
        self.counts: Counter[str] = Counter()
        self.logs: list[str] = []
        self.statuses: list[int | None] = []
        self._away: list[list[float]] = []
        self._disturbed: list[list[float]] = []
        self._known: list[bool] = []
        """Says of each version of the tenants file, the oldest first, whether it has the guest's key."""
        self._replaced: list[float] = []
        """Holds the times at which the server was seen to know the version that follows each of them."""
        self._write_tenants(True)
        self._ways = [self.kill_engine, self.restart, self.edit_tenants, self.resize, self.shrink]

    def start(self) -> None:
        self.server = Server(self._settings)
        self.server.__enter__()

    def stop(self) -> None:
        self.server.__exit__()
        self.logs.append(self.server.log)
        self.statuses.append(self.server.process.returncode)

    def go_on(self, seconds: float, pause_s: float) -> None:
        """Lets things happen for so long, and each at least once. All is well again at the end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end or min(self.counts[way.__name__] for way in self._ways) == 0:
            for way in self._random.sample(self._ways, len(self._ways)):
                time.sleep(self._random.uniform(0.5, 1.5) * pause_s)
                way()
                self.counts[way.__name__] += 1
        self._write_tenants(True)
        self._wait_until_guest(True)
        self._set_size(SIZE)
        time.sleep(RELOADED_S)

    # What happens

    def kill_engine(self) -> None:
        self._disturb(self._disturbed)
        self.engine().kill()
        self._wait_until_well()
        self._calm(self._disturbed)

    def restart(self) -> None:
        for what in (self._away, self._disturbed):
            self._disturb(what)
        self.stop()
        self.start()
        for what in (self._away, self._disturbed):
            self._calm(what)

    def edit_tenants(self) -> None:
        """Takes the guest's key away, or gives it back, and changes limits; waits until the server has seen it."""
        self._write_tenants(with_guest := not self._known[-1])
        if self._random.random() < 0.5:
            self.server.process.send_signal(signal.SIGHUP)
        self._wait_until_guest(with_guest)

    def resize(self) -> None:
        self._set_size(self._random.choice(OTHER_SIZES))

    def shrink(self) -> None:
        """Takes the pool away as far as it goes, and gives it back."""
        self._disturb(self._disturbed)
        self.server.process.send_signal(signal.SIGUSR1)
        time.sleep(self._random.uniform(0.2, 1.0))
        self.server.process.send_signal(signal.SIGUSR2)
        time.sleep(0.2)
        self._set_size(SIZE)
        self._calm(self._disturbed)

    # What clients may know of it

    def was_away(self, since_s: float) -> bool:
        return any(end_s >= since_s for _, end_s in self._away)

    def was_disturbed(self, since_s: float) -> bool:
        return any(end_s >= since_s for _, end_s in self._disturbed)

    def knew(self, key: str, since_s: float) -> tuple[bool, bool]:
        if key != GUEST:
            return True, True
        known = [*self._known]
        ends = chain(self._replaced, repeat(float("inf")))
        states = [is_known for is_known, end_s in zip(known, ends, strict=False) if end_s > since_s - RELOADED_S]
        return all(states), any(states)

    def front(self) -> psutil.Process:
        return psutil.Process(self.server.process.pid)

    def engine(self) -> psutil.Process:
        return next(one for one in self.front().children() if "pagemill.engine" in " ".join(one.cmdline()))

    def admin(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=PATIENCE_S)

    def _wait_until_guest(self, is_known: bool) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self._takes(GUEST) != is_known:
            assert time.monotonic() < deadline, "the file of tenants is not read again"
            time.sleep(0.1)
        self._replaced.append(time.monotonic())

    def _takes(self, key: str) -> bool:
        answer = httpx.get(f"{self.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_S)
        return answer.status_code == 200

    def _write_tenants(self, with_guest: bool) -> None:
        limits = {"two": self._random.choice(OTHER_LIMITS)}
        owners = {
            name: {"api_keys": [name], **own, **limits.get(name, {})}
            for name, own in TENANTS.items()
            if with_guest or name != GUEST
        }
        new = self._tenants.with_suffix(".new")
        new.write_text(json.dumps({"admin_keys": [ADMIN], "tenants": owners}))
        self._known.append(with_guest)
        new.replace(self._tenants)

    def _set_size(self, size: str) -> None:
        with self.admin() as http:
            answer = http.post("/v1/kv_memory", json={"kv_memory": size})
            self.counts[f"size {answer.status_code}"] += 1
            if answer.status_code != 200:
                assert answer.status_code == 400, answer.text

    def _wait_until_well(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while httpx.get(f"{self.url}/health").status_code == 200 and time.monotonic() < deadline - PATIENCE_S + 1:
            time.sleep(0.02)  # it has not been noticed yet
        while (health := httpx.get(f"{self.url}/health")).status_code != 200:
            assert time.monotonic() < deadline, health.text
            time.sleep(0.1)

    @staticmethod
    def _disturb(what: list[list[float]]) -> None:
        what.append([time.monotonic(), float("inf")])

    @staticmethod
    def _calm(what: list[list[float]]) -> None:
        what[-1][1] = time.monotonic()


def calm_answers(url: str) -> dict[str, Any]:
    """Returns the answers to `KNOWN` requests, and to each turn of `SCRIPTS`, asked one after another."""
    found = {}
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer one"}, timeout=PATIENCE_S) as http:

        def ask(path: str, body: dict[str, Any]) -> Any:
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        for name, (path, body) in KNOWN.items():
            found[name] = whole(path, ask(path, body))
        for script, turns in enumerate(SCRIPTS):
            before, session = {}, f"calm-{script}"
            for turn, text in enumerate(turns):
                said = {"messages": [{"role": "user", "content": text}], "session_id": session, **TURN}
                found[f"{CHATS} {script} {turn}"] = whole(CHATS, ask(CHATS, said))
                body = {"input": text, "max_output_tokens": TURN["max_tokens"], "temperature": 0, **before}
                response = ask(RESPONSES, body)
                before = {"previous_response_id": response["id"]}
                found[f"{RESPONSES} {script} {turn}"] = whole(RESPONSES, response)
            http.delete(f"/v1/sessions/{session}").raise_for_status()
    return found


def what_is_left(fate: Fate, blocks: float) -> list[str]:
    """Returns what the server still holds. Pins of clients that were cut off go first. blocks: of the pool."""
    with fate.admin() as http:
        for pin in http.get("/v1/pins", params={"all": True}).json()["data"]:
            place = {"tenant": pin["tenant"], "cache_salt": pin["cache_salt"]}
            http.delete(f"/v1/pins/{pin['name']}", params=place).raise_for_status()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            figures = http.get("/metrics").text
            found = [
                f"{name} is {value}"
                for name in (
                    "num_requests_running",
                    "num_requests_waiting",
                    'kv_blocks{.*state="active"',
                    "kv_blocks_streamed",
                )
                for value in values(figures, name)
                if value
            ]
            if not found or time.monotonic() > deadline:
                break
            time.sleep(0.2)
    now = sum(values(figures, "kv_blocks{"))
    return found + [f"the pool has {now} blocks, not {blocks}"] * (now != blocks)


def values(figures: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"^pagemill:{name}.* (\S+)$", figures, re.MULTILINE)]


def run(seconds: float, seed: int, clients: int, pause_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        fate = Fate(Path(folder), seed)
        fate.start()
        try:
            found = _soaked(fate, seconds, seed, clients, pause_s)
        finally:
            fate.stop()
    found["wrong"] += [f"the server ended with {status}" for status in fate.statuses if status != 0]
    found["wrong"] += [
        f"the log has {log[log.find('Traceback') - 500 :][:3000]}" for log in fate.logs if "Traceback" in log
    ]
    return found


def _soaked(fate: Fate, seconds: float, seed: int, clients: int, pause_s: float) -> dict[str, Any]:
    answers = calm_answers(fate.url)
    with fate.admin() as http:
        blocks = sum(values(http.get("/metrics").text, "kv_blocks{"))
    descriptors = fate.front().num_fds()
    every = [Client(number, seed, [*TENANTS][number % len(TENANTS)], fate, answers) for number in range(clients)]
    threads = [threading.Thread(target=client.run) for client in every]
    for thread in threads:
        thread.start()
    wrong = []
    try:
        fate.go_on(seconds, pause_s)
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error}")
    finally:
        fate.is_over.set()
        for thread in threads:
            thread.join(3 * PATIENCE_S)
    wrong += [f"{thread.name} still waits" for thread in threads if thread.is_alive()]
    wrong += [found for client in every for found in client.wrong]
    wrong += what_is_left(fate, blocks)
    deadline = time.monotonic() + PATIENCE_S
    while (now := fate.front().num_fds()) > descriptors + MORE_DESCRIPTORS and time.monotonic() < deadline:
        time.sleep(0.5)
    wrong += [f"{now} descriptors are open, {descriptors} were before"] * (now > descriptors + MORE_DESCRIPTORS)
    done = sum((client.counts for client in every), Counter())
    return {"happened": dict(fate.counts), "done": dict(sorted(done.items())), "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause", type=float, default=4.0, help="seconds between two things that happen, about")
    args = parser.parse_args()
    os.chdir(Path(__file__).parents[2])
    found = run(args.seconds, args.seed, args.clients, args.pause)
    print(json.dumps(found, indent=1))
    return bool(found["wrong"])


if __name__ == "__main__":
    sys.exit(main())
