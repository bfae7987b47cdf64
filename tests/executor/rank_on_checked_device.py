"""A rank whose device is a checked one: `pagemill.executor.rank` for tests, on CPU tensors and gloo."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

import torch
from checked_device import CheckedDevice
from checked_driver import CheckedDriver
from divided_memory import divides_slots
from static_attention import StaticAttention

from pagemill.executor import graphs, rank
from pagemill.executor.backend import torch_backend
from pagemill.executor.rank_messages import Start
from pagemill.kvcache.streaming_gpu_frames import StreamingGpuFrames

STATIC = torch_backend(torch.device("cpu"))._replace(attention=StaticAttention())


CANNOT_CAPTURE = "PAGEMILL_TESTS_RANK_CANNOT_CAPTURE"
"""A variable of the environment that keeps ranks from capturing graphs."""
MAPS = "PAGEMILL_TESTS_RANK_MAPS"
"""One that says of how many bytes ranks' devices map their memory."""


def short_ladders() -> None:
    """Lets steps be captured soon, and in several lengths."""
    graphs.LEAST_CONTEXT, graphs.WORTH_IT = 32, 1


def run(descriptor: int) -> NoReturn:
    torch.set_num_threads(1)
    short_ladders()
    device = CheckedDevice(seed=1)
    device.captures = CANNOT_CAPTURE not in os.environ
    signal.signal(signal.SIGUSR1, lambda *_: setattr(device, "broken", True))
    if MAPS in os.environ:
        CheckedDriver(device, int(os.environ[MAPS]))
        device.nbytes = 1 << 30  # more than there is
    StreamingGpuFrames.__init__ = divides_slots(device, StreamingGpuFrames.__init__)

    def hardware_of(start: Start) -> rank.Hardware:
        return rank.Hardware(start.config, STATIC, device)

    with device:
        rank.run(descriptor, hardware_of)
    os._exit(1)
