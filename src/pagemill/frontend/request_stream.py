"""RequestStream: one request of an `AsyncLLM`, whose answer comes as an async iterator."""

from __future__ import annotations

import asyncio
from typing import Protocol

from pagemill.errors import PagemillError
from pagemill.frontend.frontend import Frontend
from pagemill.frontend.outputs import RequestOutput
from pagemill.frontend.request_state import RequestState


class DeltaReader(Protocol):
    """Takes what is new of an answer as soon as it is there."""

    def ready(self) -> bool:
        """Returns True if `take` may be called now."""

    def take(self, output: RequestOutput) -> None:
        """Takes what is new."""


class RequestStream:
    """The answer to one request as it comes, for one consumer: an async iterator of outputs, each of which holds what
    `SamplingParams.output_kind` asks for.

    Raises the request's own error, or `EngineDeadError`. Leaving it early must be said with `close()`, or
    `contextlib.aclosing`. The last output of a session's turn is given once the session has the turn: an answer that
    was aborted stays as far as it came, one that failed, or whose reader left, leaves no trace.
    """

    def __init__(self, frontend: Frontend, request: RequestState) -> None:
        """Sends a prepared request to the engine. Raises what `Frontend.start` raises."""
        self.request = request
        self._frontend = frontend
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        """The consumer waits for it. An `asyncio.Event`, made for any number of consumers, takes twice as long."""
        self._reader: DeltaReader | None = None
        self._reader_error: Exception | None = None
        self._ended = False
        request.on_news = self._tell
        frontend.start(request)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.prompt_token_ids

    def only_whole(self) -> None:
        """Makes the iterator give all of the answer at once, at the end. Until then it can begin again."""
        self.request.final_only = True

    def whole(self) -> RequestOutput:
        """Returns all that has come so far."""
        return self.request.whole()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        output = None
        while output is None or not output.outputs:  # none where it has begun again since there was something
            if not self._has_news:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            self._has_news = False
            if self._reader_error is not None:
                raise self._reader_error
            if self.request.error is not None:
                self.close()
                raise self.request.error
            if self.request.has_undecoded_logprobs:
                owner, size = self.request.space.tenant, len(self.request.prompt_token_ids)
                await self._frontend.worker.run_for(owner, size, self.request.decode_prompt_logprobs)
            output = self.request.take()
        self._ended = output.finished
        if output.finished:
            await self._frontend.commit_turn(self.request)
        return output

    def hand_to(self, reader: DeltaReader) -> None:
        """Lets a reader of deltas have what comes while the consumer waits, who is not woken for it. The consumer still
        gets what the reader is not ready for, the end, and errors, also those that the reader raises."""
        self._reader = reader

    def _tell(self) -> None:
        """Hands on what has come, or lets the consumer go on."""
        if self._waiter is None or self._waiter.done():
            self._has_news = True
        elif not self._read():
            self._has_news = True
            self._waiter.set_result(None)

    def _read(self) -> bool:
        """Returns True if the reader has taken what has come."""
        request = self.request
        if self._reader is None or request.finished or request.error is not None or not self._reader.ready():
            return False
        try:
            self._reader.take(request.take())
        except Exception as error:
            self._reader_error = error
            return False
        return True

    def close(self) -> None:
        """Aborts the request if it still runs; the engine gives back all that it held."""
        self._ended = True
        self._frontend.release(self.request)
        self._frontend.end_turn(self.request)

    async def aclose(self) -> None:
        """Does what `close` does, for `contextlib.aclosing`."""
        self.close()

    def fail(self, error: PagemillError) -> None:
        """Makes the iterator raise an error, unless it has ended."""
        self.request.fail(error)

    def abort(self) -> None:
        """Ends the iterator with `finish_reason` "abort"."""
        self._frontend.abort(self.request)
