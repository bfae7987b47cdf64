"""OpenAI's headers that say how much of its limits per minute a tenant has left."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from starlette.types import Message, Send

from pagemill.frontend.rates import RateStatus

RATE_HEADERS = [
    f"x-ratelimit-{part}-{kind}" for kind in ("requests", "tokens") for part in ("limit", "remaining", "reset")
]


def with_rate_headers(send: Send, rates: Callable[[], Mapping[str, RateStatus]]) -> Send:
    """Returns a `send` that adds the headers to an answer, as things stand when that begins."""

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            added = [(name.encode(), value.encode()) for name, value in rate_headers(rates()).items()]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return told


def rate_headers(rates: Mapping[str, RateStatus]) -> dict[str, str]:
    """Returns the headers for the limits that there are."""
    headers = {}
    for kind, status in rates.items():
        headers[f"x-ratelimit-limit-{kind}"] = str(status.limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(status.remaining)
        headers[f"x-ratelimit-reset-{kind}"] = _duration(status.reset_s)
    return headers


def _duration(seconds: float) -> str:
    """Returns a time as these headers have it: 250ms, 12s, 1m30s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
