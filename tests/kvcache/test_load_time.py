"""What the next load will take: by recent loads, a slow one not for ever, and never much time lost to find out."""

import random

import pytest

from pagemill.kvcache.load_time import TRIAL_SHARE, LoadTime


def timed(*loads: tuple[int, float]) -> LoadTime:
    """After a first load, which does not count, and these."""
    load_time = LoadTime()
    for blocks, seconds in ((1, 1e9), *loads):
        load_time.note(blocks, seconds)
    return load_time


def test_the_first_load_does_not_count():
    assert LoadTime().of(1) is None
    assert timed().of(1) is None
    assert timed().pays(10, 0.001)
    assert timed((10, 1.0)).of(10) == pytest.approx(1.0)


def test_a_load_and_each_block_have_their_time():
    load_time = timed((1, 0.5), (11, 1.5), (31, 3.5))
    assert load_time.of(1) == pytest.approx(0.5)
    assert load_time.of(101) == pytest.approx(10.5)


def test_loads_of_one_size_leave_it_to_the_blocks():
    load_time = timed(*[(7, 1.4)] * 50)
    assert [load_time.of(blocks) for blocks in (1, 7, 70)] == pytest.approx([0.2, 1.4, 14.0])


@pytest.mark.parametrize("loads", [[(1, 3.0), (20, 1.0)], [(1, 0.01), (2, 1.0)]])
def test_more_blocks_never_take_less_time_and_none_less_than_nothing(loads):
    load_time = timed(*loads)
    times = [load_time.of(blocks) for blocks in (0, 1, 5, 100)]
    assert times == sorted(times)
    assert times[0] >= 0.0


def test_recent_loads_weigh_more():
    load_time = timed(*[(10, 1.0)] * 20, *[(10, 3.0)] * 3)
    assert 1.9 < load_time.of(10) < 2.1
    for _ in range(20):
        load_time.note(10, 3.0)
    assert load_time.of(10) == pytest.approx(3.0, rel=0.02)


def test_one_slow_load_is_forgotten_once_a_trial_was_fast():
    load_time = timed((10, 0.1), (10, 100.0))
    assert not load_time.pays(10, 0.5)
    lost_s = load_time.of(10) - 0.5
    while not load_time.pays(10, 0.5):
        load_time.note_step(1.0)
        lost_s -= TRIAL_SHARE
    assert abs(lost_s) <= TRIAL_SHARE
    assert not load_time.pays(10, 0.5), "one trial at a time"
    load_time.note(10, 0.1)
    assert load_time.of(10) == pytest.approx(0.1)
    assert load_time.pays(10, 0.5)


def test_a_tier_that_stays_slow_costs_a_bounded_share_of_the_time():
    """Whatever a load took last, all of them lose no more than a few of them and TRIAL_SHARE of the time."""
    random.seed(0)
    load_time, computing_s, lost_s, trials = timed((10, 5.0)), 0.0, 0.0, 0
    for _ in range(20_000):
        if load_time.pays(10, 1.0):
            seconds = random.uniform(4.0, 6.0)
            load_time.note(10, seconds)
            lost_s, trials = lost_s + seconds - 1.0, trials + 1
        else:
            load_time.note_step(1.0)
            computing_s += 1.0
    assert trials > 100
    assert lost_s < 1.1 * TRIAL_SHARE * computing_s
