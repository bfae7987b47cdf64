"""Reads the lines of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx


async def event_lines(response: httpx.Response) -> AsyncGenerator[str, None]:
    """Yields a stream's lines, which end at line feeds alone.

    httpx's own lines end at other characters too (U+0085, U+2028, U+2029), which may stand within JSON. Raises
    httpx.HTTPError where the stream breaks off.
    """
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
