"""Defines a LoRA adapter as a decoder applies it: additions to the linear layers of each decoder layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from pagemill.ops.interface import LowRank, LowRankRun


@dataclass(frozen=True, slots=True)
class AdapterLayer:
    """Holds what an adapter adds to a layer's joined projections; None where it adds nothing."""

    qkv: LowRank | None = None
    o: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None

    def __iter__(self) -> Iterator[LowRank | None]:
        return iter((self.qkv, self.o, self.gate_up, self.down))


@dataclass(frozen=True, eq=False)
class Adapter:
    """Holds a loaded adapter. digest: 32 bytes that name its content."""

    layers: tuple[AdapterLayer, ...]
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Returns the bytes that its weights take on the device."""
        return sum(addition.nbytes for layer in self.layers for addition in layer if addition is not None)


AdapterTokens: TypeAlias = tuple[Adapter, Tensor]
"""An adapter, and the tokens of a step that have it: int64, on the device."""


def runs_of(adapters: Sequence[AdapterTokens], layer: int, place: str) -> list[LowRankRun]:
    """Returns the additions of a step's adapters to one of a layer's projections, with their tokens."""
    found = [(getattr(adapter.layers[layer], place), tokens) for adapter, tokens in adapters]
    return [(addition, tokens) for addition, tokens in found if addition is not None]
