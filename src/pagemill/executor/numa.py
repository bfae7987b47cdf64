"""NUMA: which cores a rank of several runs on, so that it reads its weights and K/V from its own socket's memory.

A rank binds the thread that loads its part, and the threads that this starts have its cores too. Linux gives a page to
the node of the core that first writes it, so memory follows the threads.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

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


def cores_of_rank(rank: int, size: int, nodes: list[set[int]], usable: set[int]) -> set[int] | None:
    """Returns the cores that a rank is bound to, of those that this process may use; None: it is not bound.

    Nodes are divided among ranks evenly: several ranks have one node, or one rank has several. Nobody is bound where
    that does not come out even, or where fewer than two nodes have usable cores: somebody has chosen cores already.
    """
    nodes = [cores & usable for cores in nodes if cores & usable]
    count = len(nodes)
    if count < 2 or size < 2 or (size % count and count % size):
        return None
    mine = range(count * rank // size, max(count * rank // size + 1, count * (rank + 1) // size))
    return set[int]().union(*(nodes[node] for node in mine))


def bind_rank(rank: int, size: int) -> set[int] | None:
    """Binds this thread, and those that it starts, to the rank's cores.

    Returns the cores that it had before, for `os.sched_setaffinity`; None if it is not bound.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    before = os.sched_getaffinity(0)
    cores = cores_of_rank(rank, size, read_nodes(), before)
    if cores is None:
        return None
    os.sched_setaffinity(0, cores)
    logger.info("rank %d of %d is bound to the %d cores of its NUMA node", rank, size, len(cores))
    return before


def _cores(text: str) -> set[int]:
    """Returns the numbers of a list as Linux writes it: 0-3,8."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return cores
