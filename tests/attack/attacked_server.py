"""A server in processes of its own, with its log."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = "smollm2-135m"
PATIENCE_S = 120.0


class Server:
    """`with Server(settings) as server`: raises RuntimeError if it does not start; is told to stop at the end."""

    def __init__(self, settings: list[str]) -> None:
        self._command = [sys.executable, "-m", "pagemill", "serve", MODEL, "--port", "0", *settings]
        self.log = ""
        """What it has written, once it has ended."""
        self.ended_s = 0.0
        """How long it took to stop."""

    def __enter__(self) -> Server:
        self._file = tempfile.NamedTemporaryFile("a")
        self.process = subprocess.Popen(self._command, stdout=self._file, stderr=self._file)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if (found := re.search(r"curl (http://\S+)/v1/", self._written())) is not None:
                self.url = found[1]
                return self
            time.sleep(0.05)
        self.__exit__()
        raise RuntimeError(f"the server did not start: {self.log}")

    def __exit__(self, *_: object) -> None:
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.ended_s = time.monotonic() - began
        self.process.kill()
        self.log = self._written()
        self._file.close()

    def _written(self) -> str:
        return Path(self._file.name).read_text(errors="replace")
