"""Branches: further paths of a sequence's drafts, each in a row of its own over a fork of the sequence's table.

A tree of drafts is verified as its paths: the first behind the sequence's last token in its own row, each other one
behind the same token in another row. All share the blocks before that token, and the block in which it lies is copied.
So every query is an ordinary one, whose bits do not depend on what else is drafted. The path that the model follows
longest becomes the sequence's, by its blocks; the others are given back.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.batch import Batch, ScheduledStep
from pagemill.scheduling.sequence import Branch, Sequence


class Tree(NamedTuple):
    """Says what became of one sequence's drafts in a step.

    drafts:   all that were verified.
    first:    those of the first path, which is the longest.
    right:    how many of these were right, up to the first that was not.
    others:   how many branches were tried that leave the first path where it went wrong, up to the right one.
    gained:   how many tokens the branch that was followed has brought beyond that; 0 if none was.
    branches: how many there were, wherever they leave it.
    computed: the tokens that these have computed.
    """

    drafts: int
    first: int
    right: int
    others: int = 0
    gained: int = 0
    branches: int = 0
    computed: int = 0


def begin(
    memory: MemoryManager, batch: Batch, sequence: Sequence, first: list[int], drafts: list[int], now: float
) -> bool:
    """Forks a branch with these drafts off a sequence, beside its `first` path. Returns False, and changes nothing,
    where there is no free row, or are no blocks for it.

    The sequence has reserved what its step writes, and has it again afterwards. Not to be called while another step is
    in flight, under which nothing that is given back comes free.
    """
    table, known = sequence.table, sequence.scheduled
    assert table is not None
    if not batch.num_free:
        return False
    fork = memory.fork(table, known)
    fits = memory.reserve(fork, known + 1 + len(drafts)) is None
    if not fits:
        memory.close(fork, now)
    shortage = memory.reserve(table, known + 1 + len(first))
    assert shortage is None, "what it has reserved is its own again"
    if fits:
        leaves_at = next(i for i, draft in enumerate(drafts) if draft != first[i])
        sequence.branches.append(Branch(fork, batch.take_row(), drafts, leaves_at))
    return fits


def end(memory: MemoryManager, batch: Batch, sequence: Sequence, followed: Branch | None, now: float) -> None:
    """Ends a sequence's branches, and makes the blocks of the one that was followed, if any, its own."""
    for branch in sequence.branches:
        if branch is followed:
            assert sequence.table is not None
            memory.adopt(sequence.table, branch.table, now)
        else:
            memory.close(branch.table, now)
        batch.free_rows.append(branch.row)
    sequence.branches = []


def tree_of(flight: ScheduledStep, sample: int, accepted: int, undrafted: Set[int]) -> Tree | None:
    """Returns what became of the drafts among which those of a sample were accepted; None if the device had none.

    undrafted: as of the step's result.
    """
    entries, samples, root = flight.entries, flight.samples, sample
    followed = entries[samples[sample][0]].branch
    while entries[samples[root][0]].branch is not None:
        root -= 1
    if root in undrafted:
        return None
    entry = entries[samples[root][0]]
    right = accepted if followed is None else followed.leaves_at
    drafts, others, count, computed = entry.drafts, 0, 0, 0
    for number, branch in enumerate(entry.sequence.branches, root + 1):
        if number not in undrafted:
            count += 1
            computed += 1 + len(branch.drafts)
            drafts += len(branch.drafts) - branch.leaves_at
            others += branch.leaves_at == right and (followed is None or number <= sample)
    return Tree(drafts, entry.drafts, right, others, accepted - right, count, computed)
