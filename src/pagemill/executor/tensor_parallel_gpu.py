"""TensorParallelGpuExecutor: a model in parts on several devices whose work is asynchronous.

Rank 0 plans and stages a step as for one device. The staged bytes go to the other ranks, each of which has its own
device run the same step; collectives between the devices are part of it, as is handing out the tokens. So rank 0 waits
for nothing but tokens, and the next step is planned meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from pagemill.errors import EngineDeadError
from pagemill.executor.device import Device
from pagemill.executor.device_steps import Together
from pagemill.executor.gpu_executor import GpuExecutor, LaunchedStep
from pagemill.executor.graphs import Shape
from pagemill.executor.interface import ExecutorMemory
from pagemill.executor.local import LocalExecutor, Parts
from pagemill.executor.rank_messages import Captured, Compile, DeviceLogits, DeviceStep, Measure, Memory
from pagemill.executor.ranks import Ranks
from pagemill.executor.record_parts import RecordParts
from pagemill.executor.staging import Place, Slot
from pagemill.executor.tensor_parallel import TensorParallelExecutor
from pagemill.executor.trial_steps import FEW_TOKENS, LargestStep
from pagemill.models.sharding import SummingExchange
from pagemill.scheduling.step_plan import StepPlan, StepResult

WARM_UP_S = 1800.0
"""Seconds that trial steps of all ranks may take together: the first ones compile, all ranks on the same cores."""


class TensorParallelGpuExecutor(TensorParallelExecutor, GpuExecutor):
    """Implements `Executor` over all ranks' devices. It is broken, and raises RankLostError, when a rank is lost, or
    does not come to a collective in time: a step that fails on one device alone has the others wait for it."""

    def __init__(
        self,
        parts: Parts,
        ranks: Ranks,
        record_parts: RecordParts,
        device: Device,
        exchange: SummingExchange,
        *,
        largest: LargestStep,
        measures: bool,
        enforce_eager: bool,
    ) -> None:
        self.ranks = ranks
        self._record_parts = record_parts
        self._exchange = exchange
        GpuExecutor.__init__(
            self, device, parts, largest=largest, measures=measures, enforce_eager=enforce_eager,
            together=Together(exchange, self._agree),
        )  # fmt: skip

    def measure(self) -> None:
        with self.ranks.waiting(WARM_UP_S):
            self.ranks.send(Measure(self._largest, "host" in self.facts.streams))
            super().measure()

    def compile(self) -> None:
        """Has kernels compiled by steps that are no larger than what `measure` has run: no device can go on where
        another has too little memory. Where it has run nothing, as the pool's size was given, these are of a few
        tokens, and the first large ones compile what is missing."""
        largest = self._largest
        if not self.facts.counts_steps:
            largest = LargestStep(*(min(number, FEW_TOKENS) for number in largest))
        with self.ranks.waiting(WARM_UP_S), self._together():
            self.ranks.send(Compile(largest))
            self._steps.compile(largest, self._shape)

    def memory(self) -> ExecutorMemory:
        """Returns the memory of all devices, of which each has as much as the one with the least."""
        each = [super().memory(), *self.ranks.ask(Memory())]
        return ExecutorMemory(len(each) * min(one.free for one in each), len(each) * min(one.total for one in each))

    def give(self, slot: Slot, places: Sequence[Place], shape: Shape, padded: Shape | None) -> None:
        with self._together():
            self.ranks.send(DeviceStep(slot.staged.tobytes(), [*places], shape, padded))
            super().give(slot, places, shape, padded)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        hidden = hidden.contiguous()
        with self._together():
            self.ranks.send(DeviceLogits(len(hidden)))
            self._exchange.broadcast(hidden)
            return LocalExecutor.logits(self, hidden, out)

    def close(self) -> None:
        self._steps.clear()  # a group that ends waits for graphs that hold its collectives
        super().close()

    def _agree(self, captured: bool) -> bool:
        everywhere = all([captured, *self.ranks.answers()])
        self.ranks.send(Captured(everywhere))
        return everywhere

    def _run_here(self, plan: StepPlan) -> StepResult:
        with self._watched():
            return super()._run_here(plan)

    def _land(self, flight: LaunchedStep) -> StepResult:
        with self._watched():
            return super()._land(flight)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Holds while this thread waits for the device. What it gets is nothing if ranks are lost meanwhile."""
        with self.ranks.waiting():
            yield
        self.ranks.check()

    @contextmanager
    def _together(self) -> Iterator[None]:
        with self.ranks.waiting(), super()._together():
            yield

    def _give_memory_up(self) -> None:
        """Keeps graphs: all ranks have them, or none."""

    def _lost(self, error: Exception) -> EngineDeadError | None:
        try:
            self.ranks.check()
        except EngineDeadError as lost:
            return lost
        return super()._lost(error)
