"""A fleet without Ray: replicas here, each with an engine process of its own, behind the `Fleet` that serves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from pagemill.config import EngineConfig
from pagemill.distributed import listing
from pagemill.distributed.fleet import Fleet
from pagemill.distributed.replica import EngineReplica
from pagemill.distributed.replica_link import ReplicaLink
from pagemill.engine.messages import EngineRequest, Held, Peering, SequenceOutput
from pagemill.errors import PagemillError
from pagemill.frontend.frontend import Frontend
from pagemill.frontend.supervisor import RestartLimits


class Replica(EngineReplica):
    """A replica that nobody but its owner ends: Ray Serve awaits what a collection would only call."""

    def __del__(self) -> None:  # type: ignore[override]
        pass

    async def end(self) -> None:
        await EngineReplica.__del__(self)


class Handle:
    """Calls replicas by name, as Ray Serve's handle does for a `Fleet`."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = replicas
        self.wait_ready = SimpleNamespace(remote=self._wait_ready)
        self.send = SimpleNamespace(remote=self._send)
        self.close = SimpleNamespace(remote=self._close)
        self.outputs = SimpleNamespace(remote=self._outputs)

    def options(self, *, stream: bool) -> Handle:
        return self

    async def _wait_ready(self, replica: None) -> None:
        for watcher in listing.watchers:
            watcher({*self._replicas})

    async def _send(self, front_end: str, number: int, batch: bytes, replica: str) -> None:
        await self._replicas[replica].send(front_end, number, batch, replica)

    async def _close(self, front_end: str, replica: str) -> None:
        await self._replicas[replica].close(front_end, replica)

    def _outputs(self, front_end: str, replica: str) -> AsyncIterator[bytes]:
        return self._replicas[replica].outputs(front_end, replica)


@dataclass
class Answer:
    """Holds what has come of a request: tokens, how many of its prompt's were found, and when the first came, by
    `time.monotonic()`."""

    tokens: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    first_s: float = 0.0


class FleetHere(Fleet):
    """Answers requests of token ids. held: what each replica has told. watch: is told of all outputs, as they come."""

    def __init__(self, replicas: Mapping[str, Replica], config: EngineConfig) -> None:
        super().__init__(config, cast(Any, Handle(replicas)), "least-work", RestartLimits())
        self.replicas = replicas
        self.watch: Callable[[SequenceOutput], None] = lambda output: None
        self.held: dict[str, list[Held]] = {name: [] for name in replicas}
        self.num_sent_again = 0
        self.made_pins = SimpleNamespace(requests=list)
        self._answers: dict[str, tuple[Answer, asyncio.Future[Answer]]] = {}

    async def answer(self, request: EngineRequest) -> Answer:
        """Returns what comes of a request. Raises its error."""
        ended: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[request.request_id] = Answer(), ended
        self.submit(request)
        return await ended

    def receive(self, outputs: list[SequenceOutput]) -> None:
        """Takes what replicas have brought, as a `Frontend` does."""
        for output in outputs:
            self.watch(output)
            answer, ended = self._answers[output.request_id]
            answer.first_s = answer.first_s or time.monotonic()
            answer.tokens += output.new_token_ids
            answer.num_cached_tokens = output.num_cached_tokens
            if output.finish_reason is not None and not ended.done():
                del self._answers[output.request_id]
                if output.error is None:
                    ended.set_result(answer)
                else:
                    ended.set_exception(output.error.to_error())

    def note_held(self, link: ReplicaLink, held: Held) -> None:
        self.held[link.name].append(held)
        super().note_held(link, held)


@contextlib.asynccontextmanager
async def replicas_here(
    configs: Mapping[str, EngineConfig], peering: Peering | None = None
) -> AsyncIterator[dict[str, Replica]]:
    """Gives replicas, by name, once all have loaded. peering: how they fetch from each other; None: they do not."""
    replicas: dict[str, Replica] = {}
    try:
        for name, config in configs.items():
            replica = object.__new__(Replica)
            await replica.__init__(config, None, peering)  # type: ignore[misc]
            replicas[name] = replica
        yield replicas
    finally:
        await asyncio.gather(*(replica.end() for replica in replicas.values()))


@contextlib.asynccontextmanager
async def fleet_of(replicas: Mapping[str, Replica], config: EngineConfig) -> AsyncIterator[FleetHere]:
    """Gives a front end of replicas once it has a connection to each of them. config: theirs."""
    fleet = FleetHere(replicas, config)
    await fleet.load(lambda done, total: None)
    running = asyncio.create_task(fleet.run(cast(Frontend, fleet)))
    try:
        while not all(fleet.held.values()):
            await asyncio.sleep(0.01)
        yield fleet
    finally:
        await fleet.close()
        with contextlib.suppress(PagemillError):
            await running
