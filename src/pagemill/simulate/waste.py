"""Time-weighted waste of KV memory: what is reserved and holds no token, counted by the running allocator."""

from __future__ import annotations

from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.step_plan import StepPlan
from pagemill.simulate.step_time import KVShape


class WasteMeter:
    """An observer that integrates bytes over time.

    reserved: bytes of the frames that sequences hold during a step, with their padding, and with those reserved for
              tokens that the step computes; each shared block once.
    written:  bytes of the tokens that were committed before the step.
    being_written: bytes of the tokens that the step computes: their slots are in use, and not yet committed.
    """

    def __init__(self, memory: MemoryManager, shape: KVShape) -> None:
        self._memory = memory
        self._slot_bytes = shape.slot_bytes
        self._reserved_slot_bytes = shape.frame_bytes(memory.block_size) / memory.block_size
        self._num_groups = len(memory.windows)
        self.reserved = self.written = self.being_written = 0.0  # byte-seconds

    def __call__(self, plan: StepPlan, seconds: float) -> None:
        found = self._memory.occupancy()
        self.reserved += seconds * found.reserved * self._reserved_slot_bytes
        self.written += seconds * found.written * self._slot_bytes
        self.being_written += seconds * plan.num_tokens * self._num_groups * self._slot_bytes

    @property
    def uncommitted(self) -> float:
        """Share of the reserved bytes, over time, that hold no committed token."""
        return 1 - self.written / self.reserved if self.reserved else 0.0

    @property
    def waste(self) -> float:
        """Share of the reserved bytes, over time, in which no token is or is being written."""
        return self.uncommitted - self.being_written / self.reserved if self.reserved else 0.0
