"""Commit: what follows from a step that has run. Blocks are published, tokens appended, sequences end."""

from __future__ import annotations

from pagemill.draft_counts import DraftCounts, Drafted
from pagemill.errors import EngineDeadError, NonFiniteLogitsError
from pagemill.scheduling import branches, forks, speculation
from pagemill.scheduling.batch import Entry
from pagemill.scheduling.branches import Tree
from pagemill.scheduling.sequence import Sequence, SequenceUpdate, Status
from pagemill.scheduling.speculation import Drafter
from pagemill.scheduling.state import SchedulerState
from pagemill.scheduling.step_plan import NO_WORK, StepPlan, StepResult


class Commits:
    """Takes in what steps have brought, the oldest in flight first.

    drafter: is told what becomes of its guesses; None if nobody guesses. drafts: what has come of them.
    """

    def __init__(self, state: SchedulerState, eos_token_ids: frozenset[int], drafter: Drafter | None) -> None:
        self.drafts = DraftCounts()
        self._state = state
        self._memory = state.memory
        self._eos = eos_token_ids
        self.drafter = drafter
        self._draft_work = NO_WORK
        self._accepted = 0

    def take_in(self, result: StepResult, now: float, step: int | None) -> list[SequenceUpdate]:
        """Takes in the oldest step in flight. Returns what to tell of its sequences. Raises as `Scheduler.commit`."""
        state = self._state
        due = state.batch.flights[0].plan.step
        if step not in (None, due):
            raise EngineDeadError(f"step {step} has ended where {due} was due: a bug; please report it, and ask again")
        flight = state.batch.flights.popleft()
        self._memory.retire(due)
        self._draft_work = result.draft_work
        updates: list[SequenceUpdate] = []
        entries, failed, finished = flight.entries, result.failed, Status.FINISHED
        if failed:
            self._distrust(entries, failed)
        for position, entry in enumerate(entries):
            sequence, end = entry.sequence, entry.end
            if failed and position in failed:
                if entry.branch is None:
                    updates += self.fail(sequence, failed[position], now)
            elif sequence.status is not finished and not entry.drafts:  # else it is not known yet which are right
                self._keep(sequence, entry.start, end)
        for position, of_prompt in result.prompt_logprobs.items():
            sequence = entries[position].sequence
            if entries[position].start == 0:
                sequence.prompt_logprobs = [None]
            sequence.prompt_logprobs += of_prompt
        for position, hidden in result.pooled.items():
            entries[position].sequence.pool(hidden, entries[position].start)
        samples = zip(flight.samples, result.tokens, result.logprobs, strict=True)
        for sample, ((position, index), tokens, logprobs) in enumerate(samples):
            entry = entries[position]
            sequence = entry.sequence
            if sequence.status is finished or (failed and position in failed) or not tokens:
                continue
            if sequence.group is not None:
                candidates = None if logprobs is None else logprobs[0]
                results = forks.advance_beams(state, sequence.group, sequence, candidates, now)
                updates += [SequenceUpdate(s, [], None, h.finish_reason, hypothesis=h) for s, h in results]
                continue
            if index == sequence.index:
                sequence.in_flight -= 1
                sequence.open_ended = False
            else:
                sequence = forks.after_prompt(state, entry, index)
            if sequence.request.pin is not None and sequence.table is not None:
                state.pins.keep(sequence.request.request_id, sequence.table, now)
            accepted, reason, stop_reason = sequence.accept(tokens, self._eos)
            drafted: Drafted | None = None
            if entry.drafts:
                tree = branches.tree_of(flight, sample, len(tokens) - 1, result.undrafted)
                if sequence.branches:
                    branches.end(self._memory, state.batch, sequence, entry.branch, now)
                self._keep_accepted(entry, len(accepted))
                if tree is not None:
                    drafted = self._note_drafts(sequence, tree, min(len(tokens) - 1, len(accepted)))
            if reason is not None:
                self.note_answer(sequence, cut=reason == "length")
                state.finish(sequence, now)
            logprobs = None if logprobs is None else logprobs[: len(accepted)]
            update = SequenceUpdate(sequence, accepted, logprobs, reason, stop_reason, drafted)
            if sequence.prompt_logprobs and sequence.num_output_tokens == len(accepted):
                update.prompt_logprobs = sequence.prompt_logprobs
            updates.append(update)
        for position in flight.computed:
            sequence = entries[position].sequence
            if sequence.status is not finished and position not in failed:
                state.finish(sequence, now)
                update = SequenceUpdate(sequence, [], None, "length" if sequence.pooled is None else "stop")
                update.prompt_logprobs = sequence.prompt_logprobs or None
                updates.append(update)
        return updates

    def note_answer(self, sequence: Sequence, cut: bool) -> None:
        """Remembers an answer that has ended, for drafts; and its length, if it could have been another.

        cut: whether its limit has ended it.
        """
        state = self._state
        if self.drafter is not None and self.drafter.answers is not None:
            self.drafter.answers.add(sequence.request.root, sequence.tokens, sequence.prompt_len)
        if state.lengths is not None and not sequence.request.ends_at_limit:
            state.lengths.note(sequence.request.tenant, sequence.num_output_tokens, cut)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Tells the drafter how long the step took that was taken in last, if all its rows generated."""
        if self.drafter is None:
            return
        accepted = self.drafts.num_accepted_tokens - self._accepted
        self._accepted += accepted
        if not plan.num_tokens or plan.num_generating < plan.num_tokens:
            return
        withdrawn = self._draft_work.withdrawn
        drafts = len(plan.draft_tokens) + int(plan.branches.sum()) - withdrawn
        self.drafter.note_step(plan.num_tokens - withdrawn, drafts, accepted, seconds, self._draft_work)

    def _note_drafts(self, sequence: Sequence, tree: Tree, right: int) -> Drafted:
        """Notes what came of a sequence's drafts, of which `right` became tokens of its answer. Returns it."""
        drafted = Drafted(tree.drafts, tree.first, right, tree.branches, tree.gained > 0)
        self.drafts.note(drafted)
        work, gained = self._draft_work, max(0, right - tree.right)
        self._draft_work = work._replace(branched=work.branched + tree.computed, gained=work.gained + gained)
        if self.drafter is not None:
            self.drafter.verified(sequence, tree)
        return drafted

    def fail(self, sequence: Sequence, error: Exception, now: float) -> list[SequenceUpdate]:
        """Ends a sequence that failed; in a search, all beams, and before its prompt has forked, those that would fork
        off. Returns what to tell."""
        state = self._state
        if sequence.status is Status.FINISHED:
            return []
        if sequence.group is not None:
            for beam in sequence.group.beams:
                state.finish(beam, now)
            ended = sequence.group.ended()
        else:
            lost = range(1, sequence.forks + 1) if sequence.child_rows or sequence.forks_after_prompt else ()
            state.finish(sequence, now)
            ended = [sequence, *(sequence.ended(index) for index in lost)]
        return [SequenceUpdate(s, [], None, "error", error=error) for s in ended]

    def _distrust(self, entries: list[Entry], failed: dict[int, Exception]) -> None:
        """Lets nobody find in the pool what only sequences hold whose logits are not finite.

        Others that hold blocks of theirs go on, and are distrusted too if their own logits turn out so.
        """
        failing = [entries[at].sequence for at, why in failed.items() if isinstance(why, NonFiniteLogitsError)]
        ending = {one for each in failing for one in (each.group.beams if each.group else [each])}
        tables = [one.table for one in ending if one.table is not None]
        tables += [branch.table for one in ending for branch in one.branches]
        if tables:
            self._memory.distrust(tables)

    def _keep(self, sequence: Sequence, start: int, end: int) -> None:
        """Commits a sequence's tokens from `start` to `end`, and wakes who waits for a block that they fill."""
        state, size = self._state, self._memory.block_size
        assert sequence.table is not None
        fills = end // size > start // size
        if fills:
            state.name_blocks(sequence)
        self._memory.commit(sequence.table, end, sequence.tokens, sequence.digests)
        if fills:
            state.resume(state.pending.computed(sequence, end // size))

    def _keep_accepted(self, entry: Entry, kept: int) -> None:
        """Commits what a row with drafts has computed and the sequence takes, and gives back what the others had."""
        sequence = entry.sequence
        sequence.scheduled = entry.start + kept
        self._keep(sequence, entry.start, sequence.scheduled)
        speculation.give_back(self._state, sequence, sequence.scheduled)
        self._state.tenants.serve({sequence: kept - 1})  # the first was counted when it was planned
