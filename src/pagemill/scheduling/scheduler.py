"""The scheduler: which tokens of which sequences run in the next step, and what follows from a step that has run.

`schedule` and `commit` are separate: a plan needs the number of tokens of the step before it, not the tokens, so it can
be made while that runs (`plans_ahead`). No clock is read: `now` is an argument, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

from pagemill.memory.manager import MemoryManager
from pagemill.memory.pins import Pins
from pagemill.memory.work import Load
from pagemill.scheduling import admission, forks, limits, preemption, speculation
from pagemill.scheduling.batch import Batch
from pagemill.scheduling.beam import BeamGroup
from pagemill.scheduling.commit import Commits
from pagemill.scheduling.compactor import Compactor
from pagemill.scheduling.controller import Controller
from pagemill.scheduling.forecast import TenantLengths
from pagemill.scheduling.loading import Stored
from pagemill.scheduling.pacing import Pacer
from pagemill.scheduling.sequence import Precedence, Request, Sequence, SequenceUpdate, Status
from pagemill.scheduling.speculation import Drafter
from pagemill.scheduling.state import SchedulerState, StepDraft
from pagemill.scheduling.step_plan import StepPlan, StepResult
from pagemill.scheduling.unstreaming import Unstreaming
from pagemill.tenant_limits import TenantLimits

SCORED_BESIDE = 16
"""Prompt tokens with log probabilities that a step takes beside sequences that generate: each needs the logits of the
whole vocabulary, and costs as much as ten others."""

Wanted = list[tuple[int, Sequence]]
"""Tokens that a sequence has left to compute, and the sequence."""


class Scheduler:
    """Continuous batching over paged memory, with one token budget per step.

    Order of a step: sequences that generate, then prompts that were begun, each by precedence, then new ones in the
    order of the waiting queue. When blocks run out, the last running sequence in precedence loses its own and waits to
    be recomputed; where there are tenants, the last of those that have borrowed (see `preemption.victim`). No sequence
    is preempted while a step is in flight.

    state:   what runs and what waits. Admission, preemption, forks, limits and speculation are functions over it.
    pacer:   says how many prompt tokens a step takes, where no target does (`target_tpot_s` None).
    drafter: guesses the next tokens of sequences that generate; None for one token at a time.
    drafts:  what has come of its guesses.
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
        swap_blocks: int = 0,
        max_pinned_share: float = 0.5,
        target_tpot_s: float | None = math.inf,
        compacts: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        self.memory = memory
        self.pins = Pins(memory, max_pinned_share)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pacer = Pacer(max_num_batched_tokens) if target_tpot_s is None else None
        target_s = math.inf if target_tpot_s is None else target_tpot_s
        self.controller = Controller(target_s, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        self._adapts = target_tpot_s != math.inf
        self.state = SchedulerState(
            memory,
            self.pins,
            Batch(memory, max_num_seqs),
            self.controller,
            chunk=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            caches_prefixes=enable_prefix_caching,
            stored=stored,
            swap_blocks=swap_blocks,
            lengths=None if self.pacer is None else TenantLengths(),
        )
        self.tenants = self.state.tenants
        self._commits = Commits(self.state, eos_token_ids, drafter)
        self.drafts = self._commits.drafts
        self._eos = eos_token_ids
        self._ageing_s = ageing_s
        self._compactor = Compactor() if compacts else None
        self._unstreaming = Unstreaming()
        self._arrivals = 0

    @property
    def drafter(self) -> Drafter | None:
        return self._commits.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        self._commits.drafter = drafter

    # Figures

    @property
    def num_running(self) -> int:
        return len(self.state.running)

    @property
    def num_waiting(self) -> int:
        return sum(tenant.waiting for tenant in self.tenants)

    @property
    def num_loading(self) -> int:
        """Returns how many loads from offload stores are under way."""
        return len(self.state.loading)

    @property
    def preemptions(self) -> int:
        return sum(tenant.preemptions for tenant in self.tenants)

    @property
    def prefix_queried_tokens(self) -> int:
        return sum(tenant.prefix_queried_tokens for tenant in self.tenants)

    @property
    def prefix_hit_tokens(self) -> int:
        return sum(tenant.prefix_hit_tokens for tenant in self.tenants)

    def has_work(self) -> bool:
        state = self.state
        return bool(state.running or self.num_waiting or state.batch.flights or len(state.loading))

    @property
    def plans_ahead(self) -> bool:
        """Returns whether the next step should be planned while one is in flight.

        Not if the last plan has put something off until none is. Not while blocks stream, which the link to them
        bounds, or drafts may pay, which need the token before them: neither could begin or end.
        """
        if self.state.put_off or self.memory.streamed.active:
            return False
        return self.drafter is None or not self.drafter.may_draft(max(1, self.num_running))

    def going_on(self) -> list[bool]:
        """Returns, by row of the oldest step in flight, whether its sequence has not ended since it was planned."""
        return [entry.sequence.status is Status.RUNNING for entry in self.state.batch.flights[0].entries]

    # Limits

    def set_tenant(self, name: str, tenant_limits: TenantLimits) -> None:
        """Makes a tenant known, or changes its limits, as `set_tenants` does."""
        self.set_tenants({name: tenant_limits})

    def set_tenants(self, changed: Mapping[str, TenantLimits]) -> None:
        """Makes tenants known, or changes their limits, all at once.

        Raises ConfigError, and changes nothing, for what cannot be kept, of the pool or of the requests that have been
        accepted. O(tenants).
        """
        limits.set_tenants(self.state, changed)

    def longest_sequence(self, max_model_len: int) -> int:
        """Returns how many tokens a sequence that begins like no pin can have, at most `max_model_len`."""
        return limits.longest_sequence(self.state, max_model_len)

    @property
    def least_frames(self) -> int:
        """Returns the smallest pool that holds what is running now and keeps what was accepted and guaranteed."""
        return limits.least_frames(self.state)

    def check_size(self, num_frames: int) -> None:
        """Raises KVMemoryError if with so many frames a request could not run to its end, or a guarantee be kept."""
        limits.check_size(self.state, num_frames)

    # Requests

    def request_ids(self) -> list[str]:
        """Returns all requests that have not finished."""
        return list(self.state.requests)

    def sequences(self) -> list[Sequence]:
        """Returns all sequences that have not finished, request by request."""
        return [one for siblings in self.state.requests.values() for one in siblings]

    def arriving(self) -> list[int]:
        """Returns the blocks that are being loaded from offload stores."""
        return self.state.loading.arriving()

    def add(self, request: Request, fork_of: tuple[str, int] | None = None) -> None:
        """Queues a request. Raises as `limits.accept` does.

        fork_of: a sequence `(request_id, index)` whose tokens the prompt is. If that is running, so is the new one at
        once, and shares all its blocks; else the prompt is like any other.
        """
        state = self.state
        precedence = Precedence(request.arrival_s + request.priority * self._ageing_s, self._arrivals, 0)
        sequence = Sequence(request, 0, precedence, [*request.prompt_token_ids, *request.answered])
        limits.accept(state, sequence)
        self._arrivals += 1
        if request.beam is not None:
            sequence.group = BeamGroup(sequence, self._eos)
        state.requests[request.request_id] = [sequence]
        if fork_of is not None and forks.into(state, sequence, fork_of[1], state.requests.get(fork_of[0], [])):
            state.start(sequence)
        else:
            state.wait(sequence)

    def note_served_elsewhere(self, tokens: Mapping[str, int]) -> None:
        """Counts tokens that other engines have computed, by tenant; tenants that are not known here are ignored."""
        if not tokens:
            return
        known = {tenant.account.name: tenant for tenant in self.state.tenants}
        for name, count in tokens.items():
            if name in known:
                self.state.waiting.note_elsewhere(known[name], count)

    def abort(self, request_id: str, now: float) -> None:
        """Ends all sequences of a request. Unknown ids are ignored."""
        for sequence in list(self.state.requests.get(request_id, [])):
            self.state.finish(sequence, now)

    def finish(self, request_id: str, index: int, now: float) -> None:
        """Ends one sequence whose stop the front end has seen, or the search that it is a beam of.

        Unknown ones are ignored.
        """
        for sequence in self.state.requests.get(request_id, []):
            if sequence.group is not None:
                return self.abort(request_id, now)
            if sequence.index == index:
                self._commits.note_answer(sequence, cut=False)
                self.state.finish(sequence, now)
                return

    # Faults

    def lose(self, frames: Set[int], error: Exception, now: float) -> list[SequenceUpdate]:
        """Ends the pins and running sequences that need these frames, since they do not hold what they should.

        Loads that go on behind them bring nothing, and nobody finds what lay there any more. To be called before the
        step that has found it is committed.
        """
        self.memory.forget_lost(frames)
        self.pins.lose(frames, now)
        self.state.loading.lose(frames)
        losers = [one for one in self.state.running if one.table and self.memory.lies_in(one.table, frames)]
        return [update for one in losers for update in self._commits.fail(one, error, now)]

    def lose_plan(self, plan: StepPlan, error: Exception, now: float) -> list[SequenceUpdate]:
        """Commits as failed the oldest plan in flight, which the device has not carried out, or nobody knows how far.

        Those behind it, if any, are lost too, or were never applied. Ends the sequences of its rows, those whose tokens
        or tables it changes, and what `lose` ends with the frames that it copies to. What it does not name goes on.
        """
        updates = self.lose(set(plan.work.copy_target.tolist()), error, now)
        updates += self.commit(StepResult.failure(plan, error), now, plan.step)
        changed = {*plan.work.edit_row.tolist(), *(chosen.row for chosen in plan.chosen_tokens)}
        losers = [one for one in self.state.running if one.row in changed]
        return updates + [update for one in losers for update in self._commits.fail(one, error, now)]

    def lose_all(self, error: Exception, now: float) -> None:
        """Loses all plans in flight, as `lose_plan` does, the oldest first."""
        while self.state.batch.flights:
            self.lose_plan(self.state.batch.flights[0].plan, error, now)

    def give_up(self, error: Exception, now: float) -> list[SequenceUpdate]:
        """Ends the request whose turn it is, behind which others may wait; all, if it is nobody's.

        To be called where nothing can run, and nothing is under way that would change that.
        """
        waiting = self.state.waiting
        turns = waiting.turns()
        ending = [first] if turns and (first := waiting.first(turns[0])) else self.sequences()
        return [update for one in ending for update in self._commits.fail(one, error, now)]

    # Sizes

    def resize(self, num_frames: int, now: float) -> StepPlan:
        """Gives the pool another number of frames. Returns a plan without rows, to be carried out before frames go.

        The last sequences in precedence, of borrowers first, are preempted while what is held does not fit. No step may
        be in flight, no load under way. Raises as `check_size` does, and changes nothing.
        """
        self._resize(num_frames, now)
        return self.state.batch.plan({})

    def undo_resize(self, plan: StepPlan, num_frames: int, error: Exception, now: float) -> list[SequenceUpdate]:
        """Undoes a `resize` whose plan the device has not carried out, as `lose_plan` does.

        The pool has as many frames as it had before, for which nothing need be moved.
        """
        updates = self.lose_plan(plan, error, now)
        self._resize(num_frames, now)
        return updates

    def _resize(self, num_frames: int, now: float) -> None:
        running = self.state.running
        self.check_size(num_frames)
        while self.memory.resize(num_frames) is not None:
            preemption.preempt(self.state, preemption.borrower(running) or running[-1], now)
        self.state.look_again()
        self.tenants.resized()

    # Steps

    def schedule(self, now: float, coasting: int = 0) -> StepPlan | None:
        """Returns the next step, or None if nothing can run before a step in flight is committed.

        A step without rows has frames to copy, before a load may use those that have come free.
        coasting: in simulations, running sequences that take a token's place in the step and are not planned.
        """
        self.expire(now)
        state, draft = self.state, StepDraft(self.max_num_batched_tokens - coasting)
        state.put_off = False
        generating: Wanted = []
        prompts: Wanted = []
        for sequence in state.running:
            if not sequence.open_ended and (remaining := sequence.remaining):
                (generating if sequence.generates else prompts).append((remaining, sequence))
        self._continue(generating, draft, now)
        if draft.planned or coasting:
            self._pace(draft, coasting)
            draft.budget = min(draft.budget, self.controller.prompt_tokens)
            draft.scored = SCORED_BESIDE
            draft.paced = self.tenants.paced(draft.planned, self.max_num_batched_tokens)
        self._continue(prompts, draft, now)
        admission.admit(state, draft, now)
        if not (draft.planned or coasting or (self.memory.has_copies and not state.batch.flights)):
            return None
        ahead = bool(state.batch.flights)
        moved = 0 if ahead else self._unstreaming.step(state)
        if self._compactor is not None and ahead:
            state.put_off = self._compactor.wait() or state.put_off
        elif self._compactor is not None and not moved:
            self._compactor.step(state)
        self.tenants.serve(draft.planned)
        if self.drafter is not None:
            speculation.add_drafts(state, draft, self.drafter, now)
        return state.batch.plan(draft.planned, draft.drafts, draft.catch_up)

    def expire(self, now: float) -> float:
        """Ends pins and cached blocks whose time is over, as `schedule` does too.

        Returns when there are more (inf: never).
        """
        return min(self.pins.expire(now), self.memory.end_idle(now))

    def take_loads(self) -> list[Load]:
        """Returns loads that have been begun since the last call; each ends with `finish_load`."""
        return self.state.loading.take_begun()

    def finish_load(self, load: int, arrived: list[bool], now: float) -> None:
        """Ends a load: `arrived` says which of its blocks are in their frames. Who waited for it goes on."""
        state = self.state
        blocks = state.loading.finish(load, arrived, now)
        state.resume(state.pending.computed(load, blocks) + state.pending.drop(load))

    def note_step(self, plan: StepPlan, seconds: float, coasting: int = 0) -> None:
        """Tells controller and drafter how long a step took that has been committed: since its beginning or, if that
        was while another was in flight, since the commit of that one. coasting: as it was scheduled."""
        self._commits.note_step(plan, seconds)
        if not self._adapts:
            return
        generating = plan.num_generating
        prompt_tokens = plan.num_tokens - generating
        if self.pacer is not None:
            self.pacer.note_step(seconds, prompt_tokens, generating + coasting)
        else:
            self.controller.note_step(seconds, prompt_tokens, generating + coasting, self.num_running)
        self.controller.note_memory(self.preemptions, self.memory.num_frames)

    def _pace(self, draft: StepDraft, coasting: int) -> None:
        """Sets how many prompt tokens a step takes beside the generating sequences that it has."""
        if self.pacer is None:
            return
        running, memory = len(self.state.running), self.memory
        batch = running
        if not self.state.crowded:
            fitting = running * memory.num_frames // max(1, memory.num_frames - memory.num_available)
            batch = min(running + self.num_waiting, self.controller.max_running, fitting)
        self.controller.prompt_tokens = self.pacer.prompt_tokens(sum(draft.planned.values()) + coasting, batch)

    def _continue(self, wanted: Wanted, draft: StepDraft, now: float) -> None:
        """Plans running sequences, each with the tokens it has left to compute, as far as the budget goes.

        Where blocks run out, a running sequence is preempted, which may be the one that asks. Not while a step is in
        flight, though: blocks given back under it come free only when it retires, so whoever lacks one sits this step
        out, and the next is not planned ahead.
        """
        reserve, flights = self.memory.reserve, self.state.batch.flights
        for remaining, sequence in wanted:
            most, table = draft.most(sequence), sequence.table
            count = remaining if remaining < most else most
            if count == 0 or table is None:
                continue
            up_to = sequence.scheduled + count
            while up_to > table.writable and (shortage := reserve(table, up_to)) is not None:
                if flights:
                    self.state.put_off = True
                    break
                preemption.make_room(self.state, sequence, shortage, draft, now)
                if sequence.table is None:
                    break
            else:
                draft.add(sequence, count)

    def commit(self, result: StepResult, now: float, step: int | None = None) -> list[SequenceUpdate]:
        """Takes in the oldest step in flight: publishes its blocks, appends its tokens, ends what has ended.

        step: the number of the plan whose result it is; None where only one can be in flight. Raises EngineDeadError,
        and changes nothing, if another is due.
        """
        return self._commits.take_in(result, now, step)
