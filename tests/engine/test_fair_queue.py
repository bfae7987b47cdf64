"""The queue before the tokenizer: every tenant gets its turn, and short work passes long work, but not for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.errors import TooManyWaitingError
from pagemill.frontend.fair_queue import LEAST, SHORT, FairQueue

LONG = SHORT + 1


def take(queue: FairQueue, count: int, thread: int = 0) -> list[tuple[str, int]]:
    """Whose work comes next, and how large each is."""
    taken = [queue.take(thread) for _ in range(count)]
    return [(work.owner, work.size) for work in taken]


def test_tenants_take_turns_by_characters():
    queue = FairQueue()
    for _ in range(6):
        queue.put("a", 2000, int)
    for _ in range(6):
        queue.put("b", 1000, int)
    owners = [owner for owner, _ in take(queue, 9)]
    assert (owners.count("a"), owners.count("b")) == (3, 6)


def test_a_newcomer_does_not_wait_for_a_flood_nor_get_what_it_did_not_use():
    queue = FairQueue()
    for _ in range(100):
        queue.put("a", 1000, int)
    take(queue, 50)
    for _ in range(10):
        queue.put("b", 1000, int)
    owners = [owner for owner, _ in take(queue, 10)]
    assert owners.count("b") == 5


def test_who_comes_again_and_again_is_not_forgotten_in_between():
    queue, owners = FairQueue(), []
    for _ in range(100):
        queue.put("small", LEAST, int)
    while owners.count("small") < 100:
        if owners[-1:] != ["small"]:  # the last one has been taken
            queue.put("large", 16_000, int)
        owners += [owner for owner, _ in take(queue, 1)]
    assert owners.count("large") <= 100 * LEAST // 16_000 + 1


def test_short_work_passes_long_work_of_the_same_tenant_but_not_for_ever():
    queue = FairQueue()
    queue.put("a", LONG, int)
    rounds = 0
    while True:
        queue.put("a", 1000, int)
        if take(queue, 1) == [("a", LONG)]:
            break
        rounds += 1
    assert rounds == LONG // 1000


def test_one_thread_takes_only_short_work():
    queue = FairQueue(num_threads=2)
    for size in (LONG, SHORT, LONG, 1):
        queue.put("a", size, int)
    assert take(queue, 2, thread=1) == [("a", 1), ("a", SHORT)]
    assert take(queue, 2) == [("a", LONG), ("a", LONG)]


def test_beyond_its_limit_a_tenant_is_refused_and_others_are_not():
    queue = FairQueue()
    queue.limit("a", 2)
    first, _ = queue.put("a", 1, int), queue.put("a", 1, int)
    with pytest.raises(TooManyWaitingError, match=r"2 texts of tenant 'a' wait to be tokenized") as caught:
        queue.require_room("a")
    assert caught.value.param == "tenant"
    queue.require_room("b")
    queue.drop(first)
    queue.drop(first)
    queue.require_room("a")
    queue.put("a", 1, int)
    with pytest.raises(TooManyWaitingError):
        queue.require_room("a")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abc"), st.integers(0, 3 * SHORT)), st.sampled_from(["take", "short", "drop"])
        ),
        max_size=60,
    )
)
def test_nothing_is_lost_or_given_twice(script):
    queue, waiting = FairQueue(num_threads=2), []
    for action in script:
        if action == "drop":
            if waiting:
                queue.drop(waiting.pop(len(waiting) // 2))
        elif action in ("take", "short"):
            if any(action == "take" or work.size <= SHORT for work in waiting):
                waiting.remove(queue.take(int(action == "short")))
        else:
            waiting.append(queue.put(*action, int))
    while waiting:
        waiting.remove(queue.take())
    late = queue.put("a", LEAST, int)
    queue.close()
    assert late.future.cancelled()
    assert queue.take() is None
