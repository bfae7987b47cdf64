"""Admission: which waiting sequences begin to run, and what they wait for until then."""

from __future__ import annotations

from collections.abc import Callable, Set

from pagemill.memory.block_table import BlockTable
from pagemill.memory.digest import extend_chain
from pagemill.memory.manager import MemoryManager
from pagemill.memory.pins import Pins
from pagemill.memory.work import Load
from pagemill.scheduling.batch import Batch
from pagemill.scheduling.controller import Controller
from pagemill.scheduling.loading import Loading, Stored
from pagemill.scheduling.pending import PendingPrefixes
from pagemill.scheduling.sequence import Sequence
from pagemill.scheduling.tenancy import Lack, Tenancy, TenantLoad, borrower
from pagemill.scheduling.waiting import WaitingQueue


class Admission:
    """The sequences that wait: for their turn, for a prefix that somebody computes, or for one that is being loaded.

    running: the scheduler's, by rank. chunk: the most tokens of a step.
    """

    def __init__(
        self,
        memory: MemoryManager,
        batch: Batch,
        tenants: Tenancy,
        pins: Pins,
        running: list[Sequence],
        controller: Controller,
        *,
        chunk: int,
        enable_prefix_caching: bool,
        stored: Stored | None,
    ) -> None:
        self.pending = PendingPrefixes()
        self._memory = memory
        self._batch = batch
        self._tenants = tenants
        self._pins = pins
        self._running = running
        self._controller = controller
        self._chunk = chunk
        self._caching = enable_prefix_caching
        self._waiting = WaitingQueue(chunk)
        self._loading = Loading(memory, chunk, stored)
        self.recomputed_tokens = 0
        """Tokens that preempted sequences compute once more."""

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def swapped_in_tokens(self) -> int:
        """Tokens that came back from lower tiers for preempted sequences."""
        return self._loading.swapped_in_tokens

    def wait(self, sequence: Sequence) -> None:
        """A sequence waits for its turn."""
        load = self._tenants[sequence.request.tenant]
        load.waiting += 1
        load.fresh += 1
        self._waiting.push(sequence, load)

    def first(self) -> Sequence | None:
        """Whose turn it is."""
        turn = self._waiting.first(())
        return None if turn is None else turn[0]

    def resume(self, sequences: list[Sequence]) -> None:
        """What these waited for has been computed, or will not be: they wait for their turn again."""
        for sequence in sequences:
            self._waiting.push(sequence, self._tenants[sequence.request.tenant])

    def admit(
        self,
        budget: int,
        now: float,
        run: Callable[[Sequence, int], int],
        preempt: Callable[[Sequence], int],
    ) -> None:
        """Lets waiting sequences in while there is budget, a row and memory for the whole prompt.

        A tenant is passed over once its next sequence can not run. If that lacks what all compete for, only those pass
        it that ask for what is guaranteed to them, and for these, sequences of borrowers are preempted.

        run: takes an opened sequence and the budget, and returns how many of its tokens run; preempt: gives back how
        many tokens of the step's budget a preempted one had.
        """
        passed: set[TenantLoad] = set()
        crowded = False
        while budget > 0 and (turn := self._waiting.first(passed)) is not None:
            sequence, load = turn
            rows = sequence.num_rows
            right = self._has_right(sequence, load)
            if not load.may_run(rows):
                self._waiting.level(load)
                passed.add(load)
                continue
            if (crowded or len(self._running) >= self._controller.max_running) and not right:
                passed.add(load)
                continue
            if self._batch.num_free >= rows and self._comes_from_elsewhere(sequence, now):
                self._waiting.pop(load)
                continue
            while (lack := self._open(sequence, load, right, budget, now)) is Lack.POOL:
                if self._stream_largest():
                    continue
                loser = None if self._batch.flights or not right else borrower(self._running, load.account)
                if loser is None:
                    break
                passed.add(self._tenants[loser.request.tenant])
                budget += preempt(loser)
            if lack is not None:
                if lack is Lack.QUOTA:
                    self._waiting.level(load)
                crowded = crowded or lack is Lack.POOL
                passed.add(load)
                continue
            self._waiting.pop(load)
            load.waiting -= 1
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
            budget -= run(sequence, budget)
        for load in self._tenants:
            load.fresh = 0

    def _comes_from_elsewhere(self, sequence: Sequence, now: float) -> bool:
        """Whether a running sequence is computing the very next block that this one needs, or a load brings it up; then
        it waits for it. Begins such a load."""
        if not self.shares_prefixes(sequence):
            return False
        self.name_blocks(sequence)
        found = self._memory.peek(sequence.digests, sequence.request.root)
        if found == len(sequence.digests):
            return False
        load = None
        if not self.pending.owned(sequence.digests[found]):
            need, streams = self._wanted(sequence)
            load = self._loading.begin(sequence, found, self._headroom, need if streams else None, now)
        if load is not None:
            self.pending.add(load.id, load.digests, found)
        return self.pending.wait(sequence.digests[found], sequence)

    @property
    def _headroom(self) -> int:
        """Blocks left for running sequences to grow when another begins."""
        running = len(self._running)
        return running + self._controller.watermark if running else 0

    def take_loads(self) -> list[Load]:
        """Loads that have been begun since the last call; each ends with `finish_load`."""
        return self._loading.take_begun()

    def finish_load(self, load: int, arrived: list[bool], now: float) -> None:
        """A load is over: `arrived` says which of its blocks are in their frames. Who waited for it goes on."""
        blocks = self._loading.finish(load, arrived, now)
        self.resume(self.pending.computed(load, blocks) + self.pending.drop(load))

    def lose(self, frames: Set[int]) -> None:
        """These frames do not hold what they should: a load that needs it brings nothing."""
        self._loading.lose(frames)

    def _open(self, sequence: Sequence, load: TenantLoad, right: bool, budget: int, now: float) -> Lack | None:
        """Opens a waiting sequence's table and reserves its first chunk, or holds nothing and says what is lacking.

        There must be room for the whole sequence as it is and for one more block of each running one (of its own
        tenant, where all of it is guaranteed, or within the tenant's quota), and above the controller's watermark:
        else it would soon be preempted again. One that can never have so much room streams the rest.
        """
        if self._batch.num_free < sequence.num_rows:
            return Lack.POOL
        share = self.shares_prefixes(sequence)
        self.name_blocks(sequence)
        tokens = sequence.tokens
        opened = self._memory.open(
            tokens,
            sequence.digests if share else [],
            sequence.request.root,
            now,
            len(tokens) - 1 if share else 0,
            sequence.request.tenant,
        )
        found = opened.num_cached_tokens
        chunk = min(len(tokens) - found, budget)
        need, streams = self._wanted(sequence, found)
        held = self._memory.places(opened.table)
        below = self._memory.needs.held(len(tokens), self._chunk, found) - need - held.streamed if streams else 0
        need -= held.resident if streams else opened.table.num_held
        if sequence.group is not None:
            need += sequence.group.blocks_to_unpark(self._memory.block_size) * len(self._memory.windows)
        room = self._memory.available(load.account) - (load.running if right else self._headroom)
        within = load.within_quota(need)
        need += max(0, below - self._memory.lower.available)  # pins may lie there
        fits = need <= room and load.within_quota(need)
        if not fits or not self._reserve(opened.table, found + chunk, streams):
            self._memory.close(opened.table, now)
            return Lack.POOL if within else Lack.QUOTA
        sequence.table = opened.table
        computed, sequence.scheduled = sequence.scheduled, found
        if sequence.was_preempted:
            self.recomputed_tokens += max(0, min(computed, len(tokens)) - found)
        else:
            sequence.num_cached_tokens = found
        if share:
            self.pending.add(sequence, sequence.digests, found // self._memory.block_size)
            load.prefix_queried_tokens += len(tokens)
            load.prefix_hit_tokens += found
        return None

    def _wanted(self, sequence: Sequence, found: int = 0) -> tuple[int, bool]:
        """Frames of the pool that a sequence is given before it begins behind the first `found` tokens, and whether
        what else it holds must stream."""
        tokens, memory = len(sequence.tokens), self._memory
        whole = memory.needs.held(tokens, self._chunk, found)
        if not memory.lower.count:
            return whole, False
        pinned = self.pinned(sequence)
        if self._tenants.fits(sequence.request, whole, memory.needs.pinned(tokens, self._chunk, pinned, found)):
            return whole, False
        return memory.needs.frames(tokens, self._chunk, pinned, found), True

    def _has_right(self, sequence: Sequence, load: TenantLoad) -> bool:
        """Whether its tenant is guaranteed all blocks that a sequence wants, beside those that are active already."""
        if not load.account.guaranteed_blocks:
            return False
        self.name_blocks(sequence)
        shared = self._memory.count_active(sequence.digests, sequence.request.root)
        return load.has_right_to(self._wanted(sequence)[0] - shared)

    def pinned(self, sequence: Sequence) -> int:
        """How many leading blocks of its prompt, in every layer group, are pinned, or will be: it finds them whenever
        it begins, and never writes them."""
        self.name_blocks(sequence)
        size = self._memory.block_size
        return self._pins.leading(sequence.request.tenant, sequence.digests[: (sequence.prompt_len - 1) // size])

    def _stream_largest(self) -> bool:
        """Leaves a running sequence that has more than half of the pool just that, if there is one."""
        half = self._memory.num_frames // 2
        for one in self._running if self._memory.lower.count else ():
            if one.table is not None and (excess := self._memory.places(one.table).resident - half) > 0:
                return self._memory.stream(one.table, excess)
        return False

    def _reserve(self, table: BlockTable, up_to: int, streams: bool) -> bool:
        shortage = self._memory.reserve(table, up_to)
        if shortage is None or not streams or not self._memory.stream(table, shortage.missing):
            return shortage is None
        return self._memory.reserve(table, up_to) is None

    def shares_prefixes(self, sequence: Sequence) -> bool:
        """Whether its blocks are published, and looked up."""
        return self._caching and sequence.request.params.prompt_logprobs is None

    def name_blocks(self, sequence: Sequence) -> None:
        """Digests for its full blocks that have none yet, if it shares them."""
        size = self._memory.block_size
        if len(sequence.tokens) // size > len(sequence.digests) and self.shares_prefixes(sequence):
            extend_chain(sequence.digests, sequence.request.root, sequence.tokens, size)
