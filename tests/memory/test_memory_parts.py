"""The parts of the memory system on their own: frames, digests, the prefix index, the order of eviction."""

from __future__ import annotations

import hashlib
import random
import struct
import tracemalloc
from contextlib import contextmanager
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pagemill.memory.digest import extend_chain, pack_tokens, root_digest
from pagemill.memory.eviction import GhostList, GreedyDual, Lru
from pagemill.memory.frames import REGION, FramePool
from pagemill.memory.prefix_index import MAX_CANDIDATES, PrefixIndex


@contextmanager
def growth_below(nbytes):
    """Fails if objects of Python take so many bytes more afterwards."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        assert tracemalloc.get_traced_memory()[0] - before < nbytes
    finally:
        tracemalloc.stop()


@given(
    size=st.integers(1, 200),
    actions=st.lists(st.tuples(st.integers(0, 40), st.integers(-1, 199), st.booleans()), max_size=60),
)
@settings(deadline=None)
def test_a_frame_is_given_to_one_taker_at_a_time(size, actions):
    pool = FramePool(size)
    taken: list[list[int]] = []
    for count, after, give in actions:
        if give and taken:
            pool.give(taken.pop(count % len(taken)))
        else:
            frames = pool.take(count, after if 0 <= after < size else None)
            assert (frames is None) == (count > size - sum(map(len, taken)))
            if frames is not None:
                assert len(frames) == count
                taken.append(frames)
        held = [frame for frames in taken for frame in frames]
        assert len(set(held)) == len(held)
        assert all(0 <= frame < size and not pool.is_free(frame) for frame in held)
        assert pool.num_free == pool.count_free() == size - len(held)


def test_a_sequence_gets_neighbours_and_room_to_grow():
    pool = FramePool(8 * REGION)
    first, second = pool.take(5), pool.take(40)
    assert first == list(range(first[0], first[0] + 5))
    assert second == list(range(second[0], second[0] + 40))
    for _ in range(REGION - 5):
        first += pool.take(1, first[-1])
        second += pool.take(1, second[-1])
    assert first == list(range(first[0], first[0] + REGION))
    assert second == list(range(second[0], second[0] + 35 + REGION))
    assert second[0] == first[0] + REGION


def test_what_was_given_end_first_is_taken_as_neighbours():
    pool = FramePool(100)
    everything = pool.take(100)
    pool.give(list(range(70, 40, -1)))
    assert sorted(everything) == list(range(100))
    frames = pool.take(30)
    jumps = sum(after != before + 1 for before, after in pairwise(frames))
    assert jumps <= 1  # at most one: from the region's start, round to what lies before it


def test_a_frame_is_listed_once_however_often_it_is_taken_as_a_neighbour():
    pool = FramePool(64)
    frames = [pool.take(1)[0] for _ in range(64)]
    pool.give(frames)
    with growth_below(16 << 10):
        for _ in range(10_000):
            pool.give(pool.take(1, 10))


def test_the_digest_is_what_its_specification_says():
    root = root_digest(b"\1\2", "bf16", "cpu", "salt")
    fields = b"".join(struct.pack("<I", len(f)) + f for f in (b"\1\2", b"bf16", b"cpu", b"salt"))
    assert root == hashlib.sha256(b"pagemill-kv-1" + fields).digest()
    digests: list[bytes] = []
    extend_chain(digests, root, [1, 2, 70_000, 4, 5], 2)
    first = hashlib.sha256(root + bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    second = hashlib.sha256(first + bytes([0x70, 0x11, 1, 0, 4, 0, 0, 0])).digest()
    assert digests == [first, second]
    # A constant, so that nobody changes the format without meaning to: it names blocks that lie on disks.
    assert root.hex() == "d237fa729f77a64cb955e955ac7838e80b5cb483dab6d4005be8af6c3268decd"


@pytest.mark.parametrize("field", range(4))
def test_every_field_of_the_root_counts_and_none_runs_into_the_next(field):
    fields = [b"model", "ab", "ab", "ab"]
    changed = list(fields)
    changed[field] = changed[field] + changed[field][:1]
    assert root_digest(*fields) != root_digest(*changed)
    assert root_digest(b"m", "ab", "c", "") != root_digest(b"m", "a", "bc", "")


def test_a_chain_grown_in_pieces_is_the_same_chain():
    root, tokens = root_digest(b"", "", "", ""), list(range(100))
    whole: list[bytes] = []
    extend_chain(whole, root, tokens, 8)
    pieces: list[bytes] = []
    for end in range(0, 101, 7):
        extend_chain(pieces, root, tokens[:end], 8)
    assert len(whole) == 12
    assert pieces == whole[: len(pieces)]
    with pytest.raises(struct.error):
        extend_chain([], root, [-1] * 8, 8)


def test_siblings_come_and_go_in_any_order():
    shuffle = random.Random(0).shuffle
    index = PrefixIndex(64, 2, [None])
    root = bytes(32)
    live: dict[int, tuple[bytes, bytes]] = {}
    names = [(bytes([i]) * 32, pack_tokens([i % 3, i])) for i in range(64)]
    order = list(range(64))
    for _ in range(5):
        shuffle(order)
        for block in order:
            if block in live:
                index.forget(block, 0)
                del live[block]
            else:
                index.publish(block, 0, names[block][0], root, names[block][1], 0)
                live[block] = names[block]
            assert index.count_children() == len(live) == len(index.by_digest[0])
        shuffle(order)
        for block in order[:30]:
            if block in live:
                index.forget(block, 0)
                del live[block]


def test_only_so_many_candidates_are_compared():
    index = PrefixIndex(64, 4, [None])
    root = bytes(32)
    for block in range(MAX_CANDIDATES + 1):
        index.publish(block, 0, bytes([block]) * 32, root, pack_tokens([7, block, block, block]), 0)
    assert index.match([], root, [7, 1, 1], 3).num_tokens == 3
    assert index.match([], root, [7, 0, 0], 3).num_tokens == 1


def test_lru_gives_the_oldest_and_what_is_used_again_is_new():
    policy = Lru()
    for block in (3, 1, 2):
        policy.add(block, 0.0)
    policy.remove(3)
    policy.add(3, 1.0)
    assert (len(policy), 3 in policy, 4 in policy) == (3, True, False)
    assert [policy.victim() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(KeyError):
        policy.victim()
    with pytest.raises(KeyError):
        policy.remove(3)


class Line:
    """Blocks in one chain, block i at depth i; or, with `loose`, each alone."""

    def __init__(self, loose: bool = False) -> None:
        self.loose = loose

    def depth(self, block: int) -> int:
        return block

    def parent(self, block: int) -> int:
        return -1 if self.loose else block - 1


def test_greedy_dual_gives_the_least_uses_times_cost_and_ages():
    policy = GreedyDual(Line(loose=True), lambda depth: 1.0 + depth)
    for block, uses in ((0, 4), (1, 1), (2, 2)):  # worth 4, 2, 6
        for _ in range(uses):
            policy.add(block, 0.0)
            policy.remove(block)
        with pytest.raises(KeyError):
            policy.remove(block)
    for block in (2, 0, 1):  # one use more each: worth 9, 5, 4
        policy.add(block, 0.0)
    assert (len(policy), 1 in policy, 3 in policy) == (3, True, False)
    assert [policy.victim(), policy.victim()] == [1, 0]
    policy.add(1, 0.0)  # 5, the last victim's, and 2 for its only use since it ended
    policy.add(4, 0.0)
    assert [policy.victim() for _ in range(3)] == [1, 2, 4]
    with pytest.raises(KeyError):
        policy.victim()


def test_greedy_dual_forgets_uses_of_what_can_not_be_found_any_more():
    policy = GreedyDual(Line(loose=True), lambda depth: 1.0)
    for _ in range(5):
        policy.add(7, 0.0)
        policy.remove(7)
    policy.forget(7)
    policy.add(7, 0.0)
    policy.add(8, 0.0)
    assert policy.victim() == 7


def test_greedy_dual_keeps_what_others_hang_on():
    policy = GreedyDual(Line(), lambda depth: 1.0 + depth)
    for block in (5, 4, 3, 2, 1, 0):
        policy.add(block, 0.0)
    assert [policy.victim() for _ in range(6)] == [5, 4, 3, 2, 1, 0]


def test_greedy_dual_agrees_with_sorting():
    random_ = random.Random(5)
    policy = GreedyDual(Line(loose=True), lambda depth: 1.0 + depth % 7)
    age, serial, uses, cached = 0.0, 0, {}, {}
    for _ in range(20000):
        block = random_.randrange(200)
        if block in cached:
            policy.remove(block)
            del cached[block]
        elif random_.random() < 0.7 or not cached:
            uses[block] = uses.get(block, 0) + 1
            serial += 1
            cached[block] = (age + uses[block] * (1.0 + block % 7), serial)
            policy.add(block, 0.0)
        else:
            first = min(cached, key=cached.__getitem__)
            age = cached.pop(first)[0]
            del uses[first]
            assert policy.victim() == first
        assert len(policy) == len(cached)


def test_greedy_dual_keeps_no_more_than_it_holds():
    policy = GreedyDual(Line(), lambda depth: 1.0)
    with growth_below(64 << 10):
        for _ in range(10_000):
            policy.add(0, 0.0)
            policy.remove(0)


def test_a_ghost_list_remembers_what_was_evicted_last_and_no_more():
    ghosts = GhostList(3)
    names = [number.to_bytes(32, "little") for number in range(1000)]
    for name in names:
        ghosts.evicted(name)
    assert len(ghosts.digests) == 3
    for number, count in ((0, 0), (996, 0), (997, 1), (999, 2), (998, 3), (998, 3)):
        ghosts.published(names[number])
        assert ghosts.hits == count
    assert not ghosts.digests
