"""Stands for a pool of threads beside a `CheckedDevice`, which sees one thread only."""

from __future__ import annotations

from concurrent.futures import Future


class InlineThreads:
    """Runs at once, in the caller's thread, what a pool of threads would run. What it is made with has no effect."""

    def __init__(self, *args, **kwargs):
        pass

    def submit(self, call, *args):
        done = Future()
        done.set_result(call(*args))
        return done

    def shutdown(self):
        pass
