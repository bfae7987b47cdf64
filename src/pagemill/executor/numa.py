"""NUMA: which cores a rank of several runs on, so that it reads its weights and K/V from its own socket's memory.

A rank binds the thread that loads its part, and the threads that this starts have its cores too. Linux gives a page to
the node of the core that first writes it, so memory follows the threads.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)
NODES = Path("/sys/devices/system/node")


def read_nodes(folder: Path = NODES) -> list[set[int]]:
    """Returns the cores of each NUMA node that has some, in the order of nodes; none where the system does not say."""
    nodes = []
    for node in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        try:
            cores = _cores((node / "cpulist").read_text())
        except OSError:
            continue
        if cores:
            nodes.append(cores)
    return nodes


class Binding(NamedTuple):
    """Remembers a thread that was bound, by its number in the system, and the cores that it had before."""

    thread: int
    cores: set[int]

    def undo(self) -> None:
        """Gives the thread its cores back; a thread that has ended needs none."""
        with suppress(OSError):
            os.sched_setaffinity(self.thread, self.cores)


def cores_of_rank(rank: int, size: int, num_threads: int, nodes: list[set[int]], usable: set[int]) -> set[int] | None:
    """Returns the cores that a rank is bound to, of those that this process may use; None: it is not bound.

    Nodes are divided among ranks evenly: several ranks have one node, or one rank has several. Nobody is bound where
    that does not come out even, where a rank would have fewer cores than its `num_threads`, or where fewer than two
    nodes have usable cores: somebody has chosen cores already.
    """
    nodes = [cores & usable for cores in nodes if cores & usable]
    count = len(nodes)
    if count < 2 or size < 2 or (size % count and count % size):
        return None
    shares = [
        set[int]().union(*nodes[count * each // size : max(count * each // size + 1, count * (each + 1) // size)])
        for each in range(size)
    ]
    ranks_per_node = max(1, size // count)
    if min(map(len, shares)) < ranks_per_node * num_threads:
        return None
    return shares[rank]


def bind_rank(rank: int, size: int, num_threads: int) -> Binding | None:
    """Binds this thread, and those that it starts, to the rank's cores. Returns how to undo it; None: it is not bound,
    as where the system forbids it."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    before = os.sched_getaffinity(0)
    cores = cores_of_rank(rank, size, num_threads, read_nodes(), before)
    if cores is None:
        return None
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.warning("rank %d of %d is not bound to its NUMA node: %s", rank, size, error)
        return None
    logger.info("rank %d of %d is bound to the %d cores of its NUMA node", rank, size, len(cores))
    return Binding(threading.get_native_id(), before)


def _cores(text: str) -> set[int]:
    """Returns the numbers of a list as Linux writes it: 0-3,8."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return cores
