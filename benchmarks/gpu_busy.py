"""Tells how much of its time a GPU works, by what torch's profiler sees of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

NOT_KERNELS = ("Memcpy", "Memset")
GRAPHS_LIVE = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
"""Settings of the profiler: beside CUDA graphs, its library may crash where it is started again, as torch says too."""


@dataclass(frozen=True)
class Busy:
    """Holds the share of a time in which kernels ran, and the milliseconds of each step in which they did."""

    share: float
    kernel_ms: float


def busy_of(spans: Iterable[tuple[float, float]], steps: int) -> Busy | None:
    """Returns what kernels' spans, begin and end in microseconds, make of the time from the first to the last; time in
    which several run counts once. None if there are no kernels."""
    ordered = sorted(spans)
    if not ordered:
        return None
    ran, until = 0.0, ordered[0][0]
    for begin, end in ordered:
        ran += max(0.0, end - max(begin, until))
        until = max(until, end)
    return Busy(ran / (until - ordered[0][0]), ran / 1e3 / steps)


def kernel_spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Returns begin and end of the kernels among a profiler's events."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(NOT_KERNELS)
    ]


def watch(step: Callable[[], object], steps: int) -> Busy | None:
    """Runs steps, and returns how busy the GPU was; None where the profiler sees no kernels, or no GPU."""
    if ProfilerActivity.CUDA not in supported_activities():
        return None
    for name, value in GRAPHS_LIVE.items():
        os.environ.setdefault(name, value)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return busy_of(kernel_spans(seen.events()), steps)
