"""What signals change while a server runs: SIGHUP its keys, SIGUSR1 and SIGUSR2 the KV pool's size."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from pagemill.errors import ConfigError, PagemillError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.server.access.tls import Certificate
from pagemill.server.lifecycle.reload import TenantsReload


def obey_signals(
    llm: AsyncLLM,
    tenants: TenantsReload | None,
    certificate: Certificate | None,
    say: Callable[[str], None],
    tasks: set[asyncio.Task[None]],
) -> None:
    """Makes the running event loop do these things; `tasks` gets those that are under way.

    SIGHUP ends the process, as usual, where there is nothing to read again.
    """
    work: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "SIGUSR1": partial(_resize, llm, "used", say),
        "SIGUSR2": partial(_resize, llm, None, say),
    }
    if tenants is not None or certificate is not None:
        work["SIGHUP"] = partial(_reload, tenants, certificate, say)
    for name, begin in work.items():
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError, ValueError):  # none, or a thread
            asyncio.get_running_loop().add_signal_handler(
                getattr(signal, name), lambda begin: tasks.add(asyncio.create_task(begin())), begin
            )


async def _resize(llm: AsyncLLM, kv_memory: str | None, say: Callable[[str], None]) -> None:
    try:
        ready = await llm.resize_kv_memory(kv_memory)
        size = f"{ready.num_frames} {'block' if ready.num_frames == 1 else 'blocks'}"
        say(f"the KV pool has {size} now, {ready.kv_bytes / 2**20:.1f} MiB")
    except PagemillError as error:
        say(f"the KV pool keeps its size: {error}")


async def _reload(tenants: TenantsReload | None, certificate: Certificate | None, say: Callable[[str], None]) -> None:
    if certificate is not None:
        try:
            certificate.reload()
            say("the certificate was read again")
        except ConfigError as error:
            say(f"the certificate stays as it was: {error.message}")
    if tenants is not None:
        await tenants.reload()
