"""The memory system against a simulated device, under random sequences of operations.

The device is as dumb as a real one: frames of slots, and tables by row, changed only by the work that `drain` describes
and by what a step writes through the tables. A slot's content is everything that its K and V depend on: namespace and
all tokens up to its position. So "what a table reads is what was computed for these tokens" is compared, not assumed.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagemill.errors import ConfigError, PinLimitError
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
    """Of the steps from one of its blocks to the next, those that do not lead to the neighbouring frame."""
    rows = [[memory.core.blocks.frame[b] for b in held if b >= 0] for held in table.blocks]
    return sum(there != here + 1 for row in rows for here, there in pairwise(row))


class MemoryMachine(RuleBasedStateMachine):
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

    # Sequences come and go

    @rule(data=st.data(), root=st.sampled_from(ROOTS), fresh=st.lists(TOKENS, min_size=1, max_size=12))
    def open(self, data, root, fresh) -> None:
        if len(self.sequences) >= 5:
            return
        tokens = fresh
        if self.past and data.draw(st.booleans()):
            root, before = data.draw(st.sampled_from(self.past[-6:]))
            tokens = (before[: data.draw(st.integers(0, len(before)))] + fresh)[:LONGEST]
        self.time += 1
        digests: list[bytes] = []
        if self.caching:
            extend_chain(digests, root, tokens, self.size)
        limit = data.draw(st.sampled_from([len(tokens) - 1, len(tokens) - 1, len(tokens) // 2]))
        findable = self.findable()
        found = self.memory.peek(digests, root)
        table, num_cached = self.memory.open(tokens, digests, root, self.time, limit, TENANT_OF[root])
        assert table.length == num_cached <= limit
        self.verify_match(root, tokens, limit, findable, num_cached, found)
        sequence = Sequence(root, list(tokens), table, digests, scheduled=num_cached)
        self.sequences.append(sequence)
        self.past.append((root, list(tokens)))

    def findable(self) -> list[set]:
        """By group, contents of the last slot of each published block, read from the device."""
        memory = self.memory
        return [
            {self.device.slots[memory.core.blocks.frame[block]][-1] for block in published.values()}
            for published in memory.core.index.by_digest
        ]

    def verify_match(self, root, tokens, limit, findable, num_cached, found) -> None:
        def matches(length: int, partial: bool) -> bool:
            entries = -(-length // self.size)
            chains = [(root, *tokens[: (entry + 1) * self.size]) for entry in range(length // self.size)]
            if length % self.size:
                if not partial:
                    return False
                last = (root, *tokens[:length])
                common = set.intersection(*findable)
                chains.append(
                    next((c for c in common if len(c) == entries * self.size + 1 and c[: len(last)] == last), None)
                )
            return all(
                chain in findable[group]
                for group, window in enumerate(self.windows)
                for chain in chains[first_entry_in_window(length, window, self.size) :]
            )

        whole = max(n for n in range(0, limit + 1, self.size) if matches(n, False))
        best = max(n for n in range(limit + 1) if matches(n, True))
        assert whole <= num_cached <= best
        if self.windows == [None]:
            assert num_cached == best
        full = len(tokens) // self.size * self.size
        assert found * self.size == max(n for n in range(0, full + 1, self.size) if matches(n, False)) * self.caching

    @rule(data=st.data())
    def fork(self, data) -> None:
        if not 1 <= len(self.sequences) < 5:
            return
        parent = data.draw(st.sampled_from(self.sequences))
        length = data.draw(st.integers(max(0, parent.table.length - 3), parent.table.length))
        before = self.memory.stats()
        if self.out_of_window(parent.table, length):
            self.refused(lambda: self.memory.fork(parent.table, length))
            return
        child = self.memory.fork(parent.table, length)
        assert self.memory.stats() == before, "a fork takes no frame"
        self.sequences.append(
            Sequence(parent.root, parent.tokens[:length], child, parent.digests[: length // self.size], length)
        )

    @rule(data=st.data())
    def truncate(self, data) -> None:
        if not self.sequences:
            return
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.scheduled != sequence.table.length:
            return
        length = data.draw(st.integers(max(0, sequence.table.length - 4), sequence.table.length))
        if self.out_of_window(sequence.table, length):
            self.refused(lambda: self.memory.truncate(sequence.table, length))
            return
        self.memory.truncate(sequence.table, length)
        assert sequence.table.num_entries == -(-length // self.size)
        self.past.append((sequence.root, list(sequence.tokens)))
        del sequence.tokens[length:]
        del sequence.digests[length // self.size :]
        sequence.scheduled = length

    def out_of_window(self, table, length) -> bool:
        return any(
            first > first_entry_in_window(length, window, self.size)
            for first, window in zip(table.first_held, self.windows, strict=True)
        )

    def refused(self, call) -> None:
        before = self.memory.stats()
        with pytest.raises(ValueError, match="given back"):
            call()
        assert self.memory.stats() == before

    @rule(data=st.data())
    def close(self, data) -> None:
        if self.sequences:
            self.drop(data.draw(st.sampled_from(self.sequences)))

    def drop(self, sequence: Sequence) -> None:
        self.time += 1
        self.memory.close(sequence.table, self.time)
        self.sequences.remove(sequence)
        self.past.append((sequence.root, list(sequence.tokens)))
        for step in self.flying:
            step.commits = [(other, length) for other, length in step.commits if other is not sequence]

    # Steps

    @rule(data=st.data())
    def step(self, data) -> None:
        if not self.sequences or len(self.flying) == self.depth:
            return
        running: list[tuple[Sequence, int, int]] = []
        for sequence in data.draw(st.permutations(self.sequences)):
            if sequence not in self.sequences or data.draw(st.integers(0, 3)) == 0:
                continue
            if len(sequence.tokens) == sequence.scheduled:
                if len(sequence.tokens) >= LONGEST:
                    continue
                sequence.tokens.append(data.draw(TOKENS))
            begin = sequence.scheduled
            end = data.draw(st.integers(begin + 1, min(len(sequence.tokens), begin + 9)))
            up_to = end + data.draw(st.sampled_from([0, 0, 0, 3]))
            if self.reserve(sequence, up_to) or (self.stream(data) and self.reserve(sequence, up_to)):
                running.append((sequence, begin, end))
            elif not any(sequence is other for other, _, _ in running) and data.draw(st.booleans()):
                self.drop(sequence)
        for sequence in self.sequences if data.draw(st.booleans()) else ():
            self.compact(sequence.table, data.draw(st.integers(0, 40)), data.draw(st.sampled_from([64, 64, 5])))
        for sequence in self.sequences if data.draw(st.booleans()) else ():
            self.unstream(sequence.table, data.draw(st.integers(0, 6)))
        self.step_number += 1
        free_rows = [row for row in range(6) if all(row != sequence.row for sequence in self.sequences)]
        for sequence, _, _ in running:
            if sequence.row < 0:
                sequence.row = free_rows.pop(0)
                self.memory.place(sequence.table, sequence.row)
                for group in range(len(self.windows)):
                    self.device.tables[sequence.row, group] = {}
        self.save()
        self.who_reads_beside_the_steps_can_tell_what_is_whole()
        self.device.apply(self.memory.drain(self.step_number))
        self.compare_tables()
        step = Step(self.step_number, [], [])
        for sequence, begin, end in running:
            self.write(sequence, begin, end)
        for sequence, begin, end in running:
            self.read(sequence, begin, end, step)
            step.commits.append((sequence, end))
            sequence.scheduled = end
        self.flying.append(step)

    def stream(self, data) -> bool:
        memory = self.memory
        table, count = data.draw(st.sampled_from(self.sequences)).table, data.draw(st.integers(1, 4))
        before, references, frame = memory.stats(), list(memory.core.blocks.references), list(memory.core.blocks.frame)
        charged, own = table.tenant.charged, memory.residency(table)
        if not memory.stream(table, count):
            assert memory.stats() == before
            return False
        assert not self.flying, "a step in flight reads what was moved"
        assert memory.stats().frames_free == before.frames_free + count
        assert memory.stats().blocks_streamed == before.blocks_streamed + count
        assert table.tenant.charged == charged - count
        assert memory.residency(table) == (own.resident - count, own.streamed + count)
        assert own.streamed + count == sum(
            memory.core.blocks.frame[block] >= LOWER for held in table.blocks for block in held if block >= 0
        )
        for group, held in enumerate(table.blocks):
            for entry, block in enumerate(held):
                if block >= 0 and memory.core.blocks.frame[block] != frame[block]:
                    assert references[block] == 1, "what others share stays"
                    assert self.windows[group] is None, "what has a window stays"
                    assert (entry + 1) * self.size <= table.length, "what will be written stays"
        return True

    def unstream(self, table, count) -> None:
        memory = self.memory
        before, own, room = memory.stats(), memory.residency(table), memory.core.available(table.tenant)
        references, frame = list(memory.core.blocks.references), list(memory.core.blocks.frame)
        charged, most = table.tenant.charged, min(count, room, table.tenant.room)
        alone = [
            block
            for group, held in enumerate(table.blocks)
            for block in held
            if self.windows[group] is None and frame[block] >= LOWER and references[block] == 1
        ]
        moved = memory.unstream(table, count)
        after = memory.stats()
        assert moved == (0 if self.flying else max(0, min(most, len(alone)))), "a step in flight reads what is moved"
        assert memory.residency(table) == (own.resident + moved, own.streamed - moved)
        assert after.blocks_streamed == before.blocks_streamed - moved
        assert after.frames_active == before.frames_active + moved
        assert table.tenant.charged <= charged + moved, "what it had cached may have been evicted for it"
        for held in table.blocks:
            for block in held:
                if block >= 0 and memory.core.blocks.frame[block] != frame[block]:
                    assert block in alone, "what others hold too stays"
                    assert memory.core.blocks.frame[block] < LOWER

    def compact(self, table, steps_left, max_copies) -> None:
        memory = self.memory
        before, references, frame = memory.stats(), list(memory.core.blocks.references), list(memory.core.blocks.frame)
        apart = apart_in(memory, table)
        copies = self.compaction.compact(table, steps_left, max_copies)
        if not copies:
            assert list(memory.core.blocks.frame) == frame or memory.stats().evictions > before.evictions
            return
        assert not self.flying, "a step in flight reads what was moved"
        after, left = memory.stats(), apart_in(memory, table)
        assert copies <= max_copies
        assert after.frames_active == before.frames_active
        assert after.frames_free == before.frames_free + after.evictions - before.evictions
        assert (apart - left) * steps_left > copies * self.compaction.payback_steps, "it did not pay"
        own = {block for held in table.blocks for block in held}
        for block, place in enumerate(memory.core.blocks.frame):
            assert memory.core.blocks.references[block] == references[block]
            if place not in (frame[block], -1):
                assert place < LOWER
                assert references[block] == (block in own), "what others hold stays"

    @rule(data=st.data(), root=st.sampled_from(ROOTS), fresh=st.lists(TOKENS, min_size=4, max_size=30))
    def serve(self, data, root, fresh) -> None:
        """A whole request: what it computed stays cached."""
        before = len(self.sequences)
        self.open(data, root, fresh)
        if len(self.sequences) == before:
            return
        sequence = self.sequences[-1]
        for _ in range(6):
            self.step(data)
            while self.flying:
                self.finish(False, False)
            if sequence not in self.sequences or sequence.scheduled == len(sequence.tokens):
                break
        if sequence in self.sequences:
            self.drop(sequence)

    # Pins

    @rule(data=st.data(), name=st.sampled_from("ab"), expires_s=st.one_of(st.none(), st.integers(1, 5)))
    def pin(self, data, name, expires_s) -> None:
        whole = [(sequence, sequence.table.length // self.size * self.size) for sequence in self.sequences]
        whole = [pair for pair in whole if pair[1] and not self.out_of_window(pair[0].table, pair[1])]
        if not whole:
            return
        sequence, length = data.draw(st.sampled_from(whole))
        digests: list[bytes] = []
        extend_chain(digests, sequence.root, sequence.tokens[:length], self.size)
        before, stats, owner = self.pins.num_frames, self.memory.stats(), object()
        space = Namespace(TENANT_OF[sequence.root])
        try:
            self.pins.reserve(owner, name, space, digests, expires_s)
        except PinLimitError:
            assert (self.pins.num_frames, self.memory.stats()) == (before, stats)
            return
        assert self.pins.num_frames <= stats.frames // 2
        assert self.pins.held(space.tenant) <= self.memory.tenants[space.tenant].max_blocks // 2
        if data.draw(st.integers(0, 3)) == 0:
            self.pins.drop(owner)
            assert self.pins.num_frames == before
            return
        self.pins.keep(owner, sequence.table, self.time)
        self.pinned[space, name] = (sequence.root, sequence.tokens[:length])

    @rule(name=st.sampled_from("ab"), tenant=st.sampled_from(["default", "other"]))
    def unpin(self, name, tenant) -> None:
        space = Namespace(tenant)
        assert self.pins.unpin(name, space, self.time) == (self.pinned.pop((space, name), None) is not None)

    @rule(seconds=st.integers(1, 3))
    def expire(self, seconds) -> None:
        self.time += seconds
        ending = [(p.space, p.name) for p in self.pins.list() if p.expires_s is not None and p.expires_s <= self.time]
        self.pins.expire(self.time)
        for key in ending:
            del self.pinned[key]

    @invariant()
    def pinned_blocks_stay(self) -> None:
        if not hasattr(self, "memory"):
            return
        assert {(pin.space, pin.name) for pin in self.pins.list()} == self.pinned.keys()
        if self.memory.has_copies:
            return  # what is to be moved lies where it was
        for pin in self.pins.list():
            root, tokens = self.pinned[pin.space, pin.name]
            for held in pin.table.blocks:
                for entry, block in enumerate(held):
                    if block >= 0:
                        slots = self.device.slots[self.memory.core.blocks.frame[block]]
                        start = entry * self.size
                        assert slots == [(root, *tokens[: at + 1]) for at in range(start, start + self.size)]

    # Reads beside the steps

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

    # Lower tiers

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

    @rule(data=st.data(), name=st.sampled_from(["default", "other"]))
    def set_quota(self, data, name) -> None:
        if not self.quotas:
            return
        frames, others = self.memory.num_frames, (t for t in self.memory.tenants if t.name != name)
        guaranteed = data.draw(st.integers(0, frames))
        most = data.draw(st.integers(max(1, guaranteed), frames))
        promised = sum(tenant.guaranteed_blocks for tenant in others)
        if guaranteed + promised > frames:
            before = self.memory.stats()
            with pytest.raises(
                ConfigError, match=f"{guaranteed + promised} blocks would be guaranteed, and the pool has {frames}"
            ):
                self.memory.set_quotas({name: Quota(guaranteed, most)})
            assert self.memory.stats() == before
            return
        self.memory.set_quotas({name: Quota(guaranteed, most)})
        self.lowered.add(name)

    @rule(root=st.sampled_from(ROOTS))
    def flood(self, root) -> None:
        """Someone needs all frames that it can have, so that all is evicted that is cached and not kept for others."""
        table, _ = self.memory.open([], [], root, self.time, 0, TENANT_OF[root])
        frames = min(self.memory.available(table.tenant), table.tenant.room) // len(self.windows)
        assert self.reserve(Sequence(root, [], table), frames * self.size)
        self.save()
        self.memory.close(table, self.time)

    @rule(data=st.data())
    def load(self, data) -> None:
        self.save()
        if not self.lower or not self.past:
            return
        root, tokens = data.draw(st.sampled_from(self.past))
        digests: list[bytes] = []
        extend_chain(digests, root, tokens, self.size)
        memory, size, group_of = self.memory, self.size, [*enumerate(self.windows)]
        found, reach = memory.peek(digests, root), memory.reach(digests, self.lower.__contains__)

        def seen(count: int) -> list[tuple[int, int]]:
            """(entry, group) of what is needed to go on behind so many blocks."""
            firsts = [(group, first_entry_in_window(count * size, window, size)) for group, window in group_of]
            return sorted((entry, group) for group, first in firsts for entry in range(first, count))

        def is_here(entry: int, group: int) -> bool:
            return digests[entry] in memory.core.index.by_digest[group]

        def is_there(entry: int, group: int) -> bool:
            return is_here(entry, group) or (digests[entry], group) in self.lower

        lengths = range(len(digests) + 1)
        assert reach == max(count for count in lengths if all(is_there(*each) for each in seen(count))) >= found
        if reach == found:
            return
        missing = [each for each in seen(reach) if not is_here(*each)]
        load, tenant = (
            memory.open_load(digests[:reach], root, self.time, TENANT_OF[root]),
            memory.tenants[TENANT_OF[root]],
        )
        assert load.missing == memory.missing(digests[:reach]) == missing
        oldest = [each for each in missing if self.windows[each[1]] is None]
        streamed = data.draw(st.integers(0, len(oldest)))
        before, room = memory.stats(), min(memory.available(tenant), tenant.room)
        frames = memory.reserve_load(load, streamed)
        if frames is None:
            assert streamed > memory.streamed.available or len(missing) - streamed > room
            assert memory.stats() == before
            memory.close(load.table, self.time)
            return
        self.save()
        assert [each for each, frame in zip(missing, frames, strict=True) if frame >= LOWER] == oldest[:streamed]
        assert memory.stats().blocks_streamed == before.blocks_streamed + streamed
        assert memory.stats().frames_active == before.frames_active + len(missing) - streamed
        for (entry, group), frame in zip(missing, frames, strict=True):
            self.device.slots[frame] = list(self.lower[digests[entry], group])
            self.device.writer[frame] = [None] * size
        arrived = data.draw(st.integers(0, len(missing)))
        whole = [*(entry for entry, _ in missing), reach][arrived]
        memory.end_load(load.table, whole, tokens, digests[:reach], self.time)
        # Room for the load may have taken blocks that only a shorter match sees, through a window.
        windowed = any(window is not None for window in self.windows)
        kept = 0 if windowed and memory.stats().evictions > before.evictions else found
        assert memory.peek(digests, root) >= (reach if arrived == len(missing) else kept)

    # What is idle ends, and what is lost

    @rule(
        name=st.sampled_from(["default", "other"]),
        timeout_s=st.one_of(st.none(), st.integers(1, 6)),
        seconds=st.integers(0, 3),
    )
    def end_idle(self, name, timeout_s, seconds) -> None:
        self.time += seconds
        self.memory.tenants[name].set_idle_timeout(timeout_s)
        cached = {tenant: dict(tenant.policy.latest()) for tenant in self.memory.tenants}
        before = self.memory.stats()
        due = self.memory.end_idle(self.time)
        for tenant, since in cached.items():
            timeout = math.inf if tenant.idle_timeout_s is None else tenant.idle_timeout_s
            kept = {block: at for block, at in since.items() if at + timeout > self.time}
            assert dict(tenant.policy.latest()) == kept
            assert self.time < due <= min(kept.values(), default=self.time) + timeout
        after = self.memory.stats()
        ended = before.frames_cached - after.frames_cached
        assert after.frames_free == before.frames_free + ended
        assert after.evictions == before.evictions + ended
        self.save()

    @rule(data=st.data())
    def lose(self, data) -> None:
        """Frames that anything holds or can find."""
        memory, place = self.memory, self.memory.core.blocks.frame
        saves = {save.frame for save in memory.core.saves}
        used = sorted({place[block] for block in memory.core.blocks.in_use()} | saves)
        if not used or memory.has_copies:
            return
        frames = data.draw(st.sets(st.sampled_from(used), min_size=1, max_size=4))

        def lies_there(table: BlockTable) -> bool:
            return any(place[block] in frames for held in table.blocks for block in held if block >= 0)

        ended = [(pin.space, pin.name) for pin in self.pins.list() if lies_there(pin.table)]
        losers = [sequence for sequence in self.sequences if lies_there(sequence.table)]
        left = self.findable()
        for group, contents in enumerate(left):
            published = [place[block] for block in memory.core.index.by_digest[group].values()]
            lost = {self.device.slots[frame][-1] for frame in published if frame in frames}
            for content in sorted(contents, key=len):
                if content in lost or content[: -self.size] in lost:
                    lost.add(content)
            contents -= lost
        for frame in frames:
            self.device.slots[frame] = ["lost"] * self.size
        for step in self.flying:
            step.reads = [read for read in step.reads if read[1] not in frames]
        memory.forget_lost(frames)
        assert self.findable() == left
        self.save()
        self.pins.lose(frames, self.time)
        for key in ended:
            del self.pinned[key]
        for sequence in losers:
            assert memory.lies_in(sequence.table, frames)
            self.drop(sequence)
        # Of a tenant that holds more than its new quota, nothing that is let go of stays.
        assert self.findable() == left or self.lowered

    # The pool shrinks and grows

    @rule(frames=st.integers(3, 56))
    def resize(self, frames) -> None:
        if self.flying:
            with pytest.raises(ValueError, match="in flight"):
                self.memory.resize(frames)
            return
        before = self.memory.stats()
        shortage = self.memory.resize(frames)
        if shortage is not None:
            assert shortage == (before.frames_active, frames)
            assert frames < before.frames_active
            assert self.memory.stats() == before, "a shortage changed something"
            return
        after = self.memory.stats()
        assert (after.frames, after.frames_active) == (frames, before.frames_active)
        assert after.frames_cached == min(before.frames_cached, frames - before.frames_active), "evicted in vain"
        self.save()
        self.step_number += 1
        self.who_reads_beside_the_steps_can_tell_what_is_whole()
        self.device.apply(self.memory.drain(self.step_number))
        self.memory.retire(self.step_number)
        self.compare_tables()
        for frame in range(frames, LOWER):
            self.device.slots[frame] = ["gone"] * self.size

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

    @rule(late_digests=st.booleans(), commit_first=st.booleans())
    def finish(self, late_digests, commit_first) -> None:
        if not self.flying:
            return
        step = self.flying.pop(0)
        for sequence, frame, offset, content in step.reads:
            if self.device.slots[frame][offset] != content:
                assert self.device.writer[frame][offset] is sequence, (
                    "a frame under a running step was used for another"
                )
        if not commit_first:
            self.memory.retire(step.number)
        for sequence, length in step.commits:
            if self.caching and not late_digests:
                extend_chain(sequence.digests, sequence.root, sequence.tokens[:length], self.size)
            self.memory.commit(sequence.table, length, sequence.tokens, sequence.digests)
        if commit_first:
            self.memory.retire(step.number)

    # What always holds

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


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
