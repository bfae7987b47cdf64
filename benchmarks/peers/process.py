"""Runs an engine in its own process and environment: starts it, gives it workloads one by one, watches and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from benchmarks.peers.engines import EngineSetup, process_environment
from benchmarks.peers.machine import resident_bytes
from benchmarks.peers.workloads import Workload

ROOT = Path(__file__).parents[2]
MEMORY_INTERVAL_S = 0.2
START_LIMIT_S = 900.0


class EngineFailed(RuntimeError):
    """Raised if the engine's process ended too early, or returned other numbers of tokens than were asked for."""


class EngineTooSlow(EngineFailed):
    """Raised if the engine did not finish within the limit and has been stopped."""


class EngineProcess:
    """Runs an engine, as a context manager. What it prints goes to `log`. model: as `model_paths` gives it.

    description: of its version and configuration; first_token_s: from the start of the process to one token.
    Raises EngineFailed, from anywhere; after that it is of no more use.
    """

    def __init__(self, setup: EngineSetup, log: Path, model: dict[str, str]) -> None:
        self.log = log
        self._events, write = os.pipe()
        self._lines: list[bytes] = []
        self._partial = b""
        self._peak = 0
        started = time.monotonic()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [setup.python, "-m", "benchmarks.peers.child", setup.adapter, str(write)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
                cwd=ROOT,
                env=process_environment(setup),
                start_new_session=True,
                text=True,
            )
        os.close(write)
        self._tree = psutil.Process(self._process.pid)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._events, selectors.EVENT_READ)
        try:
            self._tell({"model": model, "settings": setup.settings})
            ready = self._next_event(time.monotonic() + START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        self.description: str = ready["description"]
        self.first_token_s: float = ready["at_s"] - started

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def run(self, workload: Workload, limit_s: float) -> dict[str, Any]:
        """Runs a workload: {"wall_s", "peak_bytes", "requests"}. Raises EngineTooSlow after `limit_s` seconds."""
        self._tell(
            {
                "prompts": workload.prompts,
                "max_tokens": workload.max_tokens,
                "arrivals_s": workload.arrivals_s,
            }
        )
        deadline = time.monotonic() + limit_s
        begin = self._next_event(deadline)
        self._peak = 0
        end = self._next_event(deadline)
        check_tokens(workload, end["requests"])
        return {"wall_s": end["at_s"] - begin["at_s"], "peak_bytes": self._peak, "requests": end["requests"]}

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._selector.close()
        with contextlib.suppress(OSError):
            os.close(self._events)

    def _tell(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineFailed(f"exit status {self._process.wait()}; see {self.log}") from error

    def _next_event(self, deadline: float) -> dict[str, Any]:
        """Returns the next event of the process, and watches its memory meanwhile."""
        while not self._lines:
            if time.monotonic() > deadline:
                raise EngineTooSlow(f"not done in time; see {self.log}")
            ready = self._selector.select(MEMORY_INTERVAL_S)
            with contextlib.suppress(psutil.NoSuchProcess):
                self._peak = max(self._peak, resident_bytes(self._tree))
            if not ready:
                continue
            chunk = os.read(self._events, 1 << 16)
            if not chunk:
                raise EngineFailed(f"exit status {self._process.wait()}; see {self.log}")
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            self._lines += lines
        event: dict[str, Any] = json.loads(self._lines.pop(0))
        return event


def check_tokens(workload: Workload, requests: list[dict[str, float]]) -> None:
    """Raises EngineFailed unless every request got exactly the tokens that it asked for."""
    pairs = enumerate(zip([int(request["tokens"]) for request in requests], workload.max_tokens, strict=True))
    wrong = [(index, got, asked) for index, (got, asked) in pairs if got != asked]
    if wrong:
        raise EngineFailed(f"{workload.name}: (request, tokens returned, tokens asked): {wrong[:5]}")
