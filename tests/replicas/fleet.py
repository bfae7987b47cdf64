"""A fleet by one command, and streams from it while something happens."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time

import httpx
from ray_processes import MODEL, START_S, described, free_port, processes, stream

STREAMS = 6
WAIT_S = 300.0
"""Seconds that a client waits: another cluster has to come, on a machine that has other things to do."""
GONE_S = 10.0
"""Seconds in which the processes of a fleet end with the command."""


STREAMS = 6


class Fleet:
    """Serves by three replicas. arguments: of `pagemill serve`. port: None for one that is free."""

    def __init__(self, *arguments, waits=True, port=None):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        flags = ["--port", str(self.port), "--kv-memory", "64MiB", "--max-model-len", "1024", *arguments]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (a pipe that nobody reads would fill)
        self.command = subprocess.Popen(
            [sys.executable, "-m", "pagemill", "serve", MODEL, "--replicas", "3", *flags],
            stderr=self._log,
        )
        if waits:
            self.wait_ready()

    def wait_ready(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.command.poll() is None, self.said()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError("not ready")

    def said(self):
        """Returns what the command has written to stderr."""
        self._log.seek(0)
        return self._log.read()

    def wait_whole(self):
        """Waits until three engines run, since the next one to be killed may be the last else."""
        deadline = time.monotonic() + START_S
        while len(self.processes("pagemill.engine.process")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def processes(self, title):
        return [pid for pid, line in processes(self.command.pid).items() if title in line]

    def kill(self):
        """Kills the command. Returns what is left of the processes below it once they had time to end."""
        below = processes(self.command.pid)
        self.command.kill()
        self.command.wait()
        deadline = time.monotonic() + GONE_S
        while True:  # one that nobody has waited for has no command line any more
            left = [line for pid, line in below.items() if (described(pid) or (0, ""))[1] == line]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def stop(self):
        below = processes(self.command.pid)
        self.command.send_signal(signal.SIGTERM)
        assert self.command.wait(120) == 0
        assert not [pid for pid in below if os.path.exists(f"/proc/{pid}")]


def run_streams(fleet, during=None):
    """Returns what all streams said, while `during` is run once they are under way; and the longest gap in seconds."""
    gaps = []

    async def all_of_them():
        async with httpx.AsyncClient(base_url=fleet.url, timeout=WAIT_S) as client:
            streams = [asyncio.create_task(stream(client, number, gaps)) for number in range(STREAMS)]
            while during is not None and len(gaps) < 10 * STREAMS:
                await asyncio.sleep(0.01)
                assert not any(one.done() and one.exception() for one in streams)
            if during is not None:
                during()
            return await asyncio.gather(*streams)

    return asyncio.run(all_of_them()), max(gaps)
