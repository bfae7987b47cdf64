"""DeviceWorker: a rank's part of a model on a device whose work is asynchronous.

It gets each step as the bytes that rank 0's device gets, and asks its own for the same. Tokens come from rank 0, from
device to device: nothing waits for them.
"""

from __future__ import annotations

from collections import deque

import torch

from pagemill.config import EngineConfig
from pagemill.executor.device import Device
from pagemill.executor.device_steps import DeviceSteps, Together
from pagemill.executor.interface import ExecutorMemory
from pagemill.executor.rank_messages import Compile, DeviceLogits, DeviceStep, Measure
from pagemill.executor.share import Share
from pagemill.executor.staging import Ring, Slot
from pagemill.executor.worker import Worker
from pagemill.kvcache.device_streams import Event

FLIGHTS = 3
"""Steps that the device has been asked for at most, before the oldest is waited for: rank 0 does not run so far ahead
either."""


class DeviceWorker(Worker):
    """Holds one rank's part. It does what `GpuExecutor` does on rank 0, but for choosing what to do."""

    def __init__(self, device: Device, share: Share, config: EngineConfig, together: Together) -> None:
        decoder, longest = share.model.decoder, share.model.max_model_len
        super().__init__(decoder, share.backend, share.shape, config.max_num_seqs, longest, streams=device)
        self._accelerator = device
        self._exchange = together.exchange
        self._steps = DeviceSteps(
            device, self, share.backend, config.max_num_seqs, longest, config.enforce_eager, together
        )
        self._ring = Ring(device, config.max_num_seqs)
        self._flights: deque[tuple[Slot, Event]] = deque()

    def memory(self) -> ExecutorMemory:
        return self._steps.memory()

    def resize(self, num_frames: int) -> None:
        self._steps.check_growth(num_frames)
        super().resize(num_frames)

    def look(self) -> None:
        """Raises RuntimeError if the device has failed in a step: it ends this process, and rank 0 hears of that."""
        for _, done in self._flights:
            done.query()

    def do(self, message: DeviceStep | DeviceLogits | Measure | Compile) -> None:
        """Takes part in what rank 0's device does."""
        match message:
            case DeviceStep():
                self._run(message)
            case DeviceLogits():
                decoder, size = self.decoder, (message.rows, self.decoder.spec.hidden_size)
                hidden = torch.empty(size, dtype=decoder.dtype, device=self._accelerator.where)
                self._exchange.broadcast(hidden)
                decoder.logits(hidden)
            case Measure():
                self._steps.measure(message.largest, self._shape, message.streams)
            case Compile():
                self._steps.compile(message.largest, self._shape)

    @torch.inference_mode()
    def _run(self, step: DeviceStep) -> None:
        if len(self._flights) >= FLIGHTS:
            slot, done = self._flights.popleft()
            done.synchronize()
            self._ring.give_back(slot)
        slot = self._ring.take()
        slot.fill(step.staged)
        memory = self._steps.take(slot, step.places)
        self._steps.run(slot, memory, step.places, step.shape, step.padded)
        self._flights.append((slot, self._accelerator.compute.record_event()))
