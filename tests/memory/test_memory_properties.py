"""The memory system against a simulated device, under random sequences of operations."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, rule
from memory_model import LOWER, ROOTS, TENANT_OF, Sequence
from memory_rules import Steps

from pagemill.errors import ConfigError, PinLimitError
from pagemill.memory.block_table import BlockTable, first_entry_in_window
from pagemill.memory.digest import extend_chain
from pagemill.memory.tenants import Quota
from pagemill.namespace import Namespace


class MemoryMachine(Steps):
    """Also pins prefixes, loads from lower tiers, loses what lies in frames, and resizes the pool."""

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
        assert self.pins.num_frames == sum(self.pins.held(tenant.name) for tenant in self.memory.tenants)
        assert all(self.pins.held(tenant.name) == tenant.pinned for tenant in self.memory.tenants)
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

    # Lower tiers

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
        assert after.evictions == before.evictions
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


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
