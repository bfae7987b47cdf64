"""ProcessClient: an engine in a child process, spoken with over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from pagemill.config import EngineConfig
from pagemill.engine import messages
from pagemill.engine.messages import EngineReady, EngineRequest, Failure, Held, SequenceOutput
from pagemill.engine.queries import Answer, FromEngine, Query
from pagemill.engine.wire import HEADER, frame
from pagemill.errors import EngineDeadError, EngineRestartingError, EngineStoppedError, PagemillError
from pagemill.frontend.questions import Questions
from pagemill.frontend.spawn import spawn
from pagemill.lora_request import LoRARequest
from pagemill.tenant_limits import TenantLimits

LOGGER = logging.getLogger(__name__)

A = TypeVar("A")

SHUTDOWN_TIMEOUT_S = 10.0
"""A process that has not ended after so long is killed."""
KEEPING_TIMEOUT_S = 300.0
"""A process with a disk tier, on which it may have gigabytes to keep, is killed after so long."""


class ProcessClient:
    """An `EngineClient` of one process, or of those that take its place one after another. Loading begins with
    construction; all coroutines belong to one event loop.

    Queries are answered, and facts brought up to date, while somebody awaits `receive`.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_held: Callable[[Held], None] | None = None,
        peering: messages.Peering | None = None,
    ) -> None:
        """on_held: is told which blocks come and go in the pool; None: the engine does not say so. peering: how the
        engine gives blocks to others, and fetches theirs; None: it does not."""
        self.ended: PagemillError | None = None
        """Why nothing can be asked of this engine any more; None while it can."""
        self.interrupted: EngineRestartingError | None = None
        """Why nothing can be asked for a while; None while it can."""
        self._config = config
        self._on_held = on_held
        self._child = spawn()
        self._timeout_s = SHUTDOWN_TIMEOUT_S if config.kv_disk_memory is None else KEEPING_TIMEOUT_S
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._facts: EngineReady | None = None
        self._questions = Questions()
        self._aborting: list[str] = []
        self._random = random.Random(config.seed)
        self._loaded = False
        start = messages.Start(config, publishes=on_held is not None, peering=peering)
        self._child.socket.sendall(frame(start))

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._child.process.pid

    @property
    def facts(self) -> EngineReady:
        assert self._facts is not None
        return self._facts

    @property
    def max_num_seqs(self) -> int:
        return self.facts.max_num_seqs

    async def load(self, on_progress: Callable[[int, int], None]) -> None:
        """Attaches to the running event loop, and waits until the engine is loaded. Raises what kept it from that."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._child.socket)
        while not self._loaded:
            message = await self._next()
            if isinstance(message, messages.LoadProgress):
                on_progress(message.done, message.total)
            elif isinstance(message, EngineReady):
                self._facts, self._loaded = message, True

    def interrupt(self, error: EngineRestartingError) -> None:
        """Answers every question with this error, until a `restart` has succeeded. The process has ended."""
        self.interrupted = error
        self._questions.refuse(error)

    async def restart(self, tenants: Mapping[str, TenantLimits], on_progress: Callable[[int, int], None]) -> None:
        """Starts another process with the same settings, and gives it the sizes of KV pool and host memory that the
        last one had, and these tenants. Returns when it has loaded. Raises what kept it from that, or why this engine
        has ended."""
        await self._disconnect()
        if self.ended is not None:
            raise self.ended
        self._loaded, self._child = False, spawn()
        adapters = [LoRARequest(each.name, each.number, each.path) for each in self.facts.adapters]
        host = self.facts.host_bytes if self._config.kv_host_memory is None else self._config.kv_host_memory
        config = replace(self._config, tenants={}, kv_host_memory=host)
        start = messages.Start(config, self.facts.kv_memory, dict(tenants), adapters)
        self._child.socket.sendall(frame(start))
        await self.load(on_progress)
        self.interrupted = None

    async def receive(self) -> list[SequenceOutput]:
        """Waits for the next step's outputs. Raises why there will be none when the process has ended."""
        while True:
            match await self._next():
                case messages.StepOutputs() as message:
                    return message.outputs
                case Answer() as message:
                    self._questions.take(message)
                case EngineReady() as message:
                    self._facts = message
                case Held() as message if self._on_held is not None:
                    self._on_held(message)

    def submit(self, request: EngineRequest) -> None:
        if self.ended is not None:
            raise self.ended
        if request.seed is None and request.params.seed is None:
            request.seed = self._random.getrandbits(63)  # here, so that an engine that is sent it again takes the same
        self._send(request)

    def abort(self, request_ids: list[str]) -> None:
        if not self._aborting:  # those that end together, as the thousand prompts of one call, make one message
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._aborting += request_ids

    def finish(self, sequences: list[tuple[str, int]]) -> None:
        self._send(messages.FinishSequences(sequences))

    async def ask(self, query: Query[A]) -> A:
        return await self.pose(query)

    def pose(self, query: Query[A]) -> asyncio.Future[A]:
        """Queues a query behind what was sent before, and returns its answer to come, which raises as `ask` does."""
        question, answer = self._questions.pose(query)
        if (error := self.ended or self.interrupted) is not None:
            answer.set_exception(error)
        else:
            self._send(question)
        return answer

    def end(self, error: PagemillError) -> None:
        """Answers every question with this error, now and from now on. The process is left to itself."""
        self.ended = error
        self._questions.refuse(error)

    async def close(self, *, now: bool = False) -> None:
        """Ends the process: after its current step, or `now` (nothing it holds needs saving). May be called twice."""
        if self.ended is None:
            self.end(EngineStoppedError())
        if now:
            self._child.process.kill()
        else:
            self._send(messages.Shutdown())
        await self._wait()
        await self._disconnect()

    async def _disconnect(self) -> None:
        """Gives back what belongs to a process that has ended."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        self._child.end()

    def _send_aborts(self) -> None:
        aborting, self._aborting = self._aborting, []
        self._send(messages.AbortRequests(aborting))

    def _send(self, message: Any) -> None:
        """Queues a message, in order. Nothing happens if the process is gone: `receive` says so."""
        data = frame(message)
        if self._writer is not None and self.interrupted is None and not self._writer.is_closing():
            self._writer.write(data)

    async def _next(self) -> FromEngine:
        assert self._reader is not None
        fault: Failure | None = None
        try:
            while True:
                (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                message = self._decoder.decode(await self._reader.readexactly(length))
                if not isinstance(message, Failure):
                    return message
                fault = message
        except (asyncio.IncompleteReadError, ConnectionError):
            raise cause_of_death(fault, await self._wait(), loaded=self._loaded) from None

    async def _wait(self) -> int:
        """Waits for the process to end, kills it when the time is over, and returns its exit status."""
        process = self._child.process
        try:
            return await asyncio.to_thread(process.wait, self._timeout_s)
        except subprocess.TimeoutExpired:
            LOGGER.warning("the engine has not ended in %g s and is killed", self._timeout_s)
            process.kill()
            return await asyncio.to_thread(process.wait)


def cause_of_death(fault: Failure | None, status: int, *, loaded: bool) -> PagemillError:
    """Returns the engine's own error for one that has not loaded, and an `EngineDeadError` afterwards."""
    if fault is not None and not loaded:
        return fault.to_error()
    if fault is not None:
        why = f"{fault.error_type}: {fault.message}"
    elif status < 0:
        why = f"killed by {signal.Signals(-status).name}"
        if status == -signal.SIGKILL:
            why += ", perhaps for want of memory: lower kv_memory or max_num_batched_tokens"
    else:
        why = f"exit status {status}, see its messages on stderr"
    return EngineDeadError(f"the engine process is gone ({why}); start a new one")
