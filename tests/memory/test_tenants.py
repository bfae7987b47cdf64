"""Tenants over one pool: who is charged, what is kept for each, and whose cached blocks make room."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.errors import ConfigError, MemoryInvariantError, UnknownTenantError
from pagemill.memory.digest import extend_chain, root_digest
from pagemill.memory.eviction import POLICIES
from pagemill.memory.manager import MemoryManager, Shortage
from pagemill.memory.tenants import NO_QUOTA, Quota, give_way
from pagemill.namespace import Namespace

SIZE = 4
ROOTS = {name: root_digest(b"model", "f32", "reference", str(Namespace(name, ""))) for name in ("a", "b", "c")}


class Pool:
    """A manager of tenants a, b and c, whose requests run alone, a whole prompt in a step."""

    def __init__(self, frames: int, policy: str = "lru", **quotas: tuple[int, int]) -> None:
        self.memory = MemoryManager(frames, SIZE, [None], policy=POLICIES[policy](0.1), saves_evicted=True)
        self.steps = 0
        for name in ROOTS:
            self.memory.set_quotas({name: Quota(*quotas.get(name, (0, frames)))})

    def run(self, tenant: str, blocks: int, first: int = 0):
        """A table with so many full blocks, of tokens that begin at `first`."""
        tokens, digests = list(range(first, first + blocks * SIZE)), []
        extend_chain(digests, ROOTS[tenant], tokens, SIZE)
        table, _ = self.memory.open(tokens, digests, ROOTS[tenant], self.steps, len(tokens), tenant)
        assert self.memory.reserve(table, len(tokens)) is None
        self.steps += 1
        self.memory.drain(self.steps)
        self.memory.commit(table, len(tokens), tokens, digests)
        self.memory.retire(self.steps)
        self.memory.check()
        return table

    def cache(self, tenant: str, blocks: int, first: int = 0) -> None:
        self.memory.close(self.run(tenant, blocks, first), self.steps)
        self.memory.check()

    def charges(self) -> dict[str, tuple[int, int]]:
        """Active and cached, of each that has any."""
        return {t.name: (t.active, t.cached) for t in self.memory.tenants if t.charged}

    def shortage(self, tenant: str, blocks: int) -> Shortage | None:
        table = self.memory.open([], [], ROOTS[tenant], self.steps, 0, tenant).table
        found = self.memory.reserve(table, blocks * SIZE)
        self.memory.close(table, self.steps)
        self.memory.check()
        return found


def test_a_block_is_charged_once_from_its_beginning_to_its_end():
    pool = Pool(16)
    table = pool.run("a", 3)
    child = pool.memory.fork(table, 10)
    assert pool.charges() == {"a": (3, 0)}
    pool.memory.reserve(child, 11)
    assert pool.charges() == {"a": (4, 0)}, "a copy is a block of its own"
    pool.memory.close(child, 1.0)
    assert pool.charges() == {"a": (3, 0)}
    again = pool.run("a", 3)
    assert pool.charges() == {"a": (3, 0)}, "a hit is charged already"
    pool.memory.close(table, 2.0)
    pool.memory.close(again, 2.0)
    assert pool.charges() == {"a": (0, 3)}
    pool.cache("b", 16)
    assert pool.charges() == {"b": (0, 16)}


def test_what_a_step_in_flight_holds_is_charged_until_it_retires():
    pool = Pool(8)
    table = pool.memory.open([], [], ROOTS["a"], 0.0, 0, "a").table
    pool.memory.reserve(table, 2 * SIZE)
    pool.memory.drain(1)
    pool.memory.close(table, 1.0)
    pool.memory.check()
    assert pool.charges() == {"a": (2, 0)}
    pool.memory.retire(1)
    assert pool.charges() == {}


def test_at_its_quota_a_tenant_evicts_its_own():
    pool = Pool(16, a=(0, 6))
    pool.cache("b", 4)
    pool.cache("a", 5)
    pool.cache("a", 4, first=500)
    assert pool.charges() == {"a": (0, 6), "b": (0, 4)}
    pool.run("a", 4, first=900)
    assert pool.charges() == {"a": (4, 2), "b": (0, 4)}
    assert pool.shortage("a", 3) == Shortage(3, 2)
    assert pool.shortage("a", 2) is None


def test_what_a_lost_block_was_used_for_does_not_count_for_the_next_in_its_place():
    pool = Pool(2, policy="lfu")
    for _ in range(4):
        pool.cache("a", 1)
    table = pool.run("a", 1)
    frames = {int(pool.memory.core.blocks.frame[block]) for block in table.blocks[0]}
    pool.memory.close(table, pool.steps)
    pool.memory.forget_lost(frames)
    for first in (100, 200, 200, 300):
        pool.cache("a", 1, first)
    evictions = pool.memory.tenants["a"].evictions
    pool.cache("a", 1, first=200)
    assert pool.memory.tenants["a"].evictions == evictions, "used twice, it stayed"


def test_what_is_opened_and_not_used_does_not_count_as_a_use():
    pool = Pool(4, policy="lfu")
    for _ in range(2):
        pool.cache("a", 1)
    pool.cache("a", 1, first=100)
    for _ in range(9):
        table = pool.run("a", 1, first=100)
        pool.memory.close(table, pool.steps, used=False)
    pool.run("a", 3, first=200)
    evictions = pool.memory.tenants["a"].evictions
    pool.cache("a", 1)
    assert pool.memory.tenants["a"].evictions == evictions, "used twice, it stayed"


def test_nor_does_that_count_against_a_block_that_somebody_uses_meanwhile():
    pool = Pool(2, policy="lfu")
    for first in (0, 100):
        for _ in range(3):
            pool.cache("a", 1, first)
    holder = pool.run("a", 1)
    for _ in range(9):
        pool.memory.close(pool.run("a", 1), pool.steps, used=False)
    pool.memory.close(holder, pool.steps)
    pool.cache("a", 1, first=200)
    evictions = pool.memory.tenants["a"].evictions
    pool.cache("a", 1)
    assert pool.memory.tenants["a"].evictions == evictions, "used four times, it stayed"


def test_what_is_guaranteed_stays_what_is_borrowed_goes():
    pool = Pool(12, a=(4, 12))
    pool.cache("a", 6)
    assert pool.shortage("b", 9) == Shortage(9, 8)
    pool.run("b", 8)
    assert pool.charges() == {"a": (0, 4), "b": (8, 0)}


def test_who_has_borrowed_most_gives_first():
    pool = Pool(12, b=(5, 12))
    pool.cache("a", 5)
    pool.cache("b", 7)
    pool.run("c", 2, first=100)
    assert pool.charges() == {"a": (0, 3), "b": (0, 7), "c": (2, 0)}
    pool.run("c", 3, first=200)
    assert pool.charges() == {"a": (0, 1), "b": (0, 6), "c": (5, 0)}


def test_a_tenant_evicts_its_own_when_it_has_borrowed_most():
    pool = Pool(8)
    pool.cache("a", 2)
    pool.cache("b", 6)
    pool.cache("b", 2, first=100)
    assert pool.charges() == {"a": (0, 2), "b": (0, 6)}


def test_within_its_guarantee_a_tenant_takes_back_before_it_evicts_its_own():
    pool = Pool(8, a=(4, 8))
    pool.cache("a", 2)
    pool.cache("b", 6)
    pool.run("a", 2, first=100)
    assert pool.charges() == {"a": (2, 2), "b": (0, 4)}


def test_a_lower_quota_evicts_what_is_cached_and_leaves_what_is_active():
    pool = Pool(12)
    table = pool.run("a", 3)
    pool.cache("a", 4, first=100)
    pool.memory.set_quotas({"a": Quota(0, 2)})
    assert pool.charges() == {"a": (3, 0)}
    assert pool.shortage("a", 1) == Shortage(1, 0)
    pool.memory.close(table, 9.0)
    pool.memory.check()
    assert pool.charges() == {"a": (0, 2)}


@pytest.mark.parametrize(
    ("guaranteed", "most", "message"),
    [
        (-1, 5, r"guaranteed_blocks of tenant 'a' would be -1, and must be at least 0"),
        (5, 4, r"max_blocks of tenant 'a' would be 4, and must be at least 5"),
        (0, 0, r"max_blocks of tenant 'a' would be 0, and must be at least 1"),
        (9, NO_QUOTA, r"13 blocks would be guaranteed, and the pool has 10"),
        (7, 10, r"11 blocks would be guaranteed"),
    ],
)
def test_what_the_pool_can_not_keep_is_refused(guaranteed, most, message):
    pool = Pool(10, a=(2, 10), b=(4, 10))
    with pytest.raises(ConfigError, match=message):
        pool.memory.set_quotas({"a": Quota(guaranteed, most)})
    account = pool.memory.tenants["a"]
    assert (account.guaranteed_blocks, account.max_blocks) == (2, 10)


def test_a_tenant_that_nobody_set_is_refused():
    pool = Pool(4)
    with pytest.raises(UnknownTenantError, match=r"no tenant 'd'; known: a, b, c, default"):
        pool.memory.open([1], [], ROOTS["a"], 0.0, 0, "d")


def test_the_recount_finds_a_wrong_charge():
    pool = Pool(8)
    pool.run("a", 2)
    pool.memory.tenants["a"].charged -= 1
    with pytest.raises(MemoryInvariantError, match="charged once"):
        pool.memory.check()
    pool.memory.tenants["b"].charged += 1
    with pytest.raises(MemoryInvariantError, match="'a' has 2, 1 charged"):
        pool.memory.check()


def test_no_tenant_and_salt_are_taken_for_another():
    pairs = [
        ("default", ""),
        ("default", "a"),
        ("defaulta", ""),
        ("a", "7:default"),
        ("", "1:a"),
        ("1", ":a"),
        ("a", ""),
    ]
    assert len({str(Namespace(*pair)) for pair in pairs}) == len(pairs)


def test_a_smaller_pool_takes_of_what_is_guaranteed_only_in_the_end():
    pool = Pool(12, a=(4, 12))
    pool.cache("a", 5)
    pool.cache("b", 5)
    assert pool.memory.resize(6) is None
    pool.memory.check()
    assert pool.charges() == {"a": (0, 5), "b": (0, 1)}
    assert pool.memory.resize(4) is None
    assert pool.charges() == {"a": (0, 4)}
    assert pool.memory.resize(3) is None
    pool.memory.check()
    assert pool.charges() == {"a": (0, 3)}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_nobody_uses_leaves_the_pool_in_time(policy):
    pool = Pool(32, policy)
    memory = pool.memory
    memory.tenants["a"].set_idle_timeout(10.0)
    assert memory.end_idle(0.0) == 10.0, "nothing is cached: look again when it could be idle"
    held = pool.run("a", 2, first=0)
    old, young = pool.run("a", 4, first=100), pool.run("a", 3, first=200)
    memory.close(old, 1.0)
    memory.close(pool.run("b", 2), 1.0)
    memory.close(young, 5.0)
    assert memory.end_idle(10.9) == 11.0
    assert pool.charges() == {"a": (2, 7), "b": (0, 2)}
    assert memory.end_idle(11.0) == 15.0
    memory.check()
    assert pool.charges() == {"a": (2, 3), "b": (0, 2)}
    assert sorted(name.depth for _, name in memory.take_saves()) == [0, 1, 2, 3], "they go down a tier"
    memory.close(pool.run("a", 3, first=200), 14.0)
    assert memory.end_idle(15.0) == 24.0, "used again since"
    memory.close(held, 20.0)
    assert memory.end_idle(24.0) == 30.0
    assert memory.end_idle(30.0) == 40.0
    assert pool.charges() == {"b": (0, 2)}
    assert memory.tenants["a"].evictions == 0, "nobody lacked room"
    memory.tenants["a"].set_idle_timeout(None)
    assert memory.end_idle(1e9) == float("inf")
    memory.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_of_all_tenants_what_was_used_last_is_kept_first(policy):
    pool = Pool(16, policy)
    for tenant in ("a", "b", "a", "c", "b"):
        pool.cache(tenant, 2, first=pool.steps * 100)
    names = {root: name for name, root in ROOTS.items()}
    kept = [save.name for save in pool.memory.cached_blocks()]
    assert [names[name.parent] for name in kept[::2]] == ["b", "c", "a", "b", "a"]
    assert [name.depth for name in kept] == [0, 1] * 5


@given(st.lists(st.tuples(st.integers(-5, 30), st.integers(0, 12)), min_size=1, max_size=6), st.data())
def test_whoever_has_borrowed_most_gives_way_block_by_block(owners, data):
    borrowed, evictable = [has for has, _ in owners], {each: count for each, (_, count) in enumerate(owners) if count}
    wanted = data.draw(st.integers(0, sum(evictable.values())))
    expected, left = Counter(), list(borrowed)
    for _ in range(wanted):
        first = max((each for each in evictable if expected[each] < evictable[each]), key=left.__getitem__)
        expected[first] += 1
        left[first] -= 1
    giving = give_way(evictable, borrowed.__getitem__, wanted) if wanted else {}
    assert sum(giving.values()) == wanted
    levels = sorted(borrowed[each] - giving.get(each, 0) for each in evictable)
    assert levels == sorted(left[each] for each in evictable)
    assert all(0 < count <= evictable[each] for each, count in giving.items())
