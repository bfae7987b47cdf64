"""The persistent batch: which of its rows are in use, and the steps over it that have been planned."""

from __future__ import annotations

import collections.abc as abc
from collections import deque
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pagemill.memory.manager import MemoryManager
from pagemill.sampling.random import sequence_seed
from pagemill.scheduling.sequence import Branch, Sequence
from pagemill.scheduling.step_plan import ChosenTokens, NewRow, StepPlan

NONE: abc.Mapping[Sequence, list[int]] = {}


class Entry(msgspec.Struct, gc=False):
    """One row of a step in flight: the sequence, and which of its tokens are computed, the last `drafts` guesses.

    branch: the one whose row it is; None for the sequence's own.
    """

    sequence: Sequence
    start: int
    end: int
    drafts: int
    branch: Branch | None = None


class ScheduledStep(NamedTuple):
    """Holds a step that has been planned and not yet committed.

    samples: (index of the entry, index of the sequence) of each. computed: indices of entries that complete a prompt
    behind which nothing is sampled.
    """

    plan: StepPlan
    entries: list[Entry]
    samples: list[tuple[int, int]]
    computed: list[int]


class Batch:
    """Keeps rows 0 .. num_rows - 1, each free or a sequence's; `flights` are the steps under way, the oldest first."""

    def __init__(self, memory: MemoryManager, num_rows: int) -> None:
        self.flights: deque[ScheduledStep] = deque()
        self._memory = memory
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self._freed: list[int] = []
        """Since the last plan."""
        self._chosen: dict[int, ChosenTokens] = {}
        self.steps = 0

    @property
    def num_free(self) -> int:
        return len(self.free_rows)

    def seat(self, sequence: Sequence, rows: int) -> None:
        """Gives a sequence so many rows, its own and those of the sequences that will fork off. There must be so
        many."""
        sequence.row, *sequence.child_rows = (self.free_rows.pop() for _ in range(rows))
        sequence.prefill_len = len(sequence.tokens) - 1

    def take_row(self) -> int:
        """Takes one more row. There must be one."""
        return self.free_rows.pop()

    def unseat(self, sequence: Sequence) -> int:
        """Takes a sequence's rows away, and returns how many they were."""
        rows = [sequence.row, *sequence.child_rows]
        self._chosen.pop(sequence.row, None)
        self.free_rows += rows
        self._freed += rows
        sequence.row, sequence.child_rows = -1, []
        return len(rows)

    def choose(self, sequence: Sequence, tokens: list[int]) -> None:
        """Lets a running sequence go on with these tokens, whatever was sampled in its row."""
        self._chosen[sequence.row] = ChosenTokens(sequence.row, len(sequence.tokens), tokens)
        sequence.tokens += tokens
        sequence.prefill_len = len(sequence.tokens) - 1

    def plan(
        self,
        planned: abc.Mapping[Sequence, int],
        drafts: abc.Mapping[Sequence, list[int]] = NONE,
        catch_up: int = 0,
    ) -> StepPlan:
        """Plans a step, which is in flight from now on.

        planned: how many tokens each sequence computes. drafts: the last of these, where they are guesses; the
        sequence's branches compute further ones. catch_up: the most tokens that a draft model takes in of those that it
        has not yet.
        """
        entries: list[Entry] = []
        rows: list[int] = []
        starts: list[int] = []
        query_lens: list[int] = []
        generates: list[bool] = []
        sample_from: list[int] = []
        sample_index: list[int] = []
        sample_to: list[int] = []
        max_accepted: list[int] = []
        branches: list[int] = []
        new_rows: list[NewRow] = []
        prompt_logprobs: list[int] = []
        computed: list[int] = []
        pooled: list[int] = []
        pools_all: list[bool] = []
        draft_tokens: list[int] = []
        forks = False
        for sequence, count in planned.items():
            assert sequence.table is not None
            position, row, start = len(entries), sequence.row, sequence.scheduled
            generates.append(start >= sequence.prefill_len)
            end = sequence.scheduled = start + count
            guesses = drafts.get(sequence, ()) if drafts else ()
            entries.append(Entry(sequence, start, end, len(guesses)))
            rows.append(row)
            starts.append(start)
            query_lens.append(count)
            known = len(sequence.tokens) + sequence.in_flight
            if sequence.table.row < 0:
                self._memory.place(sequence.table, row)
                new_rows.append(_new_row(sequence, sequence.index, row))
            if known == sequence.prompt_len:
                if sequence.request.params.prompt_logprobs is not None:
                    prompt_logprobs.append(position)
                if end == known and sequence.forks_after_prompt:
                    forks = True
                    for index, child_row in enumerate(sequence.child_rows, start=1):
                        new_rows.append(_new_row(sequence, index, child_row))
                        sample_from.append(position)
                        sample_index.append(index)
                        sample_to.append(child_row)
                        max_accepted.append(1)
            if not sequence.request.samples:
                if end == known:
                    computed.append(position)
                pooling = sequence.request.pooling
                if pooling is not None and (pooling.reads_all_tokens or end == known):
                    pooled.append(position)
                    pools_all.append(pooling.reads_all_tokens)
            elif end - len(guesses) == known:
                sample_from.append(position)
                sample_index.append(sequence.index)
                sample_to.append(row)
                max_accepted.append(1 + len(guesses))
                sequence.in_flight += sequence.group is None
                draft_tokens += guesses
                sequence.open_ended = bool(guesses) or sequence.request.reads_answer
            for branch in sequence.branches:
                count = 1 + len(branch.drafts)
                self._memory.place(branch.table, branch.row)
                branches.append(len(sample_from))
                sample_from.append(len(entries))
                sample_index.append(sequence.index)
                sample_to.append(row)
                max_accepted.append(count)
                draft_tokens += branch.drafts
                entries.append(Entry(sequence, start, start + count, count - 1, branch))
                rows.append(branch.row)
                starts.append(start)
                query_lens.append(count)
                generates.append(True)
        self.steps += 1
        freed, self._freed = self._freed, []
        chosen = list(self._chosen.values())
        self._chosen.clear()
        plan = StepPlan(
            step=self.steps,
            work=self._memory.drain(self.steps),
            rows=np.fromiter(rows, np.int32, len(rows)),
            starts=np.fromiter(starts, np.int32, len(rows)),
            query_lens=np.fromiter(query_lens, np.int32, len(rows)),
            generates=np.fromiter(generates, np.bool_, len(rows)),
            sample_from=np.fromiter(sample_from, np.int32, len(sample_from)),
            sample_to=np.fromiter(sample_to, np.int32, len(sample_to)),
            max_accepted=np.fromiter(max_accepted, np.int32, len(sample_to)),
            branches=_marked(branches, len(sample_to)),
            draft_tokens=np.array(draft_tokens, np.int32),
            prompt_logprobs=np.fromiter(prompt_logprobs, np.int32, len(prompt_logprobs)),
            new_rows=new_rows,
            freed_rows=freed,
            chosen_tokens=chosen,
            pooled=np.fromiter(pooled, np.int32, len(pooled)),
            pools_all=np.fromiter(pools_all, np.bool_, len(pooled)),
            forks=forks,
            branched=bool(branches),
            catch_up=catch_up,
        )
        self.flights.append(ScheduledStep(plan, entries, list(zip(sample_from, sample_index, strict=True)), computed))
        return plan


def _marked(places: list[int], count: int) -> NDArray[np.bool_]:
    """Returns bool [count]: which are among these places."""
    marked = np.zeros(count, np.bool_)
    marked[places] = True
    return marked


def _new_row(sequence: Sequence, index: int, row: int) -> NewRow:
    request = sequence.request
    seed = sequence_seed(request.seed, index)
    return NewRow(row, sequence.tokens, sequence.prompt_len, request.params, seed, request.adapter, request.root)
