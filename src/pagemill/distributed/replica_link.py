"""ReplicaLink: a front end's connection to one replica, through a Ray Serve handle.

Where the replica offers a connection past Ray and it can be made, all batches go over that. The stream through Ray
stays open then, without batches: it says that the replica has ended, or that its machine is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pagemill.distributed.direct import DirectConnection, connect
from pagemill.distributed.messages import OUTBOUND, Offer
from pagemill.distributed.outbox import Outbox
from pagemill.engine.messages import EngineReady, Failure, Held, SequenceOutput, StepOutputs
from pagemill.engine.queries import Answer, Query
from pagemill.errors import EngineDeadError, PagemillError
from pagemill.frontend.questions import Questions

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

LOGGER = logging.getLogger(__name__)

PING_S = 5.0
"""The longest time without a batch to a replica, which takes a front end for gone otherwise."""

SEND_S = 1.0
"""Seconds after which a batch that has not arrived is sent again; the replica takes each once."""

LAST_S = 1.0
"""Seconds for what is on its way past Ray once Ray has said that a replica has ended."""

A = TypeVar("A")


class LinkUser(Protocol):
    """Is told what comes over a link."""

    def note_facts(self, link: ReplicaLink, facts: EngineReady) -> None:
        """Takes the engine's facts: at first, and whenever they change."""

    def note_held(self, link: ReplicaLink, held: Held) -> None:
        """Takes which blocks come and go."""

    def note_outputs(self, link: ReplicaLink, outputs: list[SequenceOutput]) -> None:
        """Takes what a step has brought."""

    def note_end(self, link: ReplicaLink) -> None:
        """Takes that nothing comes any more; `link.death` says why."""


class ReplicaLink:
    """Belongs to one event loop. name: the replica's. front_end: this side's, used once."""

    def __init__(self, name: str, front_end: str, handle: DeploymentHandle[Any], user: LinkUser) -> None:
        self.name = name
        self.death: PagemillError | None = None
        """Why nothing can be sent any more; None while it can."""
        self.closing = False
        """True once this side has decided to end it, so that its end is no loss."""
        self.facts: EngineReady | None = None
        """The engine's facts; None until they have come."""
        self._front_end = front_end
        self._handle = handle
        self._user = user
        self._outbox = Outbox()
        self._questions = Questions()
        self._batches = itertools.count(1)
        self._last_words: Failure | None = None
        self._direct: DirectConnection | None = None
        self._taking: asyncio.Task[None] | None = None
        """Takes what comes past Ray."""
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._send())]

    @property
    def engine_died(self) -> bool:
        """Returns whether the replica has said that its engine has died, so that it ends too."""
        return self._last_words is not None

    def send(self, message: Any) -> None:
        """Queues a message, in order; nothing happens if the replica is gone. Raises `InvalidRequestError` for one that
        cannot be sent."""
        if self.death is None:
            self._outbox.put(message)

    async def ask(self, query: Query[A]) -> A:
        """Returns the engine's answer. Raises what it refuses with, and `EngineDeadError` where it is gone."""
        if self.death is not None:
            raise self.death
        question, answer = self._questions.pose(query)
        self.send(question)
        return await answer

    async def close(self) -> None:
        """Lets the replica end the stream behind what is on its way; it has nothing of this front end then."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._ask_to_close(), PING_S)
        with contextlib.suppress(asyncio.CancelledError, asyncio.TimeoutError):
            await asyncio.wait_for(self._tasks[0], PING_S)
        self._end(EngineDeadError(f"the connection to replica {self.name} was closed"))

    async def _ask_to_close(self) -> None:
        await self._handle.close.remote(self._front_end, replica=self.name)

    async def _receive(self) -> None:
        try:
            stream = self._handle.options(stream=True).outputs.remote(self._front_end, replica=self.name)
            async for batch in stream:
                self._take(batch)
            why = "it has ended"
        except Exception as error:  # Ray raises children of several classes for what is gone
            why = _said(error)
        if self._taking is not None:
            await asyncio.wait({self._taking}, timeout=LAST_S)
        self._end_for(why)

    async def _follow(self, offer: Offer) -> None:
        """Takes what comes past Ray, if there is such a way. Where it is there too late, the replica closes it, and
        sends all through Ray."""
        connection = await connect(offer)
        if connection is None or (first := await connection.receive_first()) is None:
            LOGGER.warning("replica %s is not reached at %s:%d, so Ray carries all", self.name, offer.host, offer.port)
            return
        self._direct = connection
        batch: bytes | None = first
        why = "the connection has ended"
        try:
            while batch is not None:
                self._take(batch)
                batch = await connection.receive()
        except Exception as error:
            why = _said(error)
        self._end_for(why)

    def _end_for(self, why: str) -> None:
        """Ends everything; what the replica has said of its end goes before what this side has seen."""
        if self._last_words is not None:
            why = self._last_words.message
        self._end(EngineDeadError(f"replica {self.name} is gone ({why})"))

    async def _send(self) -> None:
        """Sends one batch after another, each once the one before has arrived: Ray keeps no order among calls."""
        try:
            while (batch := await self._outbox.take(PING_S)) is not None:
                await self._known()
                if self._direct is None:
                    await self._deliver(next(self._batches), batch)
                    continue
                try:
                    await self._direct.send(batch)
                except OSError:
                    return  # who takes what comes sees that too, behind the replica's last words
        except Exception as error:
            self._end(EngineDeadError(f"replica {self.name} is gone ({_said(error)})"))

    async def _deliver(self, number: int, batch: bytes) -> None:
        """Sends a batch until it has arrived, so that a call that was lost on the way costs a second."""
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._call(number, batch), SEND_S)
                return

    async def _call(self, number: int, batch: bytes) -> None:
        await self._handle.send.remote(self._front_end, number, batch, replica=self.name)

    async def _known(self) -> None:
        """Waits until the replica knows this front end."""
        while self.facts is None:
            await asyncio.sleep(0.01)

    def _take(self, data: bytes) -> None:
        batch = OUTBOUND.decode(data)
        moved_s = time.monotonic() - batch.sent_s
        for message in batch.messages:
            match message:
                case StepOutputs():
                    for output in message.outputs:
                        if output.scheduled_s:
                            output.scheduled_s += moved_s
                    self._user.note_outputs(self, message.outputs)
                case Held():
                    self._user.note_held(self, message)
                case EngineReady():
                    self.facts = message
                    self._user.note_facts(self, message)
                case Answer():
                    self._questions.take(message)
                case Failure():
                    self._last_words = message
                case Offer():
                    self._taking = asyncio.create_task(self._follow(message))
                    self._tasks.append(self._taking)

    def _end(self, death: PagemillError) -> None:
        """Ends everything once, and says so."""
        if self.death is not None:
            return
        self.death = death
        if self._direct is not None:
            self._direct.close()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._questions.refuse(death)
        self._user.note_end(self)


def _said(error: Exception) -> str:
    """Returns what is said of an error that has ended a connection. One that no lost connection raises is logged whole:
    this side has a bug."""
    if not (isinstance(error, (OSError, EngineDeadError)) or type(error).__module__.startswith("ray.")):
        LOGGER.error("a connection to a replica ends by an error of this side", exc_info=error)
    return type(error).__name__


def is_refusal(error: BaseException) -> bool:
    """Returns whether an engine refused a query, instead of being gone."""
    return isinstance(error, PagemillError) and not isinstance(error, EngineDeadError)
