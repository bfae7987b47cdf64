"""RequestStream: one request of an `AsyncLLM`, whose answer comes as an async iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pagemill.engine.output_processor import RequestState
from pagemill.engine.outputs import RequestOutput
from pagemill.errors import PagemillError


class RequestStream:
    """The answer to one request as it comes: an async iterator of deltas, for one consumer.

    Raises the request's own error, or `EngineDeadError`. Leaving it early must be said with `aclose()`.
    """

    def __init__(self, state: RequestState, release: Callable[[RequestStream], None]) -> None:
        self._release = release
        self.state = state
        self._changed = asyncio.Event()
        self._error: PagemillError | None = None
        self._ended = False

    @property
    def request_id(self) -> str:
        return self.state.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.state.prompt_token_ids

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        await self._changed.wait()
        self._changed.clear()
        error = self._error or self.state.error
        if error is not None:
            self.close()
            raise error
        output = self.state.take_delta()
        self._ended = output.finished
        return output

    def close(self) -> None:
        """Aborts the request if it still runs; the engine gives back all that it held."""
        self._ended = True
        self._release(self)

    async def aclose(self) -> None:
        self.close()

    def abort(self) -> None:
        """Ends the iterator with `finish_reason` "abort"."""
        self.state.abort()
        self.wake()

    def wake(self, error: PagemillError | None = None) -> None:
        """Something has changed: new tokens, the end, or this error."""
        self._error = self._error or error
        self._changed.set()
