"""What tests of replicas share: processes below one, a port, and a client that streams."""

import contextlib
import os
import socket
import time

import httpx

MODEL = "smollm2-135m"
START_S = 200.0
"""Seconds that a cluster may take to come, on a machine that has other things to do."""
TOKENS = 120


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def described(pid):
    """Returns a process's parent and command line; nothing if it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as line:
        return int(stat.read().rpartition(")")[2].split()[1]), line.read().replace("\0", " ").strip()
    return None


def processes(root):
    """Returns the command lines of all processes that come from one, by process id."""
    running = {int(name): found for name in os.listdir("/proc") if name.isdigit() and (found := described(name))}
    found, left = {}, [root]
    while left:
        parent = left.pop()
        its = {pid: line for pid, (of, line) in running.items() if of == parent}
        found |= its
        left += its
    return found


async def stream(client, number, gaps):
    """Returns an answer's text, and appends the seconds between its events to `gaps`."""
    body = {
        "model": MODEL, "prompt": f"Story {number}. Once upon a time", "max_tokens": TOKENS, "stream": True,
        "ignore_eos": True, "temperature": number % 2, "seed": number, "stream_options": {"include_usage": True},
    }  # fmt: skip
    text, last, used = "", time.monotonic(), 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = httpx.Response(200, content=line[6:]).json()
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
                used = (event.get("usage") or {}).get("completion_tokens", used)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
    assert used == TOKENS
    return text
