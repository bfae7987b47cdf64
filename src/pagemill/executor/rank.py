"""A rank: the process of one part of a tensor-parallel model, started by rank 0 (`Ranks`).

It does what rank 0 sends, in order, and answers where something is to be answered. By a second connection, offload
stores read and write its frames beside that. The process ends when rank 0 is gone: no rank outlives it, whatever it was
doing. An error in the middle of a step ends it too, as the others wait for its part: rank 0 then ends them all.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from pagemill.config import EngineConfig
from pagemill.errors import PagemillError
from pagemill.executor.backend import Backend
from pagemill.executor.device import CudaDevice, Device
from pagemill.executor.device_steps import Together
from pagemill.executor.device_worker import DeviceWorker
from pagemill.executor.late_errors import LateErrors
from pagemill.executor.numa import bind_rank
from pagemill.executor.process_group import GroupExchange, join_meeting
from pagemill.executor.rank_devices import config_of_rank
from pagemill.executor.rank_messages import (
    Allocate,
    Captured,
    Compile,
    Connect,
    DeviceLogits,
    DeviceStep,
    Edit,
    FrameWrites,
    Logits,
    Measure,
    Memory,
    ReadFrames,
    Resize,
    Start,
    Step,
    TakeLoss,
    WriteFrames,
)
from pagemill.executor.share import load_share
from pagemill.executor.shared_memory import SharedExchange
from pagemill.executor.worker import Worker
from pagemill.models.sharding import Sharding

NO_ANSWER = object()
LOOK_S = 0.1
"""Seconds between two looks at a device while rank 0 says nothing."""


class Hardware(NamedTuple):
    """Says what a rank runs on. backend: None for what the configuration says. device: one whose work is asynchronous,
    if it is one."""

    config: EngineConfig
    backend: Backend | None
    device: Device | None


HardwareOf = Callable[[Start], Hardware]


def _hardware(start: Start) -> Hardware:
    if not start.on_device:
        return Hardware(start.config, None, None)
    return Hardware(config_of_rank(start.config, start.rank), None, CudaDevice(torch.device("cuda", start.rank)))


def run(descriptor: int, hardware_of: HardwareOf = _hardware) -> NoReturn:
    """Runs `main`, and ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 is told, and tells this one
    try:
        with socket.socket(fileno=descriptor) as sock:
            _, (frames, *shared), _, _ = socket.recv_fds(sock, 1, 2)
            main(Connection(sock.detach()), Connection(frames), *shared, hardware_of=hardware_of)
    except (EOFError, ConnectionError, BrokenPipeError):
        os._exit(0)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def main(control: Connection, frames: Connection, shared: int | None = None, *, hardware_of: HardwareOf) -> None:
    """Loads the rank's part, and does what it is told. Raises EOFError when rank 0 is gone, and what went wrong in a
    step. shared: descriptor of the memory that ranks share, if they do."""
    start = control.recv()
    assert isinstance(start, Start)
    size = start.config.tensor_parallel_size
    if not start.on_device:
        bind_rank(start.rank, size, start.num_threads)
    torch.set_num_threads(start.num_threads)
    threading.Thread(target=_end_with, args=(frames,), daemon=True, name="rank 0's end").start()
    exchange: SharedExchange | GroupExchange
    if shared is None:
        exchange = group = GroupExchange(start.rank, size, start.transport)
        sharding = Sharding(exchange, group if start.on_device else None)
    else:
        exchange = SharedExchange(start.rank, size, shared)
        sharding = Sharding(exchange)
    try:
        config, backend, device = hardware_of(start)
        share = load_share(config, sharding, num_threads=start.num_threads, backend=backend)
    except PagemillError as error:
        control.send(error)
        return
    told = Told(control)
    model = share.model
    worker: Worker | DeviceWorker
    if device is None:
        worker = Worker(model.decoder, share.backend, share.shape, config.max_num_seqs, model.max_model_len)
    else:
        assert sharding.sums is not None
        worker = DeviceWorker(device, share, config, Together(sharding.sums, told.agree))
        told.meanwhile = worker.look
    gc.freeze()
    threading.Thread(target=_serve_frames, args=(worker, frames, told, device), daemon=True, name="frames").start()
    control.send(share.backend.attention.name)
    while True:
        message = told.next()
        if isinstance(message, Connect):
            assert isinstance(exchange, GroupExchange)
            assert start.port is not None
            exchange.connect(join_meeting(start.port))
            control.send(None)
        elif (answer := _do(worker, message)) is not NO_ANSWER:
            control.send(answer)


class Told:
    """Hears what rank 0 sends, in order, and lets who serves frames beside that wait until it is done.

    meanwhile: is called now and then while nothing comes.
    """

    def __init__(self, control: Connection) -> None:
        self.meanwhile: Callable[[], None] | None = None
        self._control = control
        self._heard = self._done = 0
        self._changed = threading.Condition()

    def next(self) -> Any:
        """Returns the next message: the last one is done."""
        with self._changed:
            self._done = self._heard
            self._changed.notify_all()
        return self._hear()

    def agree(self, captured: bool) -> bool:
        """Answers whether a step has been captured here, and returns whether it has been everywhere."""
        self._control.send(captured)
        answer = self._hear()
        assert isinstance(answer, Captured)
        return answer.everywhere

    def wait_until_done(self, messages: int) -> None:
        """Waits until so many have been done."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= messages)

    def _hear(self) -> Any:
        while self.meanwhile is not None and not self._control.poll(LOOK_S):
            self.meanwhile()
        message = self._control.recv()
        self._heard += 1
        return message


def _end_with(frames: Connection) -> None:
    """Ends the process if rank 0 ends while the model is loaded; later, whoever waits for a message does."""
    with socket.socket(fileno=os.dup(frames.fileno())) as sock:
        if not sock.recv(1, socket.MSG_PEEK):
            os._exit(0)


def _do(worker: Worker, message: Any) -> Any:
    """Returns what is to be answered, errors of memory and disks included."""
    match message:
        case Step():
            return _step(worker, message)
        case Edit():
            work = message.work
            lost = worker.edit(work)
            return lost if len(work.copy_source) else NO_ANSWER
        case Logits():
            worker.decoder.logits(message.states)
            return NO_ANSWER
        case DeviceStep() | DeviceLogits() | Measure() | Compile():
            assert isinstance(worker, DeviceWorker)
            worker.do(message)
            return NO_ANSWER
    try:
        match message:
            case Allocate():
                return worker.make_pool(*message)
            case Resize():
                return worker.resize(message.num_frames)
            case TakeLoss():
                return worker.take_loss()
            case Memory():
                return worker.memory()
    except PagemillError as error:
        return error
    raise TypeError(f"a rank cannot do {message!r}")


def _step(worker: Worker, message: Step) -> Any:
    rows, starts, query_lens, token_ids = message.parts
    inputs = worker.rows.inputs(rows, starts, query_lens)
    errors = LateErrors.of(worker.reading_ahead(rows, inputs.context_lens))
    worker.forward(inputs, worker.rows.to_device(token_ids.astype(np.int64)), errors)
    return NO_ANSWER if errors is None else errors.first


def _serve_frames(worker: Worker, connection: Connection, told: Told, device: Device | None) -> None:
    """Reads and writes frames until rank 0 is gone; then the process ends."""
    try:
        if isinstance(device, CudaDevice):
            torch.cuda.set_device(device.where)  # each thread has its own
        while True:
            message = connection.recv()
            if isinstance(message, ReadFrames | WriteFrames):
                told.wait_until_done(message.behind)
            connection.send(_access_frames(worker, message))
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _access_frames(worker: Worker, message: Any) -> Any:
    match message:
        case ReadFrames():
            records, whole = worker.frames.read(message.frames)
            return records.tobytes(), whole
        case WriteFrames():
            try:
                with worker.frames.write(message.frames, worker.frames.mark()) as places:
                    for place, record in zip(places, message.of_frames, strict=True):
                        place[:] = record.reshape(place.shape)
            except PagemillError as error:
                return error
            return None
        case FrameWrites():
            (worker.frames.begin_writes if message.begin else worker.frames.end_writes)()
            return None
    raise TypeError(f"a rank's frames cannot do {message!r}")
