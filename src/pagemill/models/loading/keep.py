"""Keep: where an assembler gets each part of a decoder from, made anew or kept from an earlier load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pagemill.ops.interface import Linear


class Keep(Protocol):
    """Gives the parts of a decoder by name. checked: True if the checkpoint was read and checked when they were made,
    so that nothing is read of it now."""

    checked: bool

    def linear(self, name: str, make: Callable[[], Linear]) -> Linear:
        """Returns a packed layer, which `make` reads and packs."""

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Returns an embedding or the weight of a norm, which `make` reads."""


class Nothing:
    """Keeps nothing: makes each part."""

    checked = False

    def linear(self, name: str, make: Callable[[], Linear]) -> Linear:
        return make()

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        return make()
