"""CheckedDriver: maps the memory of a `CheckedDevice`, and unmaps none that the device may still use."""

from __future__ import annotations

from checked_device import CheckedDevice, OrderError
from torch import Tensor

from kvcache.fake_driver import FakeDriver


class CheckedDriver(FakeDriver):
    """Maps a card of so many bytes for a device, which is told of it."""

    def __init__(self, device: CheckedDevice, nbytes: int) -> None:
        super().__init__(nbytes)
        self._device = device
        self._tensors: list[int] = []
        device.driver = self

    def unmap(self, address: int, nbytes: int) -> None:
        memory = self._device._memory  # noqa: SLF001
        for use in [use for key in self._tensors if key in memory for use in memory[key].uses()]:
            if not self._device.host.knows(use):
                raise OrderError(f"memory is unmapped while {use[0]} may still use it")
        super().unmap(address, nbytes)

    def tensor(self, address: int, nbytes: int, owner: object) -> Tensor:
        tensor = super().tensor(address, nbytes, owner)
        self._device._note(tensor, self._device._begin([], []))  # noqa: SLF001, what no operation has made
        self._tensors.append(tensor.untyped_storage()._cdata)  # noqa: SLF001
        return tensor
