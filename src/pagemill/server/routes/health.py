"""`/health` and `/ready`: whether a request that came now would be answered; `/live`: whether a restart would help."""

from __future__ import annotations

import asyncio
import contextlib
import time

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from pagemill.errors import PagemillError
from pagemill.frontend.async_llm import AsyncLLM

PERIOD_S = 1.0
"""Seconds between two questions at least, however many ask for health."""


class Health:
    """Asks the engine and the tokenizer one question at a time, and waits for no answer: who asks for health gets what
    is known."""

    def __init__(self, llm: AsyncLLM, stuck_after_s: float) -> None:
        """stuck_after_s: without an answer for so long, engine or tokenizer count as stuck."""
        self._llm = llm
        self._stuck_after_s = stuck_after_s
        self._question: asyncio.Task[None] | None = None
        self._asked_s = -PERIOD_S

    def answer(self, while_loading: int = 503) -> JSONResponse:
        """Returns 200 if requests are answered; 503 when the engine is gone, and when it is stuck.

        while_loading: the status while the model loads, also into another engine where one has died.
        """
        llm = self._llm
        if llm.error is not None:
            return JSONResponse({"status": "dead", "error": llm.error.message}, status_code=503)
        if llm.restarting is not None:
            about = {"status": "restarting", "error": llm.restarting.message}
            return JSONResponse(about, status_code=while_loading)
        if not llm.is_ready:
            done, total = llm.load_progress or (0, 0)
            return JSONResponse(
                {"status": "loading", "progress": round(done / total, 3) if total else 0.0}, status_code=while_loading
            )
        silent_s = self._silent_s()
        if silent_s > self._stuck_after_s:
            return JSONResponse({"status": "stuck", "silent_s": round(silent_s, 1)}, status_code=503)
        return JSONResponse({"status": "ok"})

    def _silent_s(self) -> float:
        """Returns for how long the last question has had no answer; if it has one, asks another after a while."""
        now = time.monotonic()
        if self._question is not None and not self._question.done():
            return now - self._asked_s
        if now - self._asked_s >= PERIOD_S:
            self._question, self._asked_s = asyncio.create_task(self._ask()), now
        return 0.0

    async def _ask(self) -> None:
        with contextlib.suppress(PagemillError):
            await self._llm.respond()


def health_routes(llm: AsyncLLM, stuck_after_s: float) -> APIRouter:
    """Returns the routes."""
    routes, health = APIRouter(), Health(llm, stuck_after_s)

    @routes.get("/ready")
    @routes.get("/health")
    async def get_health() -> JSONResponse:
        """Answers 200 when a request would be answered now; 503 while loading or restarting, and when the engine is
        gone or stuck."""
        return health.answer()

    @routes.get("/live")
    async def get_live() -> JSONResponse:
        """Answers 503 when only a restart helps: the engine is gone or stuck; 200 otherwise, also while loading
        or restarting."""
        return health.answer(while_loading=200)

    return routes
