"""Sends long answers in parts: one of fifty megabytes holds the event loop while it is copied on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

PART_BYTES = 1 << 18


class JSONInParts(Response):
    """An answer of JSON that is written already, in pieces of any length. Others use the event loop between parts."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(media_type="application/json")
        self._pieces = pieces
        self._length = sum(map(len, pieces))
        self.headers["content-length"] = str(self._length)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        left = self._length
        for part in _parts(self._pieces):
            left -= len(part)
            await send({"type": "http.response.body", "body": part, "more_body": left > 0})
            await asyncio.sleep(0)


async def written(make: Callable[[], BaseModel]) -> JSONInParts:
    """Returns what `make` returns as an answer, made and written in a thread."""
    return JSONInParts([await asyncio.to_thread(lambda: make().model_dump_json().encode())])


def _parts(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """Yields the pieces in parts of `PART_BYTES`; the last is what is left."""
    gathered = bytearray()
    for piece in pieces:
        for at in range(0, len(piece), PART_BYTES):
            gathered += piece[at : at + PART_BYTES]
            if len(gathered) >= PART_BYTES:
                yield bytes(gathered)
                gathered.clear()
    if gathered:
        yield bytes(gathered)
