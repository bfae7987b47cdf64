"""Asks a server for one streamed completion, and reads no more of it than a measurement needs."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

LAST_BYTES = 2000
"""The end of an answer that surely holds its last event but one, with the usage."""


async def ask(client: httpx.AsyncClient, model: str, prompt: list[int], tokens: int) -> tuple[float, dict[str, Any]]:
    """Returns the seconds until the first byte of an answer of so many tokens, and its usage."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s, first_s, end = time.perf_counter(), 0.0, b""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for part in answer.aiter_raw():
            first_s = first_s or time.perf_counter() - began_s
            end = (end + part)[-LAST_BYTES:]
    usage: dict[str, Any] = json.loads(end.rpartition(b"\n\ndata: [DONE]")[0].rpartition(b"data: ")[2])["usage"]
    assert usage["completion_tokens"] == tokens, usage
    return first_s, usage
