"""Supervisor: takes what an engine process sends, and starts another where it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NoReturn

from msgspec import Meta

from pagemill.arguments import Positive, about, check_fields, suggest_arguments
from pagemill.errors import ConfigError, EngineDeadError, EngineRestartingError, PagemillError
from pagemill.frontend.frontend import Frontend
from pagemill.frontend.process_client import ProcessClient

LOGGER = logging.getLogger(__name__)

OUTPUTS_AT_ONCE = 16
"""Outputs of one step that are taken before others may use the event loop."""
LONGEST_DELAY_S = 30.0
"""The most seconds that pass between a death and the start of another process."""


@suggest_arguments
@dataclass(kw_only=True, frozen=True)
class RestartLimits:
    """Says how often an engine process that has died is started again. Raises `ConfigError` for a wrong value."""

    max_engine_restarts: Annotated[
        Annotated[int, Meta(ge=0)],
        about(
            "Times that an engine process that has died is started again within engine_restart_window_s; when it dies "
            "once more, the server ends with status 1."
        ),
    ] = 3
    engine_restart_window_s: Annotated[
        Positive, about("Seconds after which a restart of the engine process no longer counts.")
    ] = 300.0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)

    def refusal(self, starts_s: deque[float], now: float) -> str | None:
        """Returns why there is to be no other start behind these; None if there may be. Drops those out of the window.

        starts_s: when there were some, the oldest first.
        """
        while starts_s and now - starts_s[0] > self.engine_restart_window_s:
            starts_s.popleft()
        if len(starts_s) < self.max_engine_restarts:
            return None
        return (
            f"it has been started again {len(starts_s)} times in {self.engine_restart_window_s:g} s, and is not once "
            f"more (max_engine_restarts)"
        )


class Supervisor:
    """Keeps one engine running, as far as its limits allow."""

    def __init__(self, client: ProcessClient, limits: RestartLimits, on_progress: Callable[[int, int], None]) -> None:
        """on_progress(done, total): told how loading goes."""
        self.num_restarts = 0
        """Processes that were started in the place of one that had died."""
        self._client = client
        self._limits = limits
        self._on_progress = on_progress
        self._restarts_s: deque[float] = deque()
        """When the restarts within the window were."""

    async def run(self, frontend: Frontend) -> NoReturn:
        """Takes everything that the engine sends. Raises why it has ended, for good."""
        while True:
            await self._restart(frontend, await self._receive(frontend))

    async def _receive(self, frontend: Frontend) -> EngineDeadError:
        """Takes what one process sends, and returns what became of it."""
        try:
            while True:
                outputs = await self._client.receive()
                for first in range(0, len(outputs), OUTPUTS_AT_ONCE):
                    frontend.receive(outputs[first : first + OUTPUTS_AT_ONCE])
                    await asyncio.sleep(0)
        except EngineDeadError as death:
            return death

    async def _restart(self, frontend: Frontend, death: PagemillError) -> None:
        """Returns when an engine runs again. A process that does not load is another death."""
        interrupted = False
        while True:
            self._check_alive()
            delay_s = self._next_delay_s(death)
            number, most = len(self._restarts_s), self._limits.max_engine_restarts
            error = EngineRestartingError(
                f"{_said(death)}, and another is being started (restart {number} "
                f"of at most {most} in {self._limits.engine_restart_window_s:g} s); send this again"
            )
            LOGGER.error("%s", error.message.removesuffix("; send this again"))
            self._client.interrupt(error)
            if not interrupted:
                frontend.interrupt(error)
                interrupted = True
            await asyncio.sleep(delay_s)
            self.num_restarts += 1
            try:
                await self._client.restart(frontend.tenants, self._on_progress)
            except PagemillError as failed:
                death = failed
                continue
            except OSError as failed:
                death = EngineDeadError(f"no engine process could be started ({failed})")
                continue
            again = await frontend.resume()
            LOGGER.warning("an engine runs again; requests that were sent once more: %d", again)
            return

    def _check_alive(self) -> None:
        if self._client.ended is not None:
            raise self._client.ended

    def _next_delay_s(self, death: PagemillError) -> float:
        """Returns the seconds to wait before the next restart: none, then 1, 2, 4, and so on. Raises `EngineDeadError`
        where there is to be none."""
        now, restarts_s = time.monotonic(), self._restarts_s
        if (refusal := self._limits.refusal(restarts_s, now)) is not None:
            raise EngineDeadError(f"{_said(death)}; {refusal}") if restarts_s else death
        restarts_s.append(now)
        return 0.0 if len(restarts_s) == 1 else min(2.0 ** (len(restarts_s) - 2), LONGEST_DELAY_S)


def _said(death: PagemillError) -> str:
    """Returns what became of an engine, without the way out for one that is not started again."""
    return death.message.removesuffix("; start a new one")
