"""Messages of rank 0 to the other ranks, pickled: both ends are processes of this package. Arrays travel packed, so
that a step of a few rows takes a few hundred bytes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.config import EngineConfig
from pagemill.executor.graphs import Shape
from pagemill.executor.process_group import Transport
from pagemill.executor.staging import Place
from pagemill.executor.trial_steps import LargestStep
from pagemill.memory.work import MemoryWork

Ints = NDArray[np.int32]


class Start(NamedTuple):
    """Loads the rank's part of the model. Answered when it is there.

    port: of the store at which the ranks meet; None if they share memory. num_threads: CPU threads of each rank.
    transport: of the group that they are then. on_device: whether each has a device that works by itself.
    """

    config: EngineConfig
    rank: int
    port: int | None
    num_threads: int
    transport: Transport
    on_device: bool


class Connect(NamedTuple):
    """Connects ranks that share no memory, and have all loaded. Answered when they are."""


class Allocate(NamedTuple):
    """Makes the pool; see `Worker.make_pool`. Answered with the number of the first streamed frame."""

    num_frames: int
    streamed_frames: int
    streamed_folder: Path | None
    room: int


class Edit(NamedTuple):
    """Edits tables and copies frames. Answered, with the frames that were lost, only if it copies some."""

    numbers: bytes

    @classmethod
    def of(cls, work: MemoryWork) -> Edit:
        return cls(pack(*(getattr(work, name) for name in MemoryWork.__slots__)))

    @property
    def work(self) -> MemoryWork:
        return MemoryWork(*unpack(self.numbers))


class Step(NamedTuple):
    """Runs the layers over query tokens. Answered, with what a disk could not read, only if it reads streamed blocks
    from one."""

    numbers: bytes

    @classmethod
    def of(cls, rows: Ints, starts: Ints, query_lens: Ints, token_ids: Ints) -> Step:
        return cls(pack(rows, starts, query_lens, token_ids))

    @property
    def parts(self) -> list[Ints]:
        """Returns what it was made of."""
        return unpack(self.numbers)


class DeviceStep(NamedTuple):
    """Runs a step whose arrays are given as rank 0's device gets them: bytes, and what lies where. See
    `DeviceSteps.run`."""

    staged: bytes
    places: list[Place]
    shape: Shape
    padded: Shape | None


class Captured(NamedTuple):
    """Says whether the step that is being captured has been on all ranks; each has answered whether it has there."""

    everywhere: bool


class Measure(NamedTuple):
    """Measures what the largest step needs beside the pool, together with rank 0; see `DeviceSteps.measure`."""

    largest: LargestStep
    streams: bool


class Compile(NamedTuple):
    """Runs steps that have kernels compiled, together with rank 0."""

    largest: LargestStep


class Memory(NamedTuple):
    """Answered with the memory of the rank's device, `ExecutorMemory`."""


class DeviceLogits(NamedTuple):
    """Computes the rank's part of the logits of hidden states, so many rows, that rank 0 hands out on the devices."""

    rows: int


class Logits(NamedTuple):
    """Computes the rank's part of the logits of these hidden states."""

    hidden: bytes
    rows: int
    dtype: str

    @classmethod
    def of(cls, hidden: Tensor) -> Logits:
        content = hidden.contiguous().view(torch.uint8).numpy().tobytes()
        return cls(content, hidden.shape[0], str(hidden.dtype).removeprefix("torch."))

    @property
    def states(self) -> Tensor:
        return torch.frombuffer(bytearray(self.hidden), dtype=getattr(torch, self.dtype)).view(self.rows, -1)


class Resize(NamedTuple):
    """Gives the pool another number of frames. Answered."""

    num_frames: int


class TakeLoss(NamedTuple):
    """Answered with whether a disk has lost what was written to streamed frames."""


class ReadFrames(NamedTuple):
    """Answered with the records of these frames, as bytes, and which could be read. Comes beside the steps, and behind
    so many messages that do not."""

    frames: list[int]
    behind: int


class WriteFrames(NamedTuple):
    """Writes records into frames. Answered. Comes beside the steps, and behind so many messages that do not."""

    frames: list[int]
    behind: int
    records: bytes

    @property
    def of_frames(self) -> NDArray[np.uint8]:
        """Returns the records, [n, record bytes]."""
        return np.frombuffer(self.records, dtype=np.uint8).reshape(len(self.frames), -1)


class FrameWrites(NamedTuple):
    """Says that writes begin, or end, as `FrameAccess.begin_writes` and `end_writes` do. Comes beside the steps."""

    begin: bool


def pack(*arrays: Ints) -> bytes:
    """Returns one-dimensional arrays in one piece: their number, their lengths, their elements, all int32."""
    head = np.array([len(arrays), *map(len, arrays)], dtype=np.int32)
    return np.concatenate((head, *arrays), dtype=np.int32, casting="same_kind").tobytes()


def unpack(content: bytes) -> list[Ints]:
    numbers = np.frombuffer(bytearray(content), dtype=np.int32)  # which tensors may share
    count = int(numbers[0])
    ends = np.cumsum(numbers[1 : 1 + count])[:-1]
    return np.split(numbers[1 + count :], ends)
