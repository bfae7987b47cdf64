"""SchedulerState: the one owner of what runs and what waits; policies are functions over it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

from pagemill.memory.digest import extend_chain
from pagemill.memory.manager import MemoryManager
from pagemill.memory.pins import Pins
from pagemill.scheduling import branches
from pagemill.scheduling.batch import Batch
from pagemill.scheduling.controller import Controller
from pagemill.scheduling.forecast import TenantLengths
from pagemill.scheduling.loading import Loading, Stored
from pagemill.scheduling.sequence import Sequence, Status, by_precedence
from pagemill.scheduling.tenancy import Tenancy, TenantState
from pagemill.scheduling.waiting import PendingPrefixes, WaitingQueue


class Refused(NamedTuple):
    """A sequence that found no room; the step from which on to look again, and the blocks that its tenant could have
    had, of the pool or within its quota. More of these are worth an earlier look, or that it is guaranteed them now."""

    sequence: Sequence
    again: int
    room: int
    of_quota: bool
    guaranteed: bool


class Shared(NamedTuple):
    """How many of a waiting sequence's blocks were active, and the step from which on to count again."""

    sequence: Sequence
    again: int
    blocks: int


@dataclass(eq=False, repr=False)
class SchedulerState:
    """Invariants: a running sequence has a table and a row, and no other has; `running` is in its order; rows in
    use, those of branches among them, and free rows add up to `max_num_seqs`; a request is in `requests` until its last
    sequence has finished.

    running:  sequences with a row, by precedence.
    requests: all sequences that have not finished, by request.
    waiting:  sequences whose turn has not come. Others wait in `pending` for a block that somebody computes or loads.
    loading:  loads from offload stores.
    chunk:    the most tokens of a step.
    swap_blocks: how many blocks of preempted sequences host memory has room for, to come back from there.
    lengths:  how long answers became, by which admission foresees what running sequences will hold; None: it does not.
    crowded:  whether the last sequence that could have begun found no room.
    refused:  by tenant, the last sequence that found no room, or for which none was foreseen; none once another has
              stopped. shared: by tenant, what its first waiting sequence has in common with others, until then too.
    put_off:  whether the last plan put something off until no step is in flight: blocks are to be moved or taken away.
    settle:   called before the lengths of all running sequences are read: in simulations some may lag behind.
    """

    memory: MemoryManager
    pins: Pins
    batch: Batch
    controller: Controller
    chunk: int
    max_num_seqs: int
    caches_prefixes: bool
    stored: InitVar[Stored | None]
    running: list[Sequence] = field(default_factory=list)
    requests: dict[str, list[Sequence]] = field(default_factory=dict)
    pending: PendingPrefixes = field(default_factory=PendingPrefixes)
    recomputed_tokens: int = 0
    swap_blocks: int = 0
    lengths: TenantLengths | None = None
    crowded: bool = False
    refused: dict[TenantState, Refused] = field(default_factory=dict)
    shared: dict[TenantState, Shared] = field(default_factory=dict)
    put_off: bool = False
    settle: Callable[[], None] = lambda: None

    @property
    def foresees(self) -> bool:
        """Returns whether a sequence begins only if room for what it grows by is foreseen.

        Not where host memory takes as much as the pool holds: a preempted sequence comes back from there for less than
        rows cost that stay idle. Nor where contexts stream, which need no more of the pool.
        """
        memory = self.memory
        return self.lengths is not None and not memory.streamed.count and self.swap_blocks < memory.num_frames

    def __post_init__(self, stored: Stored | None) -> None:
        self.tenants = Tenancy(self.memory, self.pins, self.max_num_seqs)
        self.waiting = WaitingQueue(self.chunk)
        self.loading = Loading(self.memory, self.chunk, stored)

    # Sequences come, run and end

    def wait(self, sequence: Sequence) -> None:
        """Lets a sequence wait for its turn."""
        tenant = self.tenants[sequence.request.tenant]
        tenant.waiting += 1
        tenant.late += sequence.is_late
        tenant.fresh += 1
        self.waiting.push(sequence, tenant)

    def resume(self, sequences: list[Sequence]) -> None:
        """Lets sequences wait for their turn again, since what they waited for was computed, or will not be."""
        for sequence in sequences:
            self.waiting.push(sequence, self.tenants[sequence.request.tenant])

    def seat(self, sequence: Sequence, rows: int) -> None:
        """Gives a sequence that begins so many rows. Sequences that would fork off it, and have none, wait alone."""
        self.batch.seat(sequence, rows)
        for index in range(rows, sequence.most_rows):
            late = sequence.behind(index)
            self.requests[sequence.request.request_id].append(late)
            self.wait(late)
        sequence.forks = min(sequence.forks, rows - 1)

    def start(self, sequence: Sequence) -> None:
        """Makes a sequence that has its table and its rows a running one."""
        sequence.status = Status.RUNNING
        self.memory.wanted.release(sequence)
        tenant = self.tenants[sequence.request.tenant]
        tenant.running += 1
        tenant.rows += 1 + len(sequence.child_rows)
        insort(self.running, sequence, key=by_precedence)

    def stop(self, sequence: Sequence, now: float) -> None:
        """Takes a running sequence's row, blocks and claims away."""
        assert sequence.table is not None
        branches.end(self.memory, self.batch, sequence, None, now)
        sequence.residency = self.memory.residency(sequence.table)
        self.memory.close(sequence.table, now)
        self.look_again()
        self.resume(self.pending.drop(sequence))
        self.running.remove(sequence)
        tenant = self.tenants[sequence.request.tenant]
        tenant.running -= 1
        tenant.rows -= self.batch.unseat(sequence)
        sequence.table = sequence.drafting = None

    def look_again(self) -> None:
        """Forgets what waiting sequences have found, since blocks have come free."""
        self.refused.clear()
        self.shared.clear()

    def finish(self, sequence: Sequence, now: float) -> None:
        """Ends a sequence, and with its last one the request."""
        waited, sequence.status = sequence.status is Status.WAITING, Status.FINISHED
        if waited:
            tenant = self.tenants[sequence.request.tenant]
            tenant.waiting -= 1
            tenant.late -= sequence.is_late
            self.memory.wanted.release(sequence)
            if not self.pending.leave(sequence):
                self.waiting.note_finished(tenant)
        else:
            self.stop(sequence, now)
        siblings = self.requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            self.pins.drop(sequence.request.request_id)
            del self.requests[sequence.request.request_id]

    # Names of blocks

    def shares_prefixes(self, sequence: Sequence) -> bool:
        """Returns whether its blocks are published, and looked up."""
        request = sequence.request
        needs_all = request.pooling is not None and request.pooling.reads_all_tokens
        return self.caches_prefixes and request.params.prompt_logprobs is None and not needs_all

    def name_blocks(self, sequence: Sequence) -> None:
        """Computes digests for its full blocks that have none yet, if it shares them."""
        size = self.memory.block_size
        if len(sequence.tokens) // size > len(sequence.digests) and self.shares_prefixes(sequence):
            extend_chain(sequence.digests, sequence.request.root, sequence.tokens, size)

    def pinned_entries(self, sequence: Sequence) -> int:
        """Returns how many leading entries of its prompt are pinned, or will be, in every layer group.

        It finds them whenever it begins, and never writes them.
        """
        self.name_blocks(sequence)
        size = self.memory.block_size
        return self.pins.leading(sequence.request.tenant, sequence.digests[: (sequence.prompt_len - 1) // size])


class StepDraft:
    """A step while it is planned: how many tokens of which sequence run, and how many more may.

    scored: how many more tokens of prompts may run of which log probabilities are asked for.
    drafts: those that are verified behind a sequence's last token, counted in `planned`; not those of branches.
    catch_up: the most tokens that a draft model takes in of those that it has not yet.
    paced: how many more tokens of prompts of some tenants may run.
    """

    def __init__(self, budget: int) -> None:
        self.planned: dict[Sequence, int] = {}
        self.drafts: dict[Sequence, list[int]] = {}
        self.budget = budget
        self.scored = budget
        self.catch_up = 0
        self.paced: dict[str, int] = {}

    def most(self, sequence: Sequence) -> int:
        """Returns how many tokens of a sequence may still run."""
        request, most = sequence.request, self.budget
        if request.params.prompt_logprobs is not None:
            most = min(most, self.scored)
        return min(most, self.paced[request.tenant]) if request.tenant in self.paced else most

    def add(self, sequence: Sequence, count: int) -> None:
        """Plans tokens of a sequence."""
        self.planned[sequence] = count
        self.budget -= count
        request = sequence.request
        if request.params.prompt_logprobs is not None:
            self.scored = max(0, self.scored - count)
        if request.tenant in self.paced:
            self.paced[request.tenant] = max(0, self.paced[request.tenant] - count)

    def add_drafts(self, sequence: Sequence, tokens: list[int]) -> None:
        """Plans drafts behind the one token that is planned of a sequence."""
        self.drafts[sequence] = tokens
        self.planned[sequence] += len(tokens)
        self.budget -= len(tokens)

    def drop(self, sequence: Sequence) -> None:
        """Takes out a sequence that does not run after all, if it is in."""
        self.budget += self.planned.pop(sequence, 0)
