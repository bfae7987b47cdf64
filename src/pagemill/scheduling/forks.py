"""Forks: sequences that begin from the blocks of a running one, all shared until one of the two writes."""

from __future__ import annotations

import collections.abc as abc
from bisect import insort

from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.admission import Admission
from pagemill.scheduling.batch import Batch, Entry
from pagemill.scheduling.sequence import Sequence, Status, by_rank
from pagemill.scheduling.tenancy import Tenancy


class Forks:
    """What a scheduler forks: prompts with n sequences, beams, and requests that go on from a running one.

    running: the scheduler's, by rank. requests: its sequences that have not finished, by request.
    """

    def __init__(
        self,
        memory: MemoryManager,
        batch: Batch,
        tenants: Tenancy,
        admission: Admission,
        running: list[Sequence],
        requests: dict[str, list[Sequence]],
    ) -> None:
        self._memory = memory
        self._batch = batch
        self._tenants = tenants
        self._admission = admission
        self._running = running
        self._requests = requests

    def after_prompt(self, parent: Entry, index: int) -> Sequence:
        """The n-th sequence of a request starts from the prompt's blocks, all shared. Its row is in the plan."""
        origin = parent.sequence
        child = self._share(origin, parent.end, index, origin.child_rows[index - 1])
        assert child.table is not None
        self._memory.place(child.table, child.row)
        if index == origin.request.params.n - 1:
            origin.child_rows = []
        return child

    def _share(self, origin: Sequence, length: int, index: int, row: int) -> Sequence:
        """A running sequence of the same request that shares the first `length` tokens, all of them computed."""
        assert origin.table is not None
        child = Sequence(
            origin.request,
            index,
            origin.rank._replace(branch=index),
            origin.tokens[:length],
            status=Status.RUNNING,
            digests=origin.digests[: length // self._memory.block_size],
            table=self._memory.fork(origin.table, length),
            row=row,
            scheduled=length,
            num_cached_tokens=origin.num_cached_tokens,
            prompt_logprobs=origin.prompt_logprobs,
            scheduled_s=origin.scheduled_s,
            group=origin.group,
        )
        insort(self._running, child, key=by_rank)
        self._tenants[origin.request.tenant].running += 1
        self._requests[origin.request.request_id].append(child)
        return child

    def beam(self, origin: Sequence, tokens: list[int]) -> Sequence:
        """Another beam, which goes on with these tokens; in a row kept for it, or that of one that has ended."""
        assert origin.group is not None
        if origin.child_rows:
            row = origin.child_rows.pop()
        else:
            row = self._batch.take_row()
            self._tenants[origin.request.tenant].rows += 1
        child = self._share(origin, origin.scheduled, origin.group.next_branch(), row)
        child.tokens += tokens
        self._admission.name_blocks(child)
        return child

    def into(self, child: Sequence, index: int, siblings: abc.Sequence[Sequence]) -> bool:
        """Opens a request's first sequence from the blocks of the running one, of this index among `siblings`, with
        whose tokens it begins, down to the last token, which is computed again for what follows it. False where that
        can not be."""
        origin = next((one for one in siblings if one.index == index), None)
        load = self._tenants[child.request.tenant]
        if origin is None or origin.table is None or self._batch.num_free < child.num_rows:
            return False
        if not load.may_run(child.num_rows):
            return False
        request, length = child.request, len(child.tokens) - 1
        if not 0 < length <= origin.table.length or origin.tokens[: length + 1] != child.tokens:
            return False
        if origin.request.root != request.root or request.params.prompt_logprobs is not None:
            return False
        try:
            child.table = self._memory.fork(origin.table, length)
        except ValueError:  # it has gone on, and given back what its window has left
            return False
        self._batch.seat(child)
        child.scheduled = child.num_cached_tokens = length
        child.scheduled_s = request.arrival_s
        self._admission.name_blocks(child)
        return True

    def choose(self, sequence: Sequence, tokens: list[int]) -> None:
        """A running sequence goes on with these tokens, whatever was sampled in its row."""
        self._batch.choose(sequence, tokens)
        self._admission.name_blocks(sequence)
