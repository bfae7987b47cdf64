"""The scheduler: which tokens of which sequences run in the next step, and what follows from a step that has run.

`schedule` and `commit` are separate: a plan needs no token of the step before it, only their number, so the next step
can be planned while one is running. Neither looks at a clock: `now` is an argument, in seconds.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Set

from pagemill.memory.compaction import Compaction
from pagemill.memory.manager import MemoryManager
from pagemill.memory.moving import forget_lost
from pagemill.memory.pins import Pins
from pagemill.memory.work import Load
from pagemill.scheduling.acceptance import Acceptance
from pagemill.scheduling.admission import Admission
from pagemill.scheduling.batch import Batch
from pagemill.scheduling.beam import BeamGroup, Beams
from pagemill.scheduling.compactor import Compactor
from pagemill.scheduling.controller import Controller
from pagemill.scheduling.forks import Forks
from pagemill.scheduling.loading import Stored
from pagemill.scheduling.sequence import Rank, Request, Sequence, Status, by_rank
from pagemill.scheduling.step_plan import StepPlan, StepResult
from pagemill.scheduling.tenancy import Tenancy, borrower, victim
from pagemill.scheduling.update import Update

Wanted = list[tuple[int, Sequence]]
"""Tokens that a sequence has left to compute, and the sequence."""


class Scheduler:
    """Continuous batching over paged memory, with one token budget per step.

    Order of a step: sequences that generate, then prompts that were begun, each in order of rank, then new ones in the
    order of the waiting queue. When blocks run out, the running sequence of the worst rank loses its own and waits to
    be recomputed; where there are tenants, the worst of those that have borrowed (see `tenancy.victim`).

    Invariants: a running sequence has a table and a row, and no other has; rows in use and free rows add up to
    `max_num_seqs`; `_running` is sorted by rank; no sequence is preempted while a step is in flight.
    """

    def __init__(
        self,
        memory: MemoryManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: frozenset[int],
        ageing_s: float,
        enable_prefix_caching: bool = True,
        stored: Stored | None = None,
        max_pinned_share: float = 0.5,
        target_tpot_s: float = math.inf,
        compaction: Compaction | None = None,
    ) -> None:
        self.memory = memory
        self.compaction = compaction
        self.pins = Pins(memory, max_pinned_share)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.tenants = Tenancy(memory, self.pins)
        self._eos = eos_token_ids
        self._ageing_s = ageing_s
        self._running: list[Sequence] = []
        self._requests: dict[str, list[Sequence]] = {}
        self._batch = Batch(memory, max_num_seqs)
        self.controller = Controller(
            target_tpot_s, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
        )
        self.admission = Admission(
            memory,
            self._batch,
            self.tenants,
            self.pins,
            self._running,
            self.controller,
            chunk=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            stored=stored,
        )
        self.acceptance = Acceptance(
            memory,
            self.tenants,
            self.pins,
            self.admission,
            self._requests,
            chunk=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
        )
        self._forks = Forks(memory, self._batch, self.tenants, self.admission, self._running, self._requests)
        self._beams = Beams(self._forks.beam, self._forks.choose, self._finish)
        self._compactor = None if compaction is None else Compactor(compaction, self._running)
        self._arrivals = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(load.waiting for load in self.tenants)

    @property
    def preemptions(self) -> int:
        return sum(load.preemptions for load in self.tenants)

    @property
    def prefix_queried_tokens(self) -> int:
        return sum(load.prefix_queried_tokens for load in self.tenants)

    @property
    def prefix_hit_tokens(self) -> int:
        return sum(load.prefix_hit_tokens for load in self.tenants)

    def has_work(self) -> bool:
        return bool(self._running or self.num_waiting or self._batch.flights or self.admission.num_loading)

    def request_ids(self) -> list[str]:
        """All requests that have not finished."""
        return list(self._requests)

    def sequences(self) -> list[Sequence]:
        """All that have not finished, request by request."""
        return [one for siblings in self._requests.values() for one in siblings]

    def live(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request, fork_of: tuple[str, int] | None = None) -> None:
        """Queues a request. Raises as `Acceptance.accept` does.

        fork_of: a sequence `(request_id, index)` whose tokens the prompt is. If that is running, so is the new one at
        once, and shares all its blocks; else the prompt is like any other.
        """
        rank = Rank(request.arrival_s + request.priority * self._ageing_s, self._arrivals, 0)
        sequence = Sequence(request, 0, rank, list(request.prompt_token_ids))
        self.acceptance.accept(sequence)
        self._arrivals += 1
        if request.beam is not None:
            sequence.group = BeamGroup(sequence, self._eos)
        self._requests[request.request_id] = [sequence]
        if fork_of is not None and self._forks.into(sequence, fork_of[1], self._requests.get(fork_of[0], [])):
            self._run(sequence)
        else:
            self.admission.wait(sequence)

    def abort(self, request_id: str, now: float) -> None:
        """Ends all sequences of a request. Unknown ids are ignored."""
        for sequence in list(self._requests.get(request_id, [])):
            self._finish(sequence, now)

    def finish(self, request_id: str, index: int, now: float) -> None:
        """Ends one sequence whose stop the front end has seen, or the search that it is a beam of. Unknown ones are
        ignored."""
        for sequence in self._requests.get(request_id, []):
            if sequence.group is not None:
                return self.abort(request_id, now)
            if sequence.index == index:
                self._finish(sequence, now)
                return

    def lose(self, frames: Set[int], error: Exception, now: float) -> list[Update]:
        """These frames do not hold what they should. Ends the pins and running sequences that need it, and loads that
        go on behind it in vain; nobody finds it any more. To be called before the step that has found it is committed.
        """
        forget_lost(self.memory, frames)
        self.pins.lose(frames, now)
        self.admission.lose(frames)
        losers = [one for one in self._running if one.table is not None and self.memory.lies_in(one.table, frames)]
        return [update for one in losers for update in self._fail(one, error, now)]

    def lose_plan(self, plan: StepPlan, error: Exception, now: float) -> list[Update]:
        """The device has not carried out this plan, the only one in flight, or nobody knows how much of it: commits it
        as failed. Ends the sequences of its rows, those whose tokens or tables it changes, and what `lose` ends with
        the frames that it copies to; what it does not name goes on."""
        updates = self.lose(set(plan.work.copy_target.tolist()), error, now)
        updates += self.commit(StepResult.failure(plan, error), now)
        changed = {*plan.work.edit_row.tolist(), *(chosen.row for chosen in plan.chosen_tokens)}
        losers = [one for one in self._running if one.row in changed]
        return updates + [update for one in losers for update in self._fail(one, error, now)]

    def give_up(self, error: Exception, now: float) -> list[Update]:
        """Nothing can run, and nothing is under way that would change that: ends the request whose turn it is, behind
        which others may wait; all, if it is nobody's."""
        first = self.admission.first()
        return [
            update for one in (self.sequences() if first is None else [first]) for update in self._fail(one, error, now)
        ]

    def resize(self, num_frames: int, now: float) -> StepPlan:
        """Another number of frames in the pool: a plan without rows, whose work must be done before frames go.

        Sequences of the worst rank, of borrowers first, are preempted while what is held does not fit. No step may be
        in flight, no load under way. Raises as `Acceptance.check_size` does, and changes nothing.
        """
        self._resize(num_frames, now)
        return self._batch.plan({})

    def undo_resize(self, plan: StepPlan, num_frames: int, error: Exception, now: float) -> list[Update]:
        """The device has not carried out the plan of `resize`: as `lose_plan`; and the pool has as many frames as it
        had before, for which nothing need be moved."""
        updates = self.lose_plan(plan, error, now)
        self._resize(num_frames, now)
        return updates

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run before a step in flight is committed.

        A step without rows has frames to copy, before a load may use those that have come free.
        """
        self.expire(now)
        planned, budget = self._continue_running(now)

        def run(sequence: Sequence, budget: int) -> int:
            self._batch.seat(sequence)
            self._run(sequence)
            planned[sequence] = min(sequence.remaining, budget)
            return planned[sequence]

        def preempt(sequence: Sequence) -> int:
            return self._preempt_planned(sequence, planned, now)

        self.admission.admit(budget, now, run, preempt)
        if not planned and not (self.memory.has_copies and not self._batch.flights):
            return None
        if self._compactor is not None and not self._batch.flights:
            self._compactor.step()
        self.tenants.serve(planned)
        return self._batch.plan(planned)

    def expire(self, now: float) -> float:
        """Ends pins and cached blocks whose time is over; when there are more (inf: never). `schedule` does so too."""
        return min(self.pins.expire(now), self.memory.end_idle(now))

    def take_loads(self) -> list[Load]:
        """Loads that have been begun since the last call; each ends with `finish_load`."""
        return self.admission.take_loads()

    def finish_load(self, load: int, arrived: list[bool], now: float) -> None:
        """A load is over: `arrived` says which of its blocks are in their frames. Who waited for it goes on."""
        self.admission.finish_load(load, arrived, now)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """A step that has been committed took so long, planning and all."""
        if not self.controller.has_target:
            return
        generating = plan.num_generating
        self.controller.note_step(seconds, plan.num_tokens - generating, generating, len(self._running))
        self.controller.note_memory(self.preemptions, self.memory.num_frames)

    def _continue_running(self, now: float) -> tuple[dict[Sequence, int], int]:
        """Gives running sequences their tokens, generating ones first, by rank; and what is left for others."""
        planned: dict[Sequence, int] = {}
        generating: Wanted = []
        prompts: Wanted = []
        for sequence in self._running:
            if remaining := sequence.remaining:
                (generating if remaining == 1 else prompts).append((remaining, sequence))
        budget = self._continue(generating, planned, self.max_num_batched_tokens, now)
        if planned:
            budget = min(budget, self.controller.prompt_tokens)
        return planned, self._continue(prompts, planned, budget, now)

    def _continue(self, wanted: Wanted, planned: dict[Sequence, int], budget: int, now: float) -> int:
        """Plans running sequences, each with the tokens it has left to compute, and returns what is left of the budget.

        Where blocks run out, a running sequence is preempted, which may be the one that asks. Not while a step is in
        flight, though: blocks given back under it come free only when it retires, so whoever lacks one sits this step
        out.
        """
        reserve = self.memory.reserve
        for remaining, sequence in wanted:
            count, table = remaining if remaining < budget else budget, sequence.table
            if count == 0 or table is None:
                continue
            up_to = sequence.scheduled + count
            while up_to > table.writable and (shortage := reserve(table, up_to)) is not None:
                if self._batch.flights:
                    break
                loser = victim(self._running, sequence, shortage)
                if self._stream(sequence, loser, shortage.missing):
                    continue
                budget += self._preempt_planned(loser, planned, now)
                if sequence.table is None:
                    break
            else:
                planned[sequence] = count
                budget -= count
        return budget

    def _stream(self, sequence: Sequence, loser: Sequence, count: int) -> bool:
        """Makes room for a sequence without preempting the loser, which may be itself: by streaming blocks of the one
        of them that has more than half of the pool, or its own before it loses all."""
        for one in (sequence, loser) if self.memory.lower.count else ():
            assert one.table is not None
            large = 2 * self.memory.places(one.table).resident > self.memory.num_frames
            if (large or one is loser is sequence) and self.memory.stream(one.table, count):
                return True
        return False

    def _preempt_planned(self, sequence: Sequence, planned: dict[Sequence, int], now: float) -> int:
        """Preempts a sequence that may be in the plan of this step; how many of its tokens no longer are."""
        lost = [sequence] if sequence.group is None else sequence.group.beams
        freed = sum(planned.pop(one, 0) for one in lost)
        self._preempt(sequence, now)
        return freed

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self.tenants[sequence.request.tenant].preemptions += 1
        if sequence.group is not None:
            for other in sequence.group.park(self.memory.block_size):
                self._finish(other, now)
            (sequence,) = sequence.group.beams
        self._release(sequence, now)
        sequence.status = Status.WAITING
        self.admission.wait(sequence)

    def _resize(self, num_frames: int, now: float) -> None:
        self.acceptance.check_size(num_frames)
        while self.memory.resize(num_frames) is not None:
            self._preempt(borrower(self._running) or self._running[-1], now)
        self.tenants.resized()

    def _run(self, sequence: Sequence) -> None:
        """A sequence that has its table and its rows is running from now on."""
        sequence.status = Status.RUNNING
        load = self.tenants[sequence.request.tenant]
        load.running += 1
        load.rows += sequence.num_rows
        insort(self._running, sequence, key=by_rank)

    def commit(self, result: StepResult, now: float) -> list[Update]:
        """Takes in the oldest step in flight: publishes its blocks, appends its tokens, ends what has ended."""
        flight = self._batch.flights.popleft()
        self.memory.retire(flight.step)
        updates: list[Update] = []
        entries, failed, finished = flight.entries, result.failed, Status.FINISHED
        memory, admission, size = self.memory, self.admission, self.memory.block_size
        for position, entry in enumerate(entries):
            sequence, end = entry.sequence, entry.end
            if failed and position in failed:
                updates += self._fail(sequence, failed[position], now)
            elif sequence.status is not finished:
                assert sequence.table is not None
                fills = end // size > entry.start // size
                if fills:
                    admission.name_blocks(sequence)
                memory.commit(sequence.table, end, sequence.tokens, sequence.digests)
                if fills:
                    admission.resume(admission.pending.computed(sequence, end // size))
        for position, of_prompt in result.prompt_logprobs.items():
            sequence = entries[position].sequence
            if entries[position].start == 0:
                sequence.prompt_logprobs = [None]
            sequence.prompt_logprobs += of_prompt
        for (position, index), token, logprobs in zip(flight.samples, result.tokens, result.logprobs, strict=True):
            sequence = entries[position].sequence
            if sequence.status is finished or (failed and position in failed):
                continue
            if sequence.group is not None:
                results = self._beams.advance(sequence.group, sequence, logprobs, now)
                updates += [Update(s, None, None, h.finish_reason, hypothesis=h) for s, h in results]
                continue
            if index == sequence.index:
                sequence.in_flight -= 1
            else:
                sequence = self._forks.after_prompt(entries[position], index)
            if sequence.request.pin is not None and sequence.table is not None:
                self.pins.keep(sequence.request.request_id, sequence.table, now)
            sequence.tokens.append(token)
            reason, stop_reason = sequence.ending(self._eos)
            if reason is not None:
                self._finish(sequence, now)
            updates.append(Update(sequence, token, logprobs, reason, stop_reason))
        return updates

    def _fail(self, sequence: Sequence, error: Exception, now: float) -> list[Update]:
        """One sequence failed alone; before its prompt forked, and in a search, that is the whole request."""
        if sequence.status is Status.FINISHED:
            return []
        if sequence.group is not None:
            for beam in sequence.group.beams:
                self._finish(beam, now)
            ended = sequence.group.ended()
        else:
            forks = sequence.child_rows or sequence.forks_after_prompt
            lost = range(1, sequence.request.params.n) if forks else ()
            self._finish(sequence, now)
            ended = [sequence, *(sequence.ended(index) for index in lost)]
        return [Update(s, None, None, "error", error=error) for s in ended]

    def _finish(self, sequence: Sequence, now: float) -> None:
        if sequence.status is Status.WAITING:
            self.tenants[sequence.request.tenant].waiting -= 1
        else:
            self._release(sequence, now)
        sequence.status = Status.FINISHED
        siblings = self._requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            self.pins.drop(sequence.request.request_id)
            del self._requests[sequence.request.request_id]

    def _release(self, sequence: Sequence, now: float) -> None:
        """Takes a running sequence's row, blocks and claims away."""
        assert sequence.table is not None
        sequence.places = self.memory.places(sequence.table)
        self.memory.close(sequence.table, now)
        self.admission.resume(self.admission.pending.drop(sequence))
        self._running.remove(sequence)
        load = self.tenants[sequence.request.tenant]
        load.running -= 1
        load.rows -= self._batch.unseat(sequence)
        sequence.table = None
