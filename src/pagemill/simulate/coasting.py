"""Coasting: sequences that only generate go on by themselves, so that a simulated step costs nothing for each of them.

Between the token that begins a block and the one that fills it, a generating sequence takes one place in each step and
nothing else of it changes: no block, no name, no end. So it need not be planned and committed token by token. What is
simulated is the same to the last bit, but for the numbers of tokens that nobody compares.
"""

from __future__ import annotations

import collections.abc as abc

from pagemill.kvcache.layer_groups import LayerGroups
from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.sequence import Sequence
from pagemill.simulate.step_time import StepWork


class Coasting:
    """Holds the sequences that coast, none of which the scheduler plans meanwhile.

    They are behind: `settle` gives them the tokens that they have got since, before anybody looks at these.

    bring: gives a sequence so many tokens.
    count: how many coast.
    """

    def __init__(self, scheduler: Scheduler, bring: abc.Callable[[Sequence, int], None]) -> None:
        self._scheduler = scheduler
        self._memory: MemoryManager = scheduler.memory
        self._bring = bring
        scheduler.state.settle = self.settle
        self._steps = 0
        self._since: dict[Sequence, int] = {}
        self._wakes: dict[int, list[Sequence]] = {}
        """By step, the sequences that are planned from it on."""
        self._least = 1 if scheduler.state.caches_prefixes else 0
        """Places of a block that are left when its sequence wakes: the last one, where that makes it findable."""
        self._keys = 0
        """Tokens that all of them see in their next step."""

    @property
    def count(self) -> int:
        return len(self._since)

    def prepare(self) -> None:
        """Wakes who is to be planned in the next step.

        All wake where a sequence could be preempted: where not all that run surely find the blocks that they may take.
        """
        for sequence in self._wakes.pop(self._steps, ()):
            self._wake(sequence)
        scheduler = self._scheduler
        taken = scheduler.num_running + -(-scheduler.max_num_batched_tokens // self._memory.block_size)
        if self._memory.num_available < taken:
            for sequence in [*self._since]:
                self._wake(sequence)
            self._wakes.clear()

    def settle(self) -> None:
        """Gives all of them the tokens that they have got."""
        for sequence in self._since:
            self._settle(sequence)

    def work(self, groups: LayerGroups) -> StepWork:
        """Returns their part of the next step."""
        seen = self._keys * sum(len(group.layers) for group in groups.groups)
        return StepWork(self.count, self.count, self.count, seen, seen)

    def step(self) -> None:
        """Ends a step, in which each has got a token."""
        self._steps += 1
        self._keys += self.count

    def enter(self, sequence: Sequence) -> None:
        """Lets a sequence that a step has just brought a token coast as far as it can."""
        size, scheduled = self._memory.block_size, sequence.scheduled
        request = sequence.request
        steps = min(size - self._least - scheduled % size, request.max_len - len(sequence.tokens) - 1)
        # At a block's beginning there is none yet; forks and beams share blocks that they are to write.
        if steps > 0 and scheduled % size and sequence.group is None and request.params.n == 1:
            sequence.open_ended = True
            self._since[sequence] = self._steps
            self._wakes.setdefault(self._steps + steps, []).append(sequence)
            self._keys += scheduled + 1

    def _wake(self, sequence: Sequence) -> None:
        self._settle(sequence)
        self._keys -= len(sequence.tokens)
        del self._since[sequence]
        sequence.open_ended = False
        sequence.scheduled = len(sequence.tokens) - 1
        assert sequence.table is not None
        self._memory.commit(sequence.table, sequence.scheduled, sequence.tokens, sequence.digests)

    def _settle(self, sequence: Sequence) -> None:
        if count := self._steps - self._since[sequence]:
            self._since[sequence] = self._steps
            self._bring(sequence, count)
