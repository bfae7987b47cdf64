"""The engine process: EngineCore in a loop, with messages from and to the front end over an inherited socket.

Started by `spawn`. It imports torch, most of a start, before it is told what to load. It takes every message that has
come before each step, and sleeps on the socket when there is no work. It ends when told to, or when the front end is
gone; Ctrl-C is left to the front end.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from pagemill.engine.messages import (
    AbortRequests,
    EngineRequest,
    Failure,
    FinishSequences,
    LoadProgress,
    SequenceOutput,
    Shutdown,
    Start,
    StepOutputs,
    refusals,
)
from pagemill.engine.queries import Answer, Question, ToEngine
from pagemill.engine.wire import Channel
from pagemill.errors import EngineDeadError, InvalidRequestError, PagemillError
from pagemill.lora_request import LoRARequest

if TYPE_CHECKING:
    from pagemill.engine.core import EngineCore

LOGGER = logging.getLogger(__name__)

PROGRESS_PERIOD_S = 0.05


def run(descriptor: int) -> NoReturn:
    """Runs `main` and ends the process without taking apart what the system takes back at once.

    That saves a fifth of a second for each command.
    """
    status = main(descriptor)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(descriptor: int) -> int:
    """Runs an engine for the front end at the other end of this socket. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # what is imported and built stays: no collection need visit it
    with socket.socket(fileno=descriptor) as sock:
        channel: Channel[ToEngine] = Channel(sock, ToEngine)
        try:
            from pagemill.engine.core import EngineCore

            first = channel.receive(block=True)
            if not first or not isinstance(start := first[0], Start):
                return 1
            core = EngineCore(start.config, _progress(channel), publishes=start.publishes, peering=start.peering)
            if start.kv_memory is not None and start.kv_memory != core.ready.kv_memory:
                core.resize(start.kv_memory)
            if start.tenants:
                core.set_tenants(start.tenants)
            for adapter in start.adapters:
                _load_again(core, adapter)
            gc.freeze()
            gc.enable()
            try:
                channel.send(core.ready)
                serve(core, channel)
            finally:
                core.close()
        except (BrokenPipeError, ConnectionError):
            return 1
        except PagemillError as error:
            return _report(channel, Failure.of(error))
        except Exception as error:
            traceback.print_exc()
            return _report(channel, Failure("PagemillError", f"{type(error).__name__}: {error}"))
    return 0


def serve(core: EngineCore, channel: Channel[ToEngine]) -> None:
    """Steps until a `Shutdown`, or until the front end is gone."""
    outputs: list[SequenceOutput] = []
    while True:
        busy = core.has_work()
        rest_s = None if busy else core.rest()
        if (held := core.take_held()) is not None:  # first: routing knows of blocks before their request's token
            channel.send(held)
        if outputs:
            channel.send(StepOutputs(outputs))
        messages = channel.receive(block=not busy, timeout_s=rest_s)
        if messages is None:
            return
        for message in messages:
            match message:
                case EngineRequest():
                    _add(core, channel, message)
                case AbortRequests():
                    core.abort(message.request_ids)
                case FinishSequences():
                    core.finish(message.sequences)
                case Question():
                    _answer(core, channel, message)
                case Shutdown():
                    return
        outputs = core.step() if core.has_work() else []


def _add(core: EngineCore, channel: Channel[ToEngine], request: EngineRequest) -> None:
    try:
        core.add_request(request)
    except InvalidRequestError as error:
        channel.send(StepOutputs(refusals(request, error)))


def _answer(core: EngineCore, channel: Channel[ToEngine], question: Question) -> None:
    """Sends the answer, and before it what the engine is, if that has changed."""
    before = core.ready
    answer: Any
    try:
        answer = question.query.answer(core)
    except EngineDeadError:
        raise
    except PagemillError as error:
        answer = Failure.of(error)
    if core.ready != before:
        channel.send(core.ready)
    channel.send(Answer(question.id, answer))


def _load_again(core: EngineCore, adapter: LoRARequest) -> None:
    """Loads an adapter that an earlier engine had. Where it is gone, its requests are refused and others go on."""
    try:
        core.load_adapter(adapter)
    except PagemillError as error:
        LOGGER.error("the LoRA adapter %r could not be loaded again: %s", adapter.lora_name, error)


def _progress(channel: Channel[ToEngine]) -> Callable[[int, int], None]:
    """Reports to the front end, not more often than it can be seen."""
    reported = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if done >= total or now - reported >= PROGRESS_PERIOD_S:
            reported = now
            channel.send(LoadProgress(done, total))

    return progress


def _report(channel: Channel[ToEngine], fault: Failure) -> int:
    with contextlib.suppress(OSError):
        channel.send(fault)
    return 1
