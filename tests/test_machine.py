"""Cores, features and memory as laid out in /proc and /sys: the smallest limit on the way to the root counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagemill.machine import Memory, cpu_features, cpu_info, num_gpus, usable_cores, usable_memory

MIB = 2**20


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def machine(root: Path, files: dict[str, str]) -> Path:
    """1000 MiB of memory, 800 of them available."""
    meminfo = f"MemTotal: {1000 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {800 * 1024} kB"
    return lay_out(root, {"proc/meminfo": meminfo, **files})


def group(folder: str, limit: int | str, used: int = 0, cached: int = 0) -> dict[str, str]:
    """Version 2, MiB."""
    return {
        f"{folder}/memory.max": str(limit * MIB if isinstance(limit, int) else limit),
        f"{folder}/memory.current": str(used * MIB),
        f"{folder}/memory.stat": f"anon 1\ninactive_file {cached * MIB}",
    }


def old_group(folder: str, limit: int, used: int = 0, cached: int = 0) -> dict[str, str]:
    """Version 1, MiB."""
    return {
        f"{folder}/memory.limit_in_bytes": str(limit * MIB),
        f"{folder}/memory.usage_in_bytes": str(used * MIB),
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {cached * MIB}",
    }


def cpus(count: int, threads: int = 1) -> dict[str, str]:
    """Two packages, whose cores have the same numbers."""
    files = {}
    for cpu in range(count):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        core = cpu // threads
        files |= {f"{topology}/physical_package_id": str(core % 2), f"{topology}/core_id": str(core // 2)}
    return files


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (1000, 800, None)),
        ({"proc/self/cgroup": "0::/", **group("sys/fs/cgroup", 300, used=100)}, (1000, 200, 300)),
        ({"proc/self/cgroup": "0::/", **group("sys/fs/cgroup", "max")}, (1000, 800, None)),
        ({"proc/self/cgroup": "0::/", **group("sys/fs/cgroup", 300, used=250, cached=60)}, (1000, 110, 300)),
        (
            {
                "proc/self/cgroup": "0::/a.slice/b.service",
                **group("sys/fs/cgroup/a.slice", 400, used=390),
                **group("sys/fs/cgroup/a.slice/b.service", 700, used=10),
                **group("sys/fs/cgroup/a.slice/other", 1),
            },
            (1000, 10, 400),
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b/c",
                **group("sys/fs/cgroup/a", 700, used=500),
                **group("sys/fs/cgroup/a/b", "max", used=20),
                **group("sys/fs/cgroup/a/b/c", 300, used=150),
            },
            (1000, 150, 300),
        ),
        # Version 1: the root has no limit, in words of a huge number.
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/elsewhere\n4:memory:/a/b\n1:name=systemd:/\n0::/",
                **old_group("sys/fs/cgroup/memory", 2**43),
                **old_group("sys/fs/cgroup/memory/a", 500, used=200, cached=50),
                **old_group("sys/fs/cgroup/memory/a/b", 2**43, used=100),
            },
            (1000, 350, 500),
        ),
        # In a container: the host's path, of which the mount is the last folder; and a group outside of the mount.
        ({"proc/self/cgroup": "4:memory:/docker/1f", **old_group("sys/fs/cgroup/memory", 64)}, (1000, 64, 64)),
        ({"proc/self/cgroup": "0::/../x", **group("sys/fs/cgroup", 64), **group("sys/fs/x", 1)}, (1000, 64, 64)),
        # More in use than is allowed, and more allowed than there is.
        ({"proc/self/cgroup": "0::/", **group("sys/fs/cgroup", 64, used=65)}, (1000, 0, 64)),
        ({"proc/self/cgroup": "0::/", **group("sys/fs/cgroup", 1001, used=999)}, (1000, 800, None)),
    ],
)
def test_memory_is_what_the_tightest_group_leaves(
    tmp_path: Path, files: dict[str, str], expected: tuple[int, int, int | None]
) -> None:
    total, available, limit = expected
    bytes_limit = None if limit is None else limit * MIB
    assert usable_memory(machine(tmp_path, files)) == Memory(total * MIB, available * MIB, bytes_limit)


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),  # nothing to be read: every CPU counts
        (cpus(8), 8),
        (cpus(8, threads=2), 4),
        (cpus(4, threads=2), 6),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 3),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "1000 100000"}, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "1600000 100000"}, 8),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "200000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpuset:/\n3:cpu,cpuacct:/a",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "50000",
            },
            3,
        ),
    ],
)
def test_cores_are_physical_and_within_the_tightest_quota(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert usable_cores(lay_out(tmp_path, files)) == cores


def test_gpus_are_those_of_the_driver(tmp_path: Path) -> None:
    assert num_gpus(tmp_path) == 0
    gpus = {f"proc/driver/nvidia/gpus/0000:{number}b:00.0/information": "Model: some" for number in range(3)}
    assert num_gpus(lay_out(tmp_path, gpus)) == 3


def test_only_the_cpus_that_this_process_may_use_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 6}, raising=False)
    assert usable_cores(lay_out(tmp_path, cpus(8, threads=2))) == 2


@pytest.mark.parametrize("name", ["flags", "Features"])
def test_features_are_the_first_processors(tmp_path: Path, name: str) -> None:
    cpu = "processor\t: {}\nmodel name\t: A CPU: fast\n{}\t\t: fma avx2{}\nbugs\t\t: many\n"
    lay_out(tmp_path, {"proc/cpuinfo": cpu.format(0, name, "") + "\n" + cpu.format(1, name, " amx_tile")})
    assert cpu_features(tmp_path) == {"fma", "avx2"}
    assert cpu_info(tmp_path)["model name"] == "A CPU: fast"


def test_systems_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_memory(tmp_path).available is None
    assert usable_memory(tmp_path).total > 0
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no sysctl
    assert cpu_features(tmp_path) == {"asimdhp"}
    told = "hw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_BF16: 0\nhw.optional.arm.FEAT_I8MM: 1\n"
    (tmp_path / "sysctl").write_text(f"#!/bin/sh\n[ $1 = hw.optional.arm ] && printf '{told}'\n")
    (tmp_path / "sysctl").chmod(0o755)
    assert cpu_features(tmp_path) == {"asimdhp", "asimddp", "i8mm"}


def test_this_machine() -> None:
    memory = usable_memory()
    assert memory.available is None or 0 < memory.available <= memory.total
    assert usable_cores() >= 1
