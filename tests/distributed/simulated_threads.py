"""Threads in simulated time: the code of a thread runs as it is, but only ever one, and only while all else waits.

A thread runs until it waits (`Thread.wait`), then the event loop goes on. So its steps come in an order that is always
the same, and what it does between two waits takes no time. It is a thread of the system only to have a stack.
"""

import _thread
import asyncio
from collections import deque
from typing import ClassVar


class Ended(BaseException):
    """Ends a thread whose process is gone, where it waits."""


class Process:
    """Threads that end together. host: where they run. note: takes what a thread raises."""

    made_by: ClassVar["Process | None"] = None
    """The process whose code the event loop runs now: what is made then is its own."""

    def __init__(self, host, note):
        self.host, self.note, self.gone, self.threads = host, note, False, []
        self.loop = asyncio.get_running_loop()

    def __enter__(self):
        Process.made_by = self

    def __exit__(self, *_):
        Process.made_by = None

    def end(self):
        """Kills it: what its threads are at, they do not end."""
        self.gone = True
        for thread in [*self.threads]:
            thread.resume()

    async def run(self, work):
        """Runs something that may wait, in a thread of its own, to its end."""
        with self:
            thread = Thread(target=work)
        thread.start()
        await thread.over.wait()


class Thread:
    """Stands for `threading.Thread`."""

    running: ClassVar["Thread | None"] = None
    """The one that runs now; None for the event loop."""

    def __init__(self, target, args=(), name="", daemon=True):
        self.process = Process.made_by if Thread.running is None else Thread.running.process
        self.over = asyncio.Event()
        self._target, self._args = target, args
        self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self._begun, self._wait = False, 0

    def start(self):
        self.process.threads.append(self)
        self.process.loop.call_soon(self.resume)

    def join(self):
        while not self.over.is_set():
            Thread.running.wait(0.01)

    def wait(self, seconds=None):
        """Lets all else go on, until `wake` or for so long. Only the thread itself calls it."""
        if self.process.gone:
            raise Ended
        timer = None if seconds is None else self.process.loop.call_later(seconds, self._resume_from, self._wait)
        self._back.release()
        self._go.acquire()
        self._wait += 1
        if timer is not None:
            timer.cancel()
        if self.process.gone:
            raise Ended

    def wake(self):
        self.process.loop.call_soon(self._resume_from, self._wait)

    def resume(self):
        """Runs it until it waits, or ends. Only the event loop calls it."""
        if self.over.is_set() or (self.process.gone and not self._begun):
            return
        Thread.running = self
        if self._begun:
            self._go.release()
        else:
            self._begun = True
            _thread.start_new_thread(self._run, ())
        self._back.acquire()
        Thread.running = None

    def _resume_from(self, wait):
        if wait == self._wait:  # else it waits for something else by now
            self.resume()

    def _run(self):
        try:
            self._target(*self._args)
        except Ended:
            pass
        except BaseException as error:
            self._error = error
        self.process.threads.remove(self)
        self.over.set()
        self._back.release()


class Pool:
    """Stands for `ThreadPoolExecutor`, as far as nobody waits for what work returns."""

    def __init__(self, most, thread_name_prefix=""):
        self._most, self._work, self._busy = most, deque(), 0
        self._process = Process.made_by

    def submit(self, work, *args):
        self._work.append((work, args))
        if self._busy < self._most:
            self._busy += 1
            with self._process:
                thread = Thread(target=self._take)
            thread.start()

    def shutdown(self):
        while self._busy:
            Thread.running.wait(0.01)

    def _take(self):
        while self._work:
            work, args = self._work.popleft()
            work(*args)
        self._busy -= 1


def sleep(seconds):
    """Stands for `time.sleep`."""
    Thread.running.wait(seconds)
