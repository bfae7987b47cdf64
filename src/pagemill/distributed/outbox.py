"""Outbox: messages that wait to be sent, those that have gathered at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from itertools import accumulate
from typing import Any

import msgspec

from pagemill.distributed.messages import Batch
from pagemill.engine.wire import encode

MOST_BYTES = 1 << 18
"""Bytes of messages beyond which the rest waits for the next batch: who receives one does nothing else meanwhile."""


class Outbox:
    """Gathers messages while an earlier batch is under way. Belongs to one event loop."""

    def __init__(self) -> None:
        self._messages: list[msgspec.Raw] = []
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, message: Any) -> None:
        """Adds a message. Raises `InvalidRequestError` for one that cannot be said."""
        self._messages.append(msgspec.Raw(encode(message)))
        self._changed.set()

    async def take(self, timeout_s: float | None = None) -> bytes | None:
        """Waits for messages, and returns those that have gathered as one batch, as far as they fit in MOST_BYTES, one
        at least; an empty one when the time is over, and None once the outbox is closed and empty."""
        if not self._messages and not self._closed:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        if self._closed and not self._messages:
            return None
        sizes = accumulate(len(memoryview(message)) for message in self._messages)
        count = max(1, sum(size <= MOST_BYTES for size in sizes))
        messages, self._messages = self._messages[:count], self._messages[count:]
        return encode(Batch(time.monotonic(), messages))

    def close(self) -> None:
        """Lets nothing follow what has gathered."""
        self._closed = True
        self._changed.set()
