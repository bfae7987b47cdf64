"""A command in a terminal of its own, as a person sees it."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time

import pyte

COMMAND = [sys.executable, "-m", "pagemill"]


class Terminal:
    """A process with a terminal of 80 by 24, or as given; `text` is what its window shows."""

    def __init__(self, *args, columns=80, lines=24, **env):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._screen = pyte.HistoryScreen(columns, lines, history=1000)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **env},
        )
        os.close(slave)
        os.set_blocking(self.master, False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    @property
    def text(self):
        """All lines, those that have left the window too."""
        above = ["".join(line[at].data for at in range(self._screen.columns)) for line in self._screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self._screen.display]).rstrip()

    def read(self):
        """Takes in what was written."""
        try:
            while new := os.read(self.master, 65536):
                self.written += new
                self._stream.feed(new)
        except (BlockingIOError, OSError):
            pass

    def wait_until(self, condition, timeout_s=60):
        """Waits until what the window shows meets a condition, and returns it."""
        deadline = time.monotonic() + timeout_s
        while not condition(self.text):
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)
            self.read()
        return self.text

    def wait_for(self, words):
        return self.wait_until(lambda text: words in text)

    def wait_for_prompt(self):
        """Waits until the last line is an empty prompt, and returns the text before it."""
        return self.wait_until(lambda text: text.endswith("\n>")).removesuffix("\n>")

    def type(self, text):
        os.write(self.master, text.encode())

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def wait_for_end(self):
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)
            self.read()
        self.read()
        return self.process.returncode
