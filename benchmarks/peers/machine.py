"""Describes what a figure has to be read with (CPU, cores, load), and measures the memory of a process tree."""

from __future__ import annotations

import contextlib
import os
from datetime import datetime, timezone

import psutil

from pagemill.doctor import cpu_model
from pagemill.machine import cpu_features


def describe_machine() -> dict[str, object]:
    features = cpu_features()
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
    return {
        "cpu": cpu_model(),
        "features": [name for name in known if name in features],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def heading(machine: dict[str, object]) -> str:
    """Returns the line that a table of figures begins with."""
    return f"{machine['cpu']}, {machine['cores']} cores, load average {machine['load_average']}, {machine['date']}"


def resident_bytes(process: psutil.Process) -> int:
    """Returns the resident memory of a process and all below it, shared pages counted in each."""
    total = 0
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total
