"""Reads what the machine gives this process: CPU features, cores, memory, within the limits of its control groups.

Read from /proc and /sys under `root`, so that tests can lay out a machine; elsewhere what the system calls tell.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True)
class Memory:
    """Memory in bytes.

    total: the machine's. available: what this process can have without swapping, within the limit; None where the
    system does not say. limit: the smallest of the control groups', where it is below `total`.
    """

    total: int
    available: int | None
    limit: int | None


@cache
def cpu_info(root: Path = _ROOT) -> dict[str, str]:
    """Returns the first processor's lines of /proc/cpuinfo by name; empty on systems without it."""
    return _fields(root / "proc/cpuinfo")


def cpu_features(root: Path = _ROOT) -> frozenset[str]:
    """Returns the CPU's features as Linux names them; on other systems those that kernels for ARM choose by."""
    fields = cpu_info(root)
    if not fields and platform.system() == "Darwin" and platform.machine() == "arm64":
        return _apple_features()
    return frozenset(fields.get("flags", fields.get("Features", "")).split())


def _apple_features() -> frozenset[str]:
    try:
        told = subprocess.run(
            ["sysctl", "hw.optional.arm"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        told = ""
    names = {"FEAT_DotProd": "asimddp", "FEAT_I8MM": "i8mm", "FEAT_BF16": "bf16"}
    found = {name for feature, name in names.items() if f"hw.optional.arm.{feature}: 1\n" in told}
    return frozenset({"asimdhp", *found})  # every Apple CPU has half-precision arithmetic


def usable_cores(root: Path = _ROOT) -> int:
    """Returns how many physical cores this process may run on, within the smallest CPU quota of its control groups."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core = tuple(_text(topology / name) for name in ("physical_package_id", "core_id"))
        cores.add(core if all(core) else (str(cpu),))
    return max(1, min([len(cores), *_cpu_quotas(root)]))


def num_gpus(root: Path = _ROOT) -> int:
    """Returns how many GPUs NVIDIA's driver shows here: all of the machine's, or those that a container was given."""
    return len(list((root / "proc/driver/nvidia/gpus").glob("*")))


def usable_memory(root: Path = _ROOT) -> Memory:
    """Returns the machine's memory, and what this process may still take of it."""
    fields = _fields(root / "proc/meminfo")
    if "MemTotal" in fields:
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    else:
        total, available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    limit = None
    for bound, used in _memory_limits(root):
        if bound < total:  # version 1 writes a huge number for "no limit"
            limit = bound if limit is None else min(limit, bound)
            free = max(0, bound - used)
            available = free if available is None else min(available, free)
    return Memory(total, available, limit)


def _cpu_quotas(root: Path) -> Iterator[int]:
    """Yields each control group's CPU quota in whole cores, rounded up."""
    for group in _groups(root, "cpu"):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if not quota:
            quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # "max" or -1: no quota
            yield math.ceil(int(quota) / int(period))


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields each control group's limit, if it has one, and its bytes in use without file pages that can be dropped."""
    files = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for group in _groups(root, "memory"):
        for limit, usage, inactive in files:
            bound, used = _text(group / limit), _text(group / usage)
            if bound.isdigit() and used.isdigit():
                stat = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines())
                yield int(bound), int(used) - int(stat.get(inactive, 0))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control group and of all groups around it, for versions 2 and 1.

    In a container the path in /proc may be the host's. Then only the folder at the mount is there.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / path.lstrip("/")
        inside = () if ".." in group.parts else (group, *group.parents)
        yield from (folder for folder in inside if folder != mount and folder.is_relative_to(mount))
        yield mount


def _fields(file: Path) -> dict[str, str]:
    """Returns a file's `name: value` lines; the first of equal names counts."""
    fields: dict[str, str] = {}
    for line in _text(file).splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip(), value.strip())
    return fields


def _text(file: Path) -> str:
    """Returns a file's text, empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
