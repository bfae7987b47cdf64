import subprocess
import sys

import pytest

PROGRAM = """
import psutil
from pagemill.server.lifecycle.freed_memory import give_back_freed_memory
if {called}:
    give_back_freed_memory()
first = b"x" * (30 << 20)
del first
before = psutil.Process().memory_info().rss
bodies, kept = [], []
for _ in range(20):
    bodies.append(b"x" * (4 << 20))
    kept.append(b"x" * 1000)
bodies.clear()
print(psutil.Process().memory_info().rss - before >> 20)
"""


def kept_mib(called: bool) -> int:
    """Returns how much memory a process keeps of 20 bodies of 4 MiB that it has freed."""
    command = [sys.executable, "-c", PROGRAM.format(called=called)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is meant")
def test_freed_bodies_go_back_to_the_system():
    assert kept_mib(called=False) > 10, "this allocator gives memory back by itself"
    assert kept_mib(called=True) < 8
