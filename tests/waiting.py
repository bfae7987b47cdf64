"""Waits for what another thread does."""

import time


def wait_until(reached, message, within_s=10):
    """Calls ``reached`` until it says yes; fails with ``message``, or with what it then returns, after ``within_s``
    seconds."""
    deadline = time.monotonic() + within_s
    while not reached():
        time.sleep(0.02)
        assert time.monotonic() < deadline, message() if callable(message) else message
