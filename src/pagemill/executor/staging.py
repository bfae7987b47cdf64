"""Staging: the memory through which a step's arrays go to a device, and its tokens come back, without waiting.

A `Slot` belongs to one step in flight. All arrays of a step lie in one piece of pinned memory and take one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.executor.device import Device
from pagemill.kvcache.device_streams import Event

Array = NDArray[np.generic]
ALIGNMENT = 16
"""Bytes at whose multiples an array begins: a view of any type may."""
LEAST_BYTES = 1 << 16
"""Bytes of a slot's memory at first."""

_TORCH: dict[Any, torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Place(NamedTuple):
    """States where an array lies among others: its first byte, how many there are, and their type."""

    begin: int
    nbytes: int
    dtype: torch.dtype

    def of(self, memory: Tensor) -> Tensor:
        """Returns the array in memory, uint8 [bytes], as a view [elements]."""
        return memory[self.begin : self.begin + self.nbytes].view(self.dtype)


def places_of(arrays: Sequence[Array]) -> tuple[list[Place], int]:
    """Returns where arrays lie, one after the other, and how many bytes they take together."""
    places, end = [], 0
    for array in arrays:
        places.append(Place(end, array.nbytes, _TORCH[array.dtype]))
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return places, end


def lay(arrays: Sequence[Array], places: Sequence[Place], memory: NDArray[np.uint8]) -> None:
    """Copies arrays to their places in memory."""
    for array, place in zip(arrays, places, strict=True):
        memory[place.begin : place.begin + place.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)


class Slot:
    """Holds the memory of one step in flight.

    results: int32 [most_results] on the device, which a step writes on the stream of computations.
    """

    def __init__(self, device: Device, most_results: int, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self.results = torch.zeros(most_results, dtype=torch.int32, device=device.where)
        self._results_host = device.pinned(most_results * 4)
        self._arrived: Event | None = None
        self._staged = 0
        self._grow(LEAST_BYTES)

    def stage(self, arrays: Sequence[Array]) -> list[Place]:
        """Lays arrays into page-locked memory, and returns where they lie."""
        places, nbytes = places_of(arrays)
        lay(arrays, places, self._room(nbytes))
        return places

    def fill(self, staged: bytes) -> None:
        """Lays what another slot has `staged`."""
        self._room(len(staged))[:] = np.frombuffer(staged, np.uint8)

    @property
    def staged(self) -> NDArray[np.uint8]:
        """Holds what has been laid, uint8 [bytes]; it is the slot's own memory."""
        return self._host.numpy()[: self._staged]

    def upload(self) -> Tensor:
        """Begins to copy what has been laid to the device. Returns memory there, uint8, in which it lies at the same
        places, for use on the stream of computations until the slot is given to another step."""
        with self._device.use(self._streams.up):
            self._device.copy(self._host[: self._staged], self._there[: self._staged])
            uploaded = self._streams.up.record_event()
        self._device.compute.wait_event(uploaded)
        return self._there

    def download(self, count: int) -> None:
        """Begins to copy the first results to the host, once the stream of computations has written them."""
        self._streams.down.wait_event(self._device.compute.record_event())
        with self._device.use(self._streams.down):
            if count:
                self._device.copy(self.results.view(torch.uint8)[: count * 4], self._results_host[: count * 4])
            self._arrived = self._streams.down.record_event()

    def wait(self, count: int) -> NDArray[np.int32]:
        """Waits for results whose download has begun, and returns them."""
        assert self._arrived is not None
        self._arrived.synchronize()
        self._arrived = None
        results: NDArray[np.int32] = self._results_host.numpy()[: count * 4].view(np.int32).copy()
        return results

    def _room(self, nbytes: int) -> NDArray[np.uint8]:
        """Returns so many bytes of the host's memory to lay something into."""
        if nbytes > len(self._host):
            self._grow(1 << (nbytes - 1).bit_length())
        self._staged = nbytes
        return self.staged

    def _grow(self, nbytes: int) -> None:
        """Takes more memory. The step that had the slot last is over, so nothing uses what it had."""
        host = self._device.pinned(nbytes)
        with self._device.use(self._streams.up):  # else it might be memory that computations still use
            there = torch.empty(nbytes, dtype=torch.uint8, device=self._device.where)
        self._host, self._there = host, there  # together: there may be no memory for one of them


class Streams:
    """Holds the streams that copy to a device (up) and from it (down), beside its computations."""

    def __init__(self, device: Device) -> None:
        self.up = device.stream()
        self.down = device.stream()


class Ring:
    """Gives each step in flight a slot: one that an earlier step has left, or a new one."""

    def __init__(self, device: Device, most_results: int) -> None:
        self._device = device
        self._most_results = most_results
        self._streams = Streams(device)
        self._free: list[Slot] = []

    def take(self) -> Slot:
        return self._free.pop() if self._free else Slot(self._device, self._most_results, self._streams)

    def give_back(self, slot: Slot) -> None:
        """Takes back the slot of a step that is over: its results have come, or the device has done all it was told."""
        self._free.append(slot)
