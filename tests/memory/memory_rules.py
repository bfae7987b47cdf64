"""Sequences that come and go, and their steps, as random operations on a memory manager."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import rule
from memory_model import LONGEST, LOWER, ROOTS, TENANT_OF, TOKENS, MemoryModel, Sequence, Step, apart_in

from pagemill.memory.block_table import first_entry_in_window
from pagemill.memory.digest import extend_chain


class Sequences(MemoryModel):
    """Opens, forks, cuts and closes sequences."""

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

    def refused(self, call) -> None:
        before = self.memory.stats()
        with pytest.raises(ValueError, match="given back"):
            call()
        assert self.memory.stats() == before

    @rule(data=st.data())
    def close(self, data) -> None:
        if self.sequences:
            self.drop(data.draw(st.sampled_from(self.sequences)))


class Steps(Sequences):
    """Runs steps of sequences, some in flight together, and streams and moves blocks before them."""

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

    @rule(
        data=st.data(),
        paths=st.lists(st.lists(TOKENS, max_size=5), min_size=2, max_size=3),
        winner=st.integers(0, 2),
        kept=st.integers(1, 6),
    )
    def draft(self, data, paths, winner, kept) -> None:
        """One sequence's next tokens on several paths, each but the first in a fork; one of them becomes its own."""
        able = [one for one in self.sequences if one.scheduled == one.table.length == len(one.tokens) - 1]
        if self.flying or not able or len(self.sequences) + len(paths) > 6:
            return
        sequence = data.draw(st.sampled_from(able))
        start, known = sequence.scheduled, list(sequence.tokens)
        rows = (row for row in range(6) if all(row != other.row for other in self.sequences))
        branches = [sequence]
        for path in paths[1:]:
            fork = self.memory.fork(sequence.table, start)
            branches.append(Sequence(sequence.root, known + path, fork, list(sequence.digests), start, next(rows)))
            self.sequences.append(branches[-1])
            if not self.reserve(branches[-1], start + 1 + len(path)):
                self.drop(branches.pop())
                break
            self.memory.place(fork, branches[-1].row)
            for group in range(len(self.windows)):
                self.device.tables[branches[-1].row, group] = {}
        sequence.tokens += paths[0]
        if not self.reserve(sequence, start + 1 + len(paths[0])):
            sequence.tokens[start + 1 :] = []
            if not self.reserve(sequence, start + 1):
                for branch in branches:
                    self.drop(branch)
                return
        if sequence.row < 0:
            sequence.row = next(rows)
            self.memory.place(sequence.table, sequence.row)
            for group in range(len(self.windows)):
                self.device.tables[sequence.row, group] = {}
        self.step_number += 1
        self.save()
        self.device.apply(self.memory.drain(self.step_number))
        self.compare_tables()
        for branch in branches:
            self.write(branch, start, len(branch.tokens))
        for branch in branches:
            self.read(branch, start, len(branch.tokens), Step(self.step_number, [], []))
        self.memory.retire(self.step_number)
        right = branches[winner % len(branches)]
        length = min(start + kept, len(right.tokens))
        for branch in branches[1:]:
            self.sequences.remove(branch)
            if branch is right:
                self.memory.adopt(sequence.table, branch.table, self.time)
            else:
                self.memory.close(branch.table, self.time)
        sequence.tokens, sequence.scheduled = right.tokens[:length], length
        if self.caching:
            extend_chain(sequence.digests, sequence.root, sequence.tokens, self.size)
        self.memory.commit(sequence.table, length, sequence.tokens, sequence.digests)
        if sequence.table.num_entries > -(-length // self.size):
            self.memory.truncate(sequence.table, length)
        self.step_number += 1
        self.device.apply(self.memory.drain(self.step_number))
        self.compare_tables()
        self.memory.retire(self.step_number)

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
