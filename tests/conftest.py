"""One real server with the default model for the whole run: tests use it over HTTP, or its AsyncLLM underneath."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time

import filelock
import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import AutoModelForCausalLM

import interpreter  # noqa: F401  # before anything imports triton, as some of transformers does
from pagemill import AsyncLLM
from pagemill.hub import resolve_model
from pagemill.ops.prepare import settle_vector_math
from pagemill.server.run import run_server
from pagemill.tenant_limits import read_tenants_file

# A shell that runs the tests in the background has Ctrl-C ignored, here and in what is started from here.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast examples are made says something of the machine, not of the code.
settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machines")

settle_vector_math()  # references are computed with torch too

LONG = frozenset({
    "soak", "attack", "test_replay_commands.py", "test_engine_same_bits.py", "test_offloading.py", "browser",
})  # fmt: skip
"""Files and folders that take longest."""

MODEL = "smollm2-135m"
MAX_MODEL_LEN = 2048


def pytest_collection_modifyitems(items):
    """Begins with what takes longest, so that no worker of several is left alone with it in the end."""
    items.sort(key=lambda item: LONG.isdisjoint(item.path.parts))


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
def _serving(**settings):
    server = Served(**settings)
    try:
        assert server.ready.wait(120)
        assert server.llm.is_ready, server.llm.error
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """transformers' model, dense and in fp32. It reads its GGUF file once for all workers: that takes half a minute."""
    own = tmp_path_factory.getbasetemp()
    kept = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "reference.pt"
    with filelock.FileLock(kept.with_suffix(".lock")):
        if not kept.is_file():
            path, kinds = resolve_model(MODEL), {"dtype": torch.float32, "attn_implementation": "eager"}
            made = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **kinds)
            torch.save(made.eval(), kept)
    return torch.load(kept, weights_only=False, mmap=True)


@pytest.fixture(scope="session")
def served():
    with _serving() as server:
        yield server


@pytest.fixture(scope="session")
def serving():
    """Another server, with other settings: `with serving(max_num_seqs=4) as server`."""
    return _serving
