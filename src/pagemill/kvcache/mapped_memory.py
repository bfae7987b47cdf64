"""MappedMemory: addresses of a device that stay, and have memory where it is needed.

Addresses are set aside once. Memory comes in granules, all of one size, each of which is had from the device by itself,
mapped to its addresses, and opened. So what lies in the others does not move, and views and captured graphs stay right.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from torch import Tensor

from pagemill.errors import DeviceLostError, DriverError, KVMemoryError
from pagemill.kvcache.cuda_driver import Driver

logger = logging.getLogger(__name__)

MOST_GRANULES = 4096
"""The addresses are cut into so many granules at most: a driver takes tens of microseconds for each."""


def open_mapped(
    driver: Driver, nbytes: int, wait: Callable[[], None], filled: Iterable[tuple[int, int]]
) -> tuple[MappedMemory, Tensor]:
    """Sets aside addresses for so many bytes. Returns them as a tensor too, uint8 [nbytes]: what the driver has given
    goes back to it when neither the tensor nor a view of it is left.

    wait: waits until the device has done all that it was asked to do.
    filled: bytes, begin and end, that have memory at once; among them the first.
    Raises KVMemoryError, and holds nothing, if it cannot be had.
    """
    memory, owner = MappedMemory(driver, nbytes, wait), Owner()
    end = weakref.finalize(owner, memory.close)
    end.atexit = False  # the driver itself ends then
    try:
        for part in filled:
            memory.map(*part)
        return memory, driver.tensor(memory.address, nbytes, owner)
    except BaseException as error:
        end()
        if not isinstance(error, DriverError):
            raise
        raise KVMemoryError(f"the KV pool's memory cannot be used: {error}", param="kv_memory") from error


class Owner:
    """Ends with the last view of a `MappedMemory`."""


class MappedMemory:
    """Sets aside addresses for so many bytes, from `address` on. None has memory at first. One thread calls it.

    wait: see `open_mapped`. Raises KVMemoryError if the addresses cannot be had.
    """

    def __init__(self, driver: Driver, nbytes: int, wait: Callable[[], None]) -> None:
        self._driver = driver
        self._wait = wait
        least = driver.granularity
        self.granule = least * -(-nbytes // (least * MOST_GRANULES))
        """Bytes of a granule."""
        self._reserved = -(-nbytes // self.granule) * self.granule
        try:
            self.address = driver.reserve(self._reserved)
        except DriverError as error:
            raise KVMemoryError(
                f"{self._reserved} addresses of {driver.where} cannot be set aside: {error}; lower kv_memory",
                param="kv_memory",
            ) from error
        self._handles: dict[int, int] = {}
        """By number of a granule, the memory that it has."""
        self._mapped: set[int] = set()
        self._open: set[int] = set()
        self._left: list[int] = []
        """Handles that the driver has not taken back yet."""

    def missing(self, begin: int, end: int) -> int:
        """Returns how many bytes of the device `map` would take."""
        return sum(number not in self._handles for number in self._touched(begin, end)) * self.granule

    def map(self, begin: int, end: int) -> None:
        """Lets all of the bytes begin .. end - 1 have memory; its contents are undefined at first. Raises KVMemoryError
        where the device does not give it: then nothing has changed."""
        missing, before = self.missing(begin, end), {*self._handles}
        try:
            self._fill(self._touched(begin, end))
        except BaseException as error:
            new = [number for number in self._handles if number not in before]
            self._empty_as_far_as_it_goes(new)
            if not isinstance(error, DriverError):
                raise
            raise KVMemoryError(
                f"the KV pool cannot have {end - begin} bytes of {self._driver.where}: it lacked {missing}, and got "
                f"{len(new) * self.granule} of them ({error}); ask for less, or free memory",
                param="kv_memory",
            ) from error

    def unmap(self, begin: int, end: int) -> None:
        """Gives the memory back that lies in whole between the bytes begin and end, behind all that the device has been
        asked to do. Raises DriverError where the driver does not take it: then nothing has changed. Raises
        DeviceLostError if that cannot be had either."""
        gone = [number for number in self._whole(begin, end) if number in self._handles]
        if not gone:
            return
        self._wait()
        try:
            for number in gone:
                self._unmap(number)
        except BaseException as error:
            try:
                self._fill(gone)  # which have their memory still
            except DriverError as last:
                raise DeviceLostError.of(self._driver.where, last) from error
            raise
        self._release(self._handles.pop(number) for number in gone)

    def close(self) -> None:
        """Gives back all memory and addresses. What the driver does not take is left, and the log says so."""
        try:
            self._wait()
        except RuntimeError as error:  # a device that is lost: its driver gives up what can be given up
            logger.warning("the KV pool's memory goes back to %s, which has failed: %s", self._driver.where, error)
        self._empty_as_far_as_it_goes([*self._handles])
        try:
            self._driver.free(self.address, self._reserved)
        except DriverError as error:
            logger.warning("the driver does not take the KV pool's addresses back: %s", error)

    def _touched(self, begin: int, end: int) -> range:
        """Returns the granules that have some of these bytes."""
        return range(begin // self.granule, -(-end // self.granule) if begin < end else 0)

    def _whole(self, begin: int, end: int) -> range:
        """Returns the granules that have none but these bytes."""
        return range(-(-begin // self.granule), end // self.granule)

    def _at(self, number: int) -> int:
        return self.address + number * self.granule

    def _fill(self, numbers: Sequence[int]) -> None:
        """Lets granules have memory that lack it, and the device use it."""
        for number in numbers:
            if number not in self._handles:
                self._handles[number] = self._driver.create(self.granule)
            if number not in self._mapped:
                self._driver.map(self._at(number), self.granule, self._handles[number])
                self._mapped.add(number)
        closed = [number for number in numbers if number not in self._open]
        for _, run in groupby(enumerate(closed), lambda each: each[1] - each[0]):
            opened = [number for _, number in run]
            self._driver.open(self._at(opened[0]), len(opened) * self.granule)
            self._open.update(opened)

    def _unmap(self, number: int) -> None:
        if number in self._mapped:
            self._driver.unmap(self._at(number), self.granule)
            self._mapped.discard(number)
            self._open.discard(number)

    def _empty_as_far_as_it_goes(self, numbers: Sequence[int]) -> None:
        """Gives the memory of granules back, none of which the device uses. Those that the driver does not unmap keep
        it."""
        errors = [error for number in numbers if (error := self._refusal_to_unmap(number)) is not None]
        if errors:
            what = "the driver leaves %d bytes of the KV pool mapped: %s"
            logger.warning(what, len(errors) * self.granule, errors[0])
        self._release(self._handles.pop(number) for number in numbers if number not in self._mapped)

    def _refusal_to_unmap(self, number: int) -> DriverError | None:
        """Unmaps a granule. Returns why the driver does not do so; None if it does."""
        try:
            self._unmap(number)
        except DriverError as error:
            return error
        return None

    def _release(self, handles: Iterable[int]) -> None:
        """Gives memory back, and what had been left before: it is not lost if the driver does not take it at once."""
        self._left += handles
        while self._left:
            try:
                self._driver.release(self._left[-1])
            except DriverError as error:
                what = "the driver does not take %d bytes of the KV pool back yet: %s"
                logger.warning(what, len(self._left) * self.granule, error)
                return
            self._left.pop()
