"""Models what PagedAttention replaced: memory for a request's longest sequence, reserved in one piece at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagemill.memory.block_table import BlockTable, Footprint
from pagemill.memory.manager import MemoryManager, Shortage
from pagemill.memory.tenants import Tenant


class Reservations(Footprint):
    """Counts the blocks of `reservation` tokens for every sequence."""

    def __init__(self, block_size: int, windows: Sequence[int | None], reservation: int) -> None:
        super().__init__(block_size, windows)
        self._reservation = reservation

    def frames(self, num_tokens: int, chunk: int, pinned: int = 0, found: int = 0) -> int:
        return super().frames(self._reservation, self._reservation)


class ContiguousMemory(MemoryManager):
    """Takes the blocks of `reservation` tokens for a table at its first use; it neither grows nor shares.

    So a request is admitted only while that many tokens are free, and runs to its end.
    """

    def __init__(self, *arguments: Any, reservation: int, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.reservation = reservation
        self.footprint = Reservations(self.block_size, self.windows, reservation)

    def reserve(self, table: BlockTable, up_to: int) -> Shortage | None:
        return super().reserve(table, max(up_to, self.reservation))

    def available(self, tenant: Tenant) -> int:
        """Adds the blocks that the scheduler leaves free for running sequences to grow into: none needs them here."""
        return super().available(tenant) + len(self.core.tables) - 1
