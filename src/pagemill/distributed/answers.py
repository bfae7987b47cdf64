"""Waits for the answers of several replicas, some of which may be silent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pagemill.distributed.replica_link import is_refusal


async def answered(asking: Sequence[asyncio.Task[Any]], timeout_s: float | None) -> set[asyncio.Task[Any]]:
    """Returns those that have ended once all have, or after a time those that have by then, but not before one has
    answered: where nobody does, who asks is to notice. What has not ended goes on. timeout_s: None for no limit."""
    done, silent = set[asyncio.Task[Any]](), {*asking}
    try:
        done, silent = await asyncio.wait(silent, timeout=timeout_s)
        while silent and all(map(_is_gone, done)):
            more, silent = await asyncio.wait(silent, return_when=asyncio.FIRST_COMPLETED)
            done |= more
    except asyncio.CancelledError:
        for each in asking:
            each.cancel()
        raise
    return done


def _is_gone(asked: asyncio.Task[Any]) -> bool:
    error = asked.exception()
    return error is not None and not is_refusal(error)
