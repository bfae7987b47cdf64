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
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from pagemill.errors import PagemillError
from pagemill.executor.gloo import GlooExchange, join_meeting
from pagemill.executor.late_errors import LateErrors
from pagemill.executor.numa import bind_rank
from pagemill.executor.rank_messages import (
    Allocate,
    Connect,
    Edit,
    FrameWrites,
    Logits,
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


def run(descriptor: int) -> NoReturn:
    """Runs `main`, and ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 is told, and tells this one
    try:
        with socket.socket(fileno=descriptor) as sock:
            _, (frames, *shared), _, _ = socket.recv_fds(sock, 1, 2)
            main(Connection(sock.detach()), Connection(frames), *shared)
    except (EOFError, ConnectionError, BrokenPipeError):
        os._exit(0)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def main(control: Connection, frames: Connection, shared: int | None = None) -> None:
    """Loads the rank's part, and does what it is told. Raises EOFError when rank 0 is gone, and what went wrong in a
    step. shared: descriptor of the memory that ranks share, if they do."""
    start = control.recv()
    assert isinstance(start, Start)
    bind_rank(start.rank, start.config.tensor_parallel_size, start.num_threads)
    torch.set_num_threads(start.num_threads)
    threading.Thread(target=_end_with, args=(frames,), daemon=True, name="rank 0's end").start()
    size = start.config.tensor_parallel_size
    exchange: SharedExchange | GlooExchange
    exchange = GlooExchange(start.rank, size) if shared is None else SharedExchange(start.rank, size, shared)
    try:
        share = load_share(start.config, Sharding(exchange), num_threads=start.num_threads)
    except PagemillError as error:
        control.send(error)
        return
    config, shape = start.config, share.shape
    worker = Worker(share.model.decoder, share.backend, shape, config.max_num_seqs, share.model.max_model_len)
    gc.freeze()
    threading.Thread(target=_serve_frames, args=(worker, frames), daemon=True, name="frames").start()
    control.send(None)
    while True:
        message = control.recv()
        if isinstance(message, Connect):
            assert isinstance(exchange, GlooExchange)
            assert start.port is not None
            exchange.connect(join_meeting(start.port))
            control.send(None)
        elif (answer := _do(worker, message)) is not NO_ANSWER:
            control.send(answer)


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
    try:
        match message:
            case Allocate():
                return worker.allocate(*message)
            case Resize():
                return worker.resize(message.num_frames)
            case TakeLoss():
                return worker.take_loss()
    except PagemillError as error:
        return error
    raise TypeError(f"a rank cannot do {message!r}")


def _step(worker: Worker, message: Step) -> Any:
    rows, starts, query_lens, token_ids = message.parts
    inputs = worker.rows.inputs(rows, starts, query_lens)
    errors = LateErrors.of(worker.reading_ahead(rows, inputs.context_lens))
    worker.forward(inputs, torch.from_numpy(token_ids.astype("int64")), errors)
    return NO_ANSWER if errors is None else errors.first


def _serve_frames(worker: Worker, connection: Connection) -> None:
    """Reads and writes frames until rank 0 is gone; then the process ends."""
    try:
        while True:
            connection.send(_access_frames(worker, connection.recv()))
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
                with worker.frames.write(message.frames, None) as places:
                    for place, record in zip(places, message.of_frames, strict=True):
                        place[:] = record.reshape(place.shape)
            except PagemillError as error:
                return error
            finally:
                worker.frames.follow_writes()
            return None
        case FrameWrites():
            (worker.frames.begin_writes if message.begin else worker.frames.end_writes)()
            return None
    raise TypeError(f"a rank's frames cannot do {message!r}")
