"""A simulated device, and what a memory manager over it must hold.

The device is as dumb as a real one: frames of slots, and tables by row, changed only by the work that `drain` describes
and by what a step writes through the tables. A slot's content is everything that its K and V depend on: namespace and
all tokens up to its position. So "what a table reads is what was computed for these tokens" is compared, not assumed.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from pagemill.memory.block_table import BlockTable, first_entry_in_window
from pagemill.memory.digest import extend_chain, root_digest
from pagemill.memory.eviction import cheapest_to_recompute, least_frequently_used, least_recently_used
from pagemill.memory.manager import MemoryManager
from pagemill.memory.pins import Pins
from pagemill.memory.tenants import Quota
from pagemill.namespace import Namespace

TENANT_OF = {root_digest(b"model", "float32", "reference", str(Namespace(name))): name for name in ("default", "other")}
ROOTS = list(TENANT_OF)
TOKENS = st.integers(0, 2)
LONGEST = 40
LOWER = 64
"""The first lower frame; the pool never has so many."""


@dataclass(eq=False)
class Sequence:
    root: bytes
    tokens: list[int]
    table: BlockTable
    digests: list[bytes] = field(default_factory=list)
    scheduled: int = 0  # tokens written, or being written by a step in flight
    row: int = -1

    def content(self, position: int):
        return (self.root, *self.tokens[: position + 1])


@dataclass
class Step:
    number: int
    commits: list[tuple[Sequence, int]]
    reads: list[tuple[Sequence, int, int, object]]  # sequence, frame, offset, content


class Device:
    def __init__(self, frames: int, block_size: int, groups: int) -> None:
        self.slots = [["garbage"] * block_size for _ in range(frames)]
        self.writer = [[None] * block_size for _ in range(frames)]
        self.tables: dict[tuple[int, int], dict[int, int]] = {}

    def apply(self, work) -> None:
        for source, target in zip(work.copy_source.tolist(), work.copy_target.tolist(), strict=True):
            self.slots[target] = list(self.slots[source])
            self.writer[target] = [None] * len(self.slots[source])
        columns = (work.edit_row, work.edit_group, work.edit_index, work.edit_frame)
        edits = list(zip(*(column.tolist() for column in columns), strict=True))
        assert len({edit[:3] for edit in edits}) == len(edits), "an entry is edited twice"
        for row, group, index, frame in edits:
            self.tables.setdefault((row, group), {})[index] = frame


def apart_in(memory: MemoryManager, table: BlockTable) -> int:
    """Returns how many steps from one of its blocks to the next do not lead to the neighbouring frame."""
    rows = [[memory.core.blocks.frame[b] for b in held if b >= 0] for held in table.blocks]
    return sum(there != here + 1 for row in rows for here, there in pairwise(row))


class MemoryModel(RuleBasedStateMachine):
    """Holds a memory manager beside what its tables must read, and what every operation needs of both."""

    @initialize(
        frames=st.integers(4, 48),
        block_size=st.sampled_from([2, 4]),
        windows=st.sampled_from([[None], [None], [3], [None, 5], [7, None], [1, 6], [None, None], [2, None, 9]]),
        caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from([least_recently_used, least_frequently_used, cheapest_to_recompute(0.5)]),
        depth=st.integers(1, 2),
        saves=st.booleans(),
        quotas=st.booleans(),
        lower=st.sampled_from([0, 3, 20]),
        payback_steps=st.sampled_from([0.1, 1, 5]),
        piece=st.sampled_from([2, 3, 32]),
    )
    def start(
        self, frames, block_size, windows, caching, policy, depth, saves, quotas, lower, payback_steps, piece
    ) -> None:
        self.size, self.windows, self.caching, self.depth = block_size, windows, caching, depth
        self.memory = MemoryManager(frames, block_size, windows, caching, policy, saves, (LOWER, lower))
        self.device = Device(LOWER + lower, block_size, len(windows))
        self.compaction = self.memory.compaction
        self.compaction.payback_steps, self.compaction.segment = payback_steps, piece
        self.quotas = quotas
        self.memory.set_quotas({"other": Quota(0, frames)})
        self.lowered = set()  # tenants whose quota may be below what they hold
        self.sequences: list[Sequence] = []
        self.past: list[tuple[bytes, list[int]]] = []
        self.flying: list[Step] = []
        self.pins = Pins(self.memory, 0.5)
        self.pinned: dict[tuple[Namespace, str], tuple[bytes, list[int]]] = {}  # root and tokens
        self.lower: dict[tuple[bytes, int], list] = {}  # a lower tier: slots by digest and group
        self.readers = {}
        self.contents = {}
        self.step_number = 0
        self.time = 0.0

    def findable(self) -> list[set]:
        """By group, contents of the last slot of each published block, read from the device."""
        memory = self.memory
        return [
            {self.device.slots[memory.core.blocks.frame[block]][-1] for block in published.values()}
            for published in memory.core.index.by_digest
        ]

    def out_of_window(self, table, length) -> bool:
        return any(
            first > first_entry_in_window(length, window, self.size)
            for first, window in zip(table.first_held, self.windows, strict=True)
        )

    def drop(self, sequence: Sequence) -> None:
        self.time += 1
        self.memory.close(sequence.table, self.time)
        self.sequences.remove(sequence)
        self.past.append((sequence.root, list(sequence.tokens)))
        for step in self.flying:
            step.commits = [(other, length) for other, length in step.commits if other is not sequence]

    def save(self) -> None:
        for frame, name in self.memory.take_saves():
            slots = list(self.device.slots[frame])
            root, *tokens = slots[-1]
            digests: list[bytes] = []
            extend_chain(digests, root, tokens, self.size)
            assert (digests[-1], len(digests) - 1) == (name.digest, name.depth), "a frame was used before it was saved"
            assert name.parent == (digests[-2] if name.depth else root)
            assert slots == [(root, *tokens[: len(tokens) - i]) for i in range(self.size)][::-1]
            self.lower[name.digest, name.group] = slots

    # A step's parts

    def compare_tables(self) -> None:
        for sequence in self.sequences:
            if sequence.row >= 0:
                for group, entries in enumerate(sequence.table.blocks):
                    frames = [self.memory.core.blocks.frame[block] if block >= 0 else -1 for block in entries]
                    device = self.device.tables[sequence.row, group]
                    told = [device.pop(entry) for entry in range(len(frames))]
                    assert told == frames, "the device's table is not the table"
                    assert all(frame == -1 for frame in device.values()), "the device's table is longer than the table"
                    self.device.tables[sequence.row, group] = dict(enumerate(frames))

    def reserve(self, sequence: Sequence, up_to: int) -> bool:
        before, blocks = self.memory.stats(), copy.deepcopy(sequence.table.blocks)
        tenant = sequence.table.tenant
        charges = {other: (other.charged, other.cached) for other in self.memory.tenants}
        shortage = self.memory.reserve(sequence.table, up_to)
        for other, (charged, cached) in charges.items():
            if other is not tenant:
                kept = max(other.charged, min(charged, other.guaranteed_blocks))
                assert other.charged == kept, "what was kept for one tenant was taken by another"
                assert charged - other.charged == cached - other.cached, "more was taken than was cached"
        assert tenant.charged <= max(tenant.max_blocks, charges[tenant][0]), "over the quota"
        if shortage is None:
            return True
        lent = sum(
            min(cached, max(0, charged - other.guaranteed_blocks))
            for other, (charged, cached) in charges.items()
            if other is not tenant
        )
        charged, cached = charges[tenant]
        available = min(before.frames_free + lent + cached, max(0, tenant.max_blocks - charged + cached))
        assert shortage.needed > shortage.available == available
        assert self.memory.stats() == before, "a shortage changed something"
        assert sequence.table.blocks == blocks, "a shortage changed the table"
        return False

    def write(self, sequence: Sequence, begin: int, end: int) -> None:
        memory = self.memory
        named = Counter(b for other in self.sequences for entries in other.table.blocks for b in entries)
        for group, entries in enumerate(sequence.table.blocks):
            for position in range(begin, end):
                block = entries[position // self.size]
                frame = self.device.tables[sequence.row, group][position // self.size]
                assert named[block] == 1, "a slot that two tables can read is written"
                assert block not in memory.core.index.by_digest[group].values(), "a published slot is written"
                self.device.slots[frame][position % self.size] = sequence.content(position)
                self.device.writer[frame][position % self.size] = sequence

    def read(self, sequence: Sequence, begin: int, end: int, step: Step) -> None:
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, begin - window + 1)
            for position in range(first, end):
                frame = self.device.tables[sequence.row, group][position // self.size]
                content = self.device.slots[frame][position % self.size]
                assert content == sequence.content(position), f"group {group}, position {position}"
                step.reads.append((sequence, frame, position % self.size, content))

    # What always holds

    @invariant()
    def who_reads_beside_the_steps_can_tell_what_is_whole(self) -> None:
        """A reader that begins now, and ends at any later time at which it is told the same, has read the block."""
        if not hasattr(self, "memory"):
            return
        for group, published in enumerate(self.memory.core.index.by_digest):
            for digest in published:
                placed = self.memory.find_placed(digest, group)
                if placed is not None:
                    content = self.device.slots[placed.frame][-1]
                    assert self.contents.setdefault(digest, content) == content, "its content is not there"
                    self.readers.setdefault(placed, content)
        for placed in [*self.readers][:-40]:
            del self.readers[placed]
        for placed, content in self.readers.items():
            if content is None or self.device.slots[placed.frame][-1] != content:
                self.readers[placed] = None  # who reads now reads something else
                assert self.memory.find_placed(placed.name.digest, placed.name.group) != placed

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.memory.check()
        stats = self.memory.stats()
        assert stats.frames == stats.frames_free + stats.frames_cached + stats.frames_active
        for tenant in self.memory.tenants:
            if tenant.name not in self.lowered:
                assert tenant.charged <= tenant.max_blocks
        for sequence in self.sequences:
            for group, entries in enumerate(sequence.table.blocks):
                seen = first_entry_in_window(sequence.table.length, self.windows[group], self.size)
                if not self.flying:
                    assert sequence.table.first_held[group] == min(seen, len(entries)), (
                        "out of the window and still held"
                    )

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        while self.sequences:
            self.drop(self.sequences[-1])
        self.pins.clear(self.time)
        assert self.pins.num_frames == 0
        self.memory.retire(self.step_number)
        self.memory.check()
        stats = self.memory.stats()
        assert stats.frames_active == 0, "something is still held"
        # All that is cached can be evicted: a sequence that fills the whole pool gets every frame.
        self.memory.set_quotas({tenant.name: Quota(0, stats.frames) for tenant in self.memory.tenants})
        table, _ = self.memory.open([], [], ROOTS[0], self.time, 0)
        groups = len(self.windows)
        assert self.memory.reserve(table, stats.frames // groups * self.size) is None
        self.memory.close(table, self.time)
        assert self.memory.stats().frames_free >= stats.frames // groups * groups
        assert sum(tenant.charged for tenant in self.memory.tenants) <= stats.frames % groups
        self.memory.check()
