"""Served: one real server with the default model, whose tests use it over HTTP, or its AsyncLLM underneath."""

import asyncio
import contextlib
import socket
import threading
import time

from harness import MODEL
from pagemill import AsyncLLM
from pagemill.server.run import run_server
from pagemill.tenant_limits import read_tenants_file

MAX_MODEL_LEN = 2048


class Served:
    """A server on a port of its own, its event loop in a thread. `run` executes a coroutine in that loop."""

    def __init__(self, tenants=None, access=None, **settings):
        """tenants: a tenants file; settings: of the engine, beside or instead of the usual ones."""
        self.tenants = tenants
        self.access = access
        self.settings = {
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "kv_memory": "128MiB",
            "max_num_seqs": 32,
            "speculative_config": "off",  # so that tokens come one by one
            **settings,
        }
        self.loop = asyncio.new_event_loop()
        self.llm = None
        self.ready = threading.Event()
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self):
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._main())
        finally:
            self.ready.set()
            self.loop.close()

    async def _main(self):
        tenants = None if self.tenants is None else read_tenants_file(self.tenants)
        self.llm = AsyncLLM(MODEL, **self.settings, **({} if tenants is None else {"tenants": tenants.limits}))
        serving = run_server(
            self.llm, MODEL, self.sock, lambda _: self.ready.set(), print, tenants=tenants, access=self.access
        )
        self.serving = asyncio.ensure_future(serving)
        with contextlib.suppress(asyncio.CancelledError):
            await self.serving

    def run(self, coroutine, timeout_s=60.0):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def stats(self):
        return self.run(self.llm.stats())

    def wait_until_idle(self, timeout_s=30.0):
        """Waits until no request holds anything; fails if one still does."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            stats = self.stats()
            if stats.running == stats.waiting == stats.frames_active == 0:
                return stats
            time.sleep(0.02)
        raise AssertionError(f"still held: {stats}")

    def close(self):
        self.loop.call_soon_threadsafe(self.serving.cancel)
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(**settings):
    server = Served(**settings)
    try:
        assert server.ready.wait(120)
        assert server.llm.is_ready, server.llm.error
        yield server
    finally:
        server.close()
