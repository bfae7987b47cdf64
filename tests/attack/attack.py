"""Attacks a server over HTTP for a while, beside another tenant's streams and questions, which are measured
(`make attack`).

    python tests/attack/attack.py [--seconds 600] [--seed 0] [--threads 8] [--connections 10000] [--examples 30]
                                  [--kills 2] [--damages 10] [--times-stated]

First all is calm. Then come requests that break HTTP, what the OpenAPI description lets one make up, thousands of idle
connections, and for the given time all of `ways` in several threads, while processes that read large bodies are killed.
In the end the server must hold no block and no connection, have answered the other tenant and kept what is that
tenant's, kept its memory and log small, its event loop free, answer as before when its engine is killed, and stop when
it is told to; then an engine's stores are damaged. Prints what was found as JSON, and ends with status 1 if something
failed. With `--times-stated` nothing fails for what took long, which on a busy machine says nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import damaged_stores
import httpx
import psutil
import raw_http
import schema
from attacked_server import Server
from ways import KEPT, Attack

SETTINGS = ["--max-model-len", "2048", "--kv-memory", "128MiB", "--max-num-seqs", "16", "--request-timeout-s", "3"]
SETTINGS += ["--num-threads", "1", "--max-failed-keys", "1000000", "--log-level", "warning"]
LIMITS = ["--max-connections", "512", "--max-bodies-bytes", str(64 << 20)]
KEYS = {"attacker": "attacker's", "bystander": "bystander's"}
ADMIN = "admin's"
ATTACKERS, IDLERS = "127.0.0.2", "127.0.0.3"
"""Addresses that attacks come from, so that the other tenant's has its own share of connections."""
ENGINE = "pagemill.engine"
"""Stands in the command line of the engine's process."""
STORY, QUESTION = "Once upon a time", "Twice two is"
"""What the other tenant asks again and again."""
CALM_S, SHORTLY_CALM_S = 3.0, 0.5
LOOK_S, KILL_S = 0.05, 5.0
"""Between two looks at the memory, and between two kills of what reads large bodies."""
NICENESS = 10
"""The attack stands back behind the server: what is measured is the server, not who else is on the machine."""

LATE_S, HELD_SHARE = 0.02, 0.001
"""The share of looks at the event loop that may find it so late for another reason than a busy machine."""
LONGEST_HELD_S = 0.1
"""By which the event loop may be late once for such a reason."""
LONGEST_GAP_S = 2.0
"""Between two parts of the other tenant's stream: steps that carry the attackers' prompts are the longest."""
LONGEST_WAIT_S = 10.0
"""For the other tenant's next short answer."""
MOST_MEMORY_MIB = 700
"""Of the front end, and the process that reads large bodies."""
MOST_LOG, MOST_LOG_PER_S = 32 << 10, 100
"""Bytes of log: for all that comes once, and for each second of the attack."""
LONGEST_END_S = 20.0
LONGEST_HEALTH_S = 2.0
"""For `/health` beside a crowd of connections."""
REFUSALS = ("400", "401", "413", "429")
"""Statuses that some of the attacks bring, if they arrive and there is a minute for all of them."""


class Bystander:
    """Another tenant, which reads one stream after another and asks for short answers between."""

    def __init__(self, url: str) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {KEYS['bystander']}"}
        self._texts: dict[str, str] = {}
        self.stop = threading.Event()
        self.gap_s = self.wait_s = 0.0
        self.answers = 0
        self.failed: list[str] = []
        self._keep()
        self._threads = [threading.Thread(target=self._until_stopped, args=(work,)) for work in (self._read, self._ask)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(90)

    def look(self) -> None:
        """Notes what is missing of what it keeps on the server."""
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=60) as http:
            sessions, pins = (http.get(f"/v1/{kind}").json()["data"] for kind in ("sessions", "pins"))
        if [(one["id"], one["num_turns"]) for one in sessions] != [(KEPT, 1)]:
            self.failed.append(f"the other tenant has these sessions: {sessions}")
        if [one["name"] for one in pins] != [KEPT]:
            self.failed.append(f"the other tenant has these pins: {pins}")

    def ask(self) -> None:
        """Asks for a short answer, which must be the one that it has always had."""
        began = time.perf_counter()
        body = {"prompt": QUESTION, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self._url}/v1/completions", json=body, headers=self._headers, timeout=60)
        _require_answer(answer)
        self.answers += 1
        self.wait_s = max(self.wait_s, time.perf_counter() - began)
        self._compare(QUESTION, answer.json()["choices"][0]["text"])

    def _keep(self) -> None:
        """Begins a session, and pins a prefix."""
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=60) as http:
            turn = {"prompt": STORY, "session_id": KEPT, "max_tokens": 1}
            for path, body in (("completions", turn), ("pins", {"name": KEPT, "prompt": STORY * 10})):
                _require_answer(http.post(f"/v1/{path}", json=body))

    def _until_stopped(self, work: Any) -> None:
        try:
            while not self.stop.is_set():
                work()
        except Exception as error:
            self.failed.append(f"the other tenant had {type(error).__name__}: {error}")

    def _read(self) -> None:
        body = {"prompt": STORY, "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
        text = ""
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json=body, headers=self._headers, timeout=60
        ) as response:
            _require_answer(response)
            last = None
            for line in response.iter_lines():
                now = time.perf_counter()
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                self.gap_s = max(self.gap_s, now - (last or now))
                last = now
                if self.stop.is_set():
                    break
        self._compare(STORY, text)

    def _ask(self) -> None:
        self.ask()
        self.stop.wait(0.5)

    def _compare(self, prompt: str, text: str) -> None:
        """Compares a text, as far as it goes, with the first one to this prompt."""
        first = self._texts.setdefault(prompt, text)
        length = min(len(first), len(text))
        if first[:length] != text[:length]:
            self.failed.append(f"the other tenant had {text!r} instead of {first!r}")


def _require_answer(response: httpx.Response) -> None:
    """Raises RuntimeError with the words of a refusal."""
    if response.is_error:
        raise RuntimeError(f"{response.status_code}: {response.read().decode()}")


class Late(NamedTuple):
    """How late an event loop was: the longest time in seconds, and the share of looks with more than `LATE_S`."""

    longest_s: float
    share: float


class Lag:
    """What the server says of its event loop, since the last time that it was asked."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._counts: dict[str, tuple[float, float]] = {}
        self.since()

    def since(self) -> dict[str, Late]:
        """Returns by how much it was late (`lag`), and how much of that is not for want of a processor (`held`)."""
        text = httpx.get(f"{self._url}/metrics", headers={"Authorization": f"Bearer {ADMIN}"}, timeout=60).text

        def value(name: str, labels: str = 'model_name="[^"]*"') -> float:
            found = re.search(rf"^pagemill:event_loop_{name}{{{labels}}} (\S+)$", text, re.MULTILINE)
            assert found is not None, name
            return float(found[1])

        found = {}
        for name in ("lag", "held"):
            looks, late = self._counts.get(name, (0.0, 0.0))
            all_now = value(f"{name}_seconds_count")
            late_now = all_now - value(f"{name}_seconds_bucket", rf'le="{LATE_S}",model_name="[^"]*"')
            self._counts[name] = all_now, late_now
            found[name] = Late(value(f"{name}_max_seconds"), (late_now - late) / max(all_now - looks, 1))
        return found


@dataclass
class Plan:
    """How long and how much to attack."""

    seconds: float
    seed: int
    threads: int
    connections: int
    examples: int
    """Made-up requests for each operation."""
    kills: int
    """How often the engine is killed; with 0, nothing is."""
    damages: int
    """Damages to the stores."""
    times_stated: bool
    """Whether what took long is stated only, and nothing fails for it."""


def run(plan: Plan) -> dict[str, Any]:
    """Attacks a new server. Returns what was found; `failed` lists what must not be so."""
    found: dict[str, Any] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder, "tenants.json")
        owners = {name: {"api_keys": [key]} for name, key in KEYS.items()}
        tenants.write_text(json.dumps({"admin_keys": [ADMIN], "tenants": owners}))
        server = Server([*SETTINGS, *LIMITS, "--tenants", str(tenants)])
        with server:
            if not plan.times_stated:
                os.nice(NICENESS)
            found, failed = _attack(server, plan)
        found |= {"log_bytes": len(server.log), "ended_s": round(server.ended_s, 2)}
        found["status"] = server.process.returncode
        if "Traceback" in server.log:
            failed.append(f"the log has a traceback: {server.log[-3000:]}")
    limits = {"memory_mib": MOST_MEMORY_MIB, "log_bytes": MOST_LOG + MOST_LOG_PER_S * plan.seconds}
    if not plan.times_stated:
        limits |= {"held_s": LONGEST_HELD_S, "held_share": HELD_SHARE}
        limits |= {"gap_s": LONGEST_GAP_S, "wait_s": LONGEST_WAIT_S, "ended_s": LONGEST_END_S}
        limits |= {"health_s": LONGEST_HEALTH_S}
    failed += [f"{name} is over {limit}" for name, limit in limits.items() if found[name] > limit]
    failed += ["it ended with another status than 0"] * (found["status"] != 0)
    if plan.damages:
        with tempfile.TemporaryDirectory() as folder:
            failed += damaged_stores.failures(Path(folder), plan.damages, plan.seed)
    return {**found, "failed": failed}


def _attack(server: Server, plan: Plan) -> tuple[dict[str, Any], list[str]]:
    url, front = server.url, psutil.Process(server.process.pid)
    address, key = (httpx.URL(url).host, int(httpx.URL(url).port or 0)), KEYS["attacker"]
    bystander, lag, failed = Bystander(url), Lag(url), []
    descriptors, memory = front.num_fds(), [0]
    attacks = [Attack(url, key, ADMIN, ATTACKERS, plan.seed * 1000 + number) for number in range(plan.threads)]
    try:
        time.sleep(SHORTLY_CALM_S if plan.times_stated else CALM_S)
        calm = lag.since()
        failed += raw_http.wrong_answers(address, key)
        failed += schema.wrong_answers(url, key, plan.examples, plan.seed)
        health_s = _crowd(address, plan.connections)
        stop = threading.Event()

        def work(attack: Attack) -> None:
            while not stop.is_set():
                attack.step()

        threads = [threading.Thread(target=work, args=(attack,)) for attack in attacks]
        for thread in threads:
            thread.start()
        end, killed = time.monotonic() + plan.seconds, time.monotonic()
        while time.monotonic() < end and server.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                memory.append(_memory(front))
            if plan.kills and time.monotonic() > killed + KILL_S:
                killed = time.monotonic()
                for reader in _readers(front):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        reader.kill()
            time.sleep(LOOK_S)
        stop.set()
        for thread in threads:
            thread.join(90)
        late = lag.since()
    finally:
        bystander.stop.set()
        bystander.join()
        for attack in attacks:
            attack.close()
    statuses = sum((attack.statuses for attack in attacks), Counter())
    failed += [taken for attack in attacks for taken in attack.taken]
    wait_s = bystander.wait_s
    bystander.look()
    after = _after(url, front, descriptors)
    for _ in range(plan.kills):
        _engine(front).kill()
        bystander.ask()
    failed += [*bystander.failed, *after]
    failed += ["the other tenant had no answer"] * (not bystander.answers)
    if plan.seconds >= 60:
        failed += [f"no attack was refused with {status}" for status in REFUSALS if not statuses[status]]
    failed += ["there were answers of status 500"] * bool(statuses["500"])
    times = {"calm_lag_s": calm["lag"].longest_s, "calm_late_share": calm["lag"].share}
    times |= {"lag_s": late["lag"].longest_s, "late_share": late["lag"].share}
    times |= {"held_s": late["held"].longest_s, "held_share": late["held"].share}
    times |= {"gap_s": bystander.gap_s, "wait_s": wait_s, "health_s": health_s}
    found = {"answers": dict(sorted(statuses.items())), **{name: round(value, 6) for name, value in times.items()}}
    return found | {"answered": bystander.answers, "memory_mib": max(memory) >> 20}, failed


def _engine(front: psutil.Process) -> psutil.Process:
    return next(child for child in front.children() if _is_engine(child))


def _readers(front: psutil.Process) -> list[psutil.Process]:
    """Returns the processes that read large bodies, and those that they have begun."""
    found = [child for child in front.children() if not _is_engine(child)]
    for one in tuple(found):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += one.children()
    return found


def _is_engine(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(ENGINE in argument for argument in process.cmdline())
    return False


def _memory(front: psutil.Process) -> int:
    """Returns the bytes that the front end and its readers of bodies have; what readers share counts once.

    The front end's are those in memory: counting shares takes a lock for which its event loop would wait.
    """
    total = front.memory_info().rss
    for reader in _readers(front):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += reader.memory_full_info().pss
    return total


def _crowd(address: tuple[str, int], count: int) -> float:
    """Opens so many connections, as far as descriptors suffice, that say nothing. Returns how long `/health` took
    beside them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard - 500)
    with contextlib.ExitStack() as crowd:
        for _ in range(limit):
            with contextlib.suppress(OSError):
                crowd.enter_context(socket.create_connection(address, timeout=5, source_address=(IDLERS, 0)))
        began = time.monotonic()
        httpx.get(f"http://{address[0]}:{address[1]}/health", timeout=30).raise_for_status()
        took = time.monotonic() - began
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return took


def _after(url: str, front: psutil.Process, descriptors: int) -> list[str]:
    """Returns what is not as it was before the attack. Pins and sessions of the attacker stay until it ends them."""
    deadline = time.monotonic() + 60
    headers = {"Authorization": f"Bearer {KEYS['attacker']}"}
    with httpx.Client(base_url=url, timeout=60, headers=headers) as http:
        admin = {"Authorization": f"Bearer {ADMIN}"}
        for pin in http.get("/v1/pins", params={"all": True}, headers=admin).json()["data"]:
            place = {"tenant": pin["tenant"], "cache_salt": pin["cache_salt"]}
            http.delete(f"/v1/pins/{quote(pin['name'], safe='')}", params=place, headers=admin).raise_for_status()
        free = re.compile(r'^pagemill:kv_blocks\{.*state="active".*\} 0\.0$', re.MULTILINE)
        while free.search(figures := http.get("/metrics", headers=admin).text) is None:
            if time.monotonic() > deadline:
                held = re.findall(r"^pagemill:(?:num_requests|kv_blocks|tenant_kv_blocks).*$", figures, re.MULTILINE)
                return [f"blocks are still held: {held}, {http.get('/v1/requests').text}"]
            time.sleep(0.2)
        answer = http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
        failed = [] if answer.status_code == 200 else [f"afterwards: {answer.text}"]
    while (now := front.num_fds()) > descriptors + 10 and time.monotonic() < deadline:
        time.sleep(0.5)
    return failed + [f"{now} descriptors are open, {descriptors} were before"] * (now > descriptors + 10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--examples", type=int, default=30, help="made-up requests for each operation")
    parser.add_argument("--kills", type=int, default=2, help="how often the engine is killed; with 0, nothing is")
    parser.add_argument("--damages", type=int, default=10, help="damages to the stores")
    parser.add_argument("--times-stated", action="store_true", help="fail for nothing that took long")
    found = run(Plan(**vars(parser.parse_args())))
    print(json.dumps(found, indent=1))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
