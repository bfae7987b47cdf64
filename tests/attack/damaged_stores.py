"""Flips bits in what a server has on disk, its sessions and KV blocks, or cuts it: answers stay as they were, and what
is lost is said in words.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import httpx
from attacked_server import Server

PROMPT = "The history of bread begins with " * 20
ANSWER = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
TURN = {"messages": [{"role": "user", "content": "Name a color."}], "session_id": "talk", "max_tokens": 4}


def failures(folder: Path, rounds: int, seed: int) -> list[str]:
    """Serves, damages and serves again so many times. Returns what must not be so."""
    chance, failed = random.Random(seed), []
    settings = ["--session-path", str(folder / "sessions"), "--kv-disk-memory", "64MiB", "--kv-disk-path"]
    settings += [str(folder / "kv"), "--max-model-len", "512", "--kv-memory", "64MiB"]
    with Server(settings) as server:
        expected = _ask(server.url, ANSWER)
        _ask(server.url, TURN)
    for number in range(rounds):
        damage = _damage(folder, chance)
        server = Server(settings)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(server)
            except RuntimeError:
                if "error:" not in server.log.lower():
                    failed.append(f"round {number}, {damage}: it ended without words")
                continue
            found = _ask(server.url, ANSWER)
            if found != expected:
                failed.append(f"round {number}, {damage}: {found!r} instead of {expected!r}")
            answers = [_ask(server.url, body) for body in (TURN, {**TURN, "session_id": f"new {number}"})]
            wordless = [one for one in answers if "error" in one and not one["error"]["message"]]
            failed += [f"round {number}, {damage}: {one}" for one in wordless]
        if "Traceback" in server.log:
            failed.append(f"round {number}, {damage}: {server.log[-1500:]}")
    return failed


def _damage(folder: Path, chance: random.Random) -> str:
    """Changes one file, and says what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = chance.choice(files)
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    if chance.random() < 0.3:
        del data[at:]
        what = f"cut at {at}"
    else:
        data[at] ^= 1 << chance.randrange(8)
        what = f"flipped a bit of byte {at}"
    path.write_bytes(data)
    return f"{path.name} {what}"


def _ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the choice, or all of an error."""
    path = "chat/completions" if "messages" in body else "completions"
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
    return answer.json() if answer.status_code != 200 else answer.json()["choices"][0]
