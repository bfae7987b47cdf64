"""RunningRequests: the requests that an engine has and that have not ended, also where another takes its place."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable

from pagemill.engine.messages import EngineRequest, SequenceOutput
from pagemill.errors import (
    EngineRestartingError,
    InvalidRequestError,
    PagemillError,
    RequestNotFoundError,
    TooManyWaitingError,
)
from pagemill.frontend.client import EngineClient
from pagemill.frontend.made_pins import MadePins
from pagemill.frontend.rates import Rates
from pagemill.frontend.request_state import RequestState
from pagemill.namespace import Namespace
from pagemill.text.tokenizer import Tokenizer

LOGGER = logging.getLogger(__name__)

REQUESTS_AT_ONCE = 64
"""Requests that are sent to another engine before others may use the event loop."""
MAX_SENT = 2
"""Engines that a request is sent to, one after another: it may be what they die of."""


class RunningRequests:
    """Sends requests to an engine, and hands them what it brings."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, rates: Rates) -> None:
        self.client = client
        self.rates = rates
        self.made_pins = MadePins()
        self.num_sent_again = 0
        """Requests that were sent once more, to an engine that took the place of another."""
        self.on_request_end: Callable[[RequestState], None] = lambda request: None
        """Called with each request when it has ended."""
        self._tokenizer = tokenizer
        self._running: dict[str, RequestState] = {}
        self._by_engine_id: dict[str, RequestState] = {}
        self._numbers = itertools.count()
        self._interrupted = False
        """True while another engine is being started, to which what runs will be sent."""

    def new_request_id(self, wanted: str | None = None) -> str:
        """Returns an id for a request. Raises `InvalidRequestError` for one that is in use."""
        request_id = f"request-{next(self._numbers)}" if wanted is None else wanted
        if request_id in self._running:
            raise InvalidRequestError(
                f"a request with the id {request_id!r} is still running; give each its own", param="request_id"
            )
        return request_id

    def begin(self, request: RequestState) -> None:
        """Takes a request among those that run, and sends it. Raises `InvalidRequestError` or `EngineDeadError`."""
        name = self.new_request_id(request.request_id)
        if not self._interrupted:
            self._send(request)
        self._running[name] = request

    def running(self, request_id: str, space: Namespace | None = None) -> RequestState:
        """Returns a request that has not ended, of any namespace if that is None. Raises `RequestNotFoundError`."""
        request = self._running.get(request_id)
        if request is None or (space is not None and request.space != space):
            raise RequestNotFoundError(
                f"no request {request_id!r} is running; to go on from one that has ended, give all of it as a prompt"
            )
        return request

    def receive(self, outputs: Iterable[SequenceOutput]) -> list[RequestState]:
        """Takes what a step has brought, and returns the requests that have something new, each once.

        Outputs of other requests are dropped: their end has just crossed with a step.
        """
        now, stopped = time.monotonic(), []
        changed: dict[str, RequestState] = {}
        for output in outputs:
            request = self._by_engine_id.get(output.request_id)
            if request is not None:
                changed[output.request_id] = request
                if request.add(output, now):
                    stopped.append((output.request_id, output.index))
        if stopped:
            self.client.finish(stopped)
        for request in changed.values():
            request.tell()
            if request.finished:
                self.release(request)
        return [*changed.values()]

    def release(self, request: RequestState) -> None:
        """Forgets a request; one that the engine still runs is aborted. Its name may be another's by now."""
        if self._running.get(request.request_id) is not request:
            return
        del self._running[request.request_id]
        self._by_engine_id.pop(request.engine_id, None)
        if request.asked.pin is not None and request.finished and request.error is None:
            self.made_pins.add(request.asked)
        answered = sum(len(sequence.output.token_ids) for sequence in request.sequences)
        self.rates.spend(request.space.tenant, answered)
        self.uncharge(request, request.error)
        self.on_request_end(request)
        if not request.finished:
            self.client.abort([request.engine_id])

    def uncharge(self, request: RequestState, error: BaseException | None) -> None:
        """Gives back what a request's call has taken of its tenant's minute, if the request could not even wait."""
        if request.charge is not None and isinstance(error, TooManyWaitingError):
            request.charge.give_back()

    def abort(self, request: RequestState) -> None:
        """Ends a request with `finish_reason` "abort"; what has come stays."""
        self.release(request)
        request.abort()

    def interrupt(self, error: EngineRestartingError) -> None:
        """Ends the requests that have given something to their callers, and those that have seen `MAX_SENT` engines
        die, with an error. The others begin again, and are sent by `resume`."""
        self._interrupted = True
        self._by_engine_id.clear()
        for request in [*self._running.values()]:
            if request.has_given or request.num_sent >= MAX_SENT:
                request.fail(error)
                self.release(request)
            else:
                request.begin_again()

    async def resume(self) -> int:
        """Makes the pins again, in an engine that has taken the place of another, and sends it what runs. Returns how
        many requests had been sent before."""
        self._interrupted, waiting = False, [*self._running.values()]
        for asked in self.made_pins.requests():
            self._make_again(asked)
        again = 0
        for number, request in enumerate(waiting):
            if not number % REQUESTS_AT_ONCE:
                await asyncio.sleep(0)
            if self._running.get(request.request_id) is request:
                again += request.num_sent > 0
                request.asked.fork_of = None  # nothing of another engine's is there
                try:
                    self._send(request)
                except InvalidRequestError as refusal:
                    request.fail(refusal)
                    self.release(request)
        self.num_sent_again += again
        return again

    def _make_again(self, asked: EngineRequest) -> None:
        """Sends the request of a pin, whose end goes to the log where it fails."""
        pin = RequestState(asked, self._tokenizer)

        def ended() -> None:
            if pin.finished:
                self._by_engine_id.pop(pin.engine_id, None)
            if pin.error is not None:
                LOGGER.error("pin %r of tenant %r could not be made again: %s", asked.pin, asked.tenant, pin.error)
                self.made_pins.remove(str(asked.pin), pin.space)

        pin.on_news = ended
        self._send(pin)

    def fail(self, error: PagemillError) -> None:
        """Ends every request with an error, for an engine that is gone."""
        failed = [*self._running.values()]
        self._running.clear()
        self._by_engine_id.clear()
        for request in failed:
            request.fail(error)

    def _send(self, request: RequestState) -> None:
        """Sends a request to the engine. Raises `InvalidRequestError` or `EngineDeadError`."""
        # Steps under way may still bring tokens of an earlier request of this name: the engine's is used once.
        request.asked.request_id = f"{request.request_id}#{next(self._numbers)}"
        self.client.submit(request.asked)
        request.num_sent += 1
        self._by_engine_id[request.engine_id] = request
