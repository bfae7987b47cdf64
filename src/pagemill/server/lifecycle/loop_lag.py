"""How late the front end's event loop runs what is due: while something holds it, no stream gets its next part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PERIOD_S = 0.005
"""Seconds between two looks: what holds the loop is seen to this much."""


async def watch_loop_lag(observe: Callable[[float], None]) -> None:
    """Calls `observe` with the seconds by which the running event loop is late, again and again, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        observe(max(loop.time() - due, 0.0))
