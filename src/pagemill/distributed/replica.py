"""EngineReplica: one engine as a deployment of Ray Serve, for any number of front ends.

It passes messages on between its front ends and the engine, which runs in a child process as it does on one machine.
A front end has one stream of everything that is for it, in batches of what steps bring. They go over a connection past
Ray, which only says that both still live, or else through Ray, whose cost is by the message, whatever is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pagemill.config import EngineConfig
from pagemill.distributed.direct import CONNECT_S, DirectConnection, DirectServer
from pagemill.distributed.messages import INBOUND, Batch
from pagemill.distributed.outbox import Outbox
from pagemill.distributed.output import write_to
from pagemill.engine.messages import (
    DIGEST_BYTES,
    AbortRequests,
    EngineRequest,
    Failure,
    FinishSequences,
    Held,
    Peering,
    SequenceList,
    SequenceOutput,
    StepOutputs,
)
from pagemill.engine.queries import Answer, Question, StatsQuery
from pagemill.engine.stats import EngineStats
from pagemill.engine.wire import encode
from pagemill.errors import EngineDeadError, PagemillError
from pagemill.frontend.process_client import ProcessClient

LOGGER = logging.getLogger(__name__)

SILENT_S = 30.0
"""A front end that has sent nothing for so long is gone: its requests end. It sends something every few seconds."""
LOOK_S = 5.0
"""Seconds between two looks at who is silent."""
BLOCKS_AT_ONCE = 4096
"""Blocks in one message to a front end that is new: a replica may have millions on disk."""
LAST_WORDS_S = 0.2
"""Seconds in which front ends learn what an engine died of, before its replica ends too."""
SEPARATOR = "/"
"""Stands between a front end's name and the id of its request."""


@dataclass
class _FrontEnd:
    outbox: Outbox = field(default_factory=Outbox)
    heard_s: float = field(default_factory=time.monotonic)
    last_batch: int = 0
    connection: DirectConnection | None = None
    """Past Ray; None while Ray carries everything."""
    requests: dict[str, set[int]] = field(default_factory=dict)
    """The sequences that have not ended of each request that it has sent, by the engine's id."""

    def end(self, request_id: str, index: int) -> None:
        """Notes that a sequence has ended; nothing happens for one that has already."""
        left = self.requests.get(request_id, set())
        left.discard(index)
        if not left:
            self.requests.pop(request_id, None)


class EngineReplica:
    """Loads an engine, and lets front ends use it until Ray Serve ends it. Raises what keeps it from loading."""

    async def __init__(  # type: ignore[misc]
        self, config: EngineConfig, log_path: str | None, peering: Peering | None = None, host: str | None = None
    ) -> None:
        """log_path: see `FleetPlan`. peering: how it gives blocks to other replicas, with "" for the address of its
        node in the Ray cluster; None: it does not. host: where front ends connect to it, "" as well; None: Ray carries
        everything."""
        write_to(log_path)
        if peering is not None and not peering.host:
            peering = Peering(peering.secret, _node_address())
        self._blocks: set[bytes] = set()
        """Blocks that the engine holds, by their names in `Held`."""
        self._told = Held()
        """The last that the engine has told; the times in it hold."""
        self._front_ends: dict[str, _FrontEnd] = {}
        self._client = ProcessClient(config, self._note_held, peering)
        await self._client.load(lambda done, total: None)
        self._told_facts = self._client.facts
        self._direct = None if host is None else await _listening(host or _node_address())
        self._tasks = {asyncio.create_task(self._receive()), asyncio.create_task(self._watch())}

    async def outputs(self, front_end: str, replica: str) -> AsyncGenerator[bytes, None]:
        """Yields what is for a front end, from the engine's facts on, until `close`, or until the front end is silent.

        Its requests end with the stream. replica: this one; who routes the call reads it.
        """
        mine = self._front_ends[front_end] = _FrontEnd()
        mine.outbox.put(self._client.facts)
        for held in in_parts(self._told, self._blocks):
            mine.outbox.put(held)
        made: asyncio.Future[DirectConnection] | None = None
        try:
            if self._direct is not None:
                offer, made = self._direct.offer()
                yield encode(Batch(time.monotonic(), [msgspec.Raw(encode(offer))]))
                with contextlib.suppress(asyncio.TimeoutError):
                    mine.connection = await asyncio.wait_for(made, CONNECT_S)
            if mine.connection is not None:
                await self._serve_directly(front_end, mine, mine.connection)
                return
            while (batch := await mine.outbox.take()) is not None:
                yield batch
        finally:
            if made is not None and not made.cancel() and not made.cancelled() and mine.connection is None:
                made.result().close()  # it came as the stream ended
            if self._front_ends.get(front_end) is mine:
                del self._front_ends[front_end]
                if mine.requests:
                    self._client.abort([*mine.requests])

    async def send(self, front_end: str, number: int, batch: bytes, replica: str) -> None:
        """Takes a batch from a front end whose stream is open, once. Raises `EngineDeadError` where it has ended.

        number: rises with each batch; one that is sent again has that of before.
        """
        mine = self._front_ends.get(front_end)
        if mine is None:
            raise EngineDeadError("this replica has no stream to the front end any more; open another")
        mine.heard_s = time.monotonic()
        if number <= mine.last_batch:
            return
        mine.last_batch = number
        self._take(front_end, mine, batch)

    async def close(self, front_end: str, replica: str) -> None:
        """Ends a front end's stream, behind all that is on its way."""
        if (mine := self._front_ends.get(front_end)) is not None:
            mine.outbox.close()

    async def wait_ready(self, replica: str | None) -> None:
        """Returns as soon as it can be called."""

    async def check_health(self) -> None:
        """Raises why the engine is gone. Ray Serve calls it, and starts another replica where it takes too long."""
        await self.stats()

    async def stats(self) -> EngineStats:
        """Returns the engine's figures, taken between two steps."""
        return await self._client.ask(StatsQuery())

    @property
    def num_rows(self) -> int:
        """Returns how many sequences the engine computes at once."""
        return self._client.facts.max_num_seqs

    async def __del__(self) -> None:
        """Ends the engine, which saves what outlives it. Ray Serve calls it once no stream is open."""
        if self._direct is not None:
            self._direct.close()
        for task in self._tasks:
            task.cancel()
        await self._client.close()

    # Inside

    async def _serve_directly(self, front_end: str, mine: _FrontEnd, connection: DirectConnection) -> None:
        """Sends and takes a front end's batches over its connection, until either side ends it."""

        async def take() -> None:
            try:
                while (batch := await connection.receive()) is not None:
                    mine.heard_s = time.monotonic()
                    self._take(front_end, mine, batch)
            finally:
                mine.outbox.close()

        taking = asyncio.create_task(take())
        try:
            with contextlib.suppress(OSError):
                while (batch := await mine.outbox.take()) is not None:
                    await connection.send(batch)
        finally:
            taking.cancel()
            connection.close()

    def _take(self, front_end: str, mine: _FrontEnd, batch: bytes) -> None:
        """Passes on what a front end has sent."""
        now_s, inbound = time.monotonic(), INBOUND.decode(batch)
        for message in inbound.messages:
            match message:
                case EngineRequest():
                    message.request_id = f"{front_end}{SEPARATOR}{message.request_id}"
                    message.arrival_s += now_s - inbound.sent_s
                    if message.fork_of is not None:
                        message.fork_of = f"{front_end}{SEPARATOR}{message.fork_of[0]}", message.fork_of[1]
                    mine.requests[message.request_id] = {*range(message.params.n)}
                    self._client.submit(message)
                case AbortRequests():
                    ended = [f"{front_end}{SEPARATOR}{each}" for each in message.request_ids]
                    for each in ended:
                        mine.requests.pop(each, None)
                    self._client.abort(ended)
                case FinishSequences():
                    finished = [(f"{front_end}{SEPARATOR}{each}", at) for each, at in message.sequences]
                    for each, at in finished:
                        mine.end(each, at)
                    self._client.finish(finished)
                case Question():  # posed at once, so that no request behind it overtakes it
                    self._keep(self._answer(front_end, message.id, self._client.pose(message.query)))

    async def _receive(self) -> None:
        """Passes on what steps bring. Ends this process with the engine's, so that another replica is started."""
        try:
            while True:
                self._pass_on(await self._client.receive())
        except EngineDeadError as death:
            LOGGER.error("%s", death.message)
            for each in self._front_ends.values():
                each.outbox.put(Failure.of(death))
            await asyncio.sleep(LAST_WORDS_S)
            os._exit(1)

    def _pass_on(self, outputs: list[SequenceOutput]) -> None:
        by_front_end: dict[str, list[SequenceOutput]] = {}
        for output in outputs:
            engine_id = output.request_id
            front_end, _, output.request_id = engine_id.partition(SEPARATOR)
            if output.finish_reason is not None and (ending := self._front_ends.get(front_end)) is not None:
                ending.end(engine_id, output.index)
            by_front_end.setdefault(front_end, []).append(output)
        for front_end, its in by_front_end.items():
            if (each := self._front_ends.get(front_end)) is not None:
                each.outbox.put(StepOutputs(its))

    def _note_held(self, held: Held) -> None:
        self._blocks.difference_update(split_digests(held.removed))
        self._blocks.update(split_digests(held.stored))
        self._told = held
        for each in self._front_ends.values():
            each.outbox.put(held)

    async def _answer(self, front_end: str, number: int, answered: asyncio.Future[Any]) -> None:
        """Passes on the answer to a question; what has changed in the facts goes first, to everybody."""
        answer: Any
        try:
            answer = await answered
        except PagemillError as error:
            answer = Failure.of(error)
        if self._client.facts != self._told_facts:
            self._told_facts = self._client.facts
            for each in self._front_ends.values():
                each.outbox.put(self._client.facts)
        if isinstance(answer, SequenceList):
            answer = _sequences_of(front_end, answer)
        if (mine := self._front_ends.get(front_end)) is not None:
            mine.outbox.put(Answer(number, answer))

    async def _watch(self) -> None:
        """Ends the streams of front ends that are silent: Ray does not say that a caller is gone."""
        while True:
            await asyncio.sleep(LOOK_S)
            for each in self._front_ends.values():
                if time.monotonic() - each.heard_s > SILENT_S:
                    each.outbox.close()
                    if each.connection is not None:
                        each.connection.abort()

    def _keep(self, work: Any) -> None:
        """Runs a coroutine to its end beside the calls."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class ScaledReplica(EngineReplica):
    """Tells Ray Serve's autoscaler how much it is used; Ray Serve allows that only where there is one."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns what Ray Serve's autoscaler is told, see `autoscaling`."""
        stats = await self.stats()
        return {
            "running": float(stats.running),
            "waiting": float(stats.waiting),
            "rows": float(self.num_rows),
            "kv_used": stats.frames_active / max(1, stats.frames),
        }


async def _listening(host: str) -> DirectServer | None:
    """Returns a server of connections past Ray; None where it cannot listen there, which is logged."""
    server = DirectServer()
    try:
        await server.start(host)
    except OSError as error:
        LOGGER.warning("front ends cannot connect to %s, so Ray carries all: %s", host, error)
        return None
    return server


def _node_address() -> str:
    """Returns the address at which other nodes of the Ray cluster reach this one."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


def in_parts(told: Held, blocks: Iterable[bytes]) -> Iterator[Held]:
    """Gives the times in `told` with all blocks that an engine holds, BLOCKS_AT_ONCE in each message."""
    names = [*blocks]
    for first in range(0, max(1, len(names)), BLOCKS_AT_ONCE):
        stored = b"".join(names[first : first + BLOCKS_AT_ONCE])
        yield msgspec.structs.replace(told, stored=stored, removed=b"")


def split_digests(joined: bytes) -> list[bytes]:
    """Returns the beginnings of digests that a `Held` has."""
    return [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]


def _sequences_of(front_end: str, answer: SequenceList) -> SequenceList:
    """Returns a front end's own sequences, by the ids that it gave."""
    prefix = f"{front_end}{SEPARATOR}"
    return SequenceList(
        [
            msgspec.structs.replace(each, request_id=each.request_id.removeprefix(prefix))
            for each in answer.sequences
            if each.request_id.startswith(prefix)
        ]
    )
