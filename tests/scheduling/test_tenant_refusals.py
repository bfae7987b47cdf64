"""A tenant's limits refuse requests at once, or not at all once a request was accepted."""

from __future__ import annotations

import contextlib
import logging
import re
import sys

import pytest
from scheduler_bench import Bench, expected, expected_of_search, make_request, make_search

from pagemill.errors import (
    ConfigError,
    InvalidRequestError,
    RequestTooLargeError,
    TooManyWaitingError,
    UnknownTenantError,
)
from pagemill.tenant_limits import TenantLimits
from scheduling.test_tenancy import SIZE, bench_of, load_of


@pytest.mark.parametrize(
    ("limits", "n", "message"),
    [
        (
            TenantLimits(max_blocks=4),
            1,
            r"takes 5 KV blocks .* can count on 4 \(its max_blocks is 4; others leave it 20 of the pool's 20",
        ),
        (TenantLimits(max_blocks_per_request=4), 1, r"takes 5 KV blocks .* max_blocks_per_request .* is 4"),
        (TenantLimits(max_blocks_per_request=7), 2, r"takes 8 KV blocks of 4 tokens with n=2"),
        (TenantLimits(max_running=1), 2, r"n is 2, but max_running lets 1"),
    ],
)
def test_what_can_never_fit_its_tenants_limits_is_refused_at_once(limits, n, message):
    bench = bench_of({"a": limits}, frames=20, block_size=SIZE, max_num_seqs=4)
    with pytest.raises(RequestTooLargeError, match=message):
        bench.scheduler.add(make_request("big", [1] * 10, 10, n=n, tenant="a"))
    assert not bench.scheduler.has_work()


@pytest.mark.parametrize(("n", "longest"), [(1, 41), (2, 25), (3, 17)])
def test_without_max_tokens_all_sequences_of_a_request_end_at_its_tenants_limit(n, longest):
    """They share two blocks of the prompt's 10 tokens, four in each; the last token needs no place."""
    bench = bench_of({"a": TenantLimits(max_blocks_per_request=10)}, frames=20, block_size=SIZE, max_num_seqs=4)
    request = make_request("open", [1] * 10, 80, n=n, tenant="a", ignore_eos=True)
    request.params.max_tokens = None
    bench.scheduler.add(request)
    assert request.max_len == longest
    bench.run()
    assert [len(bench.outputs["open", index]) for index in range(n)] == [longest - 10] * n


def test_a_search_wider_than_its_tenant_may_run_is_refused_at_once():
    bench = bench_of({"a": TenantLimits(max_running=2)})
    with pytest.raises(RequestTooLargeError, match=r"beam_width is 3, but max_running lets 2 .* 'a'") as caught:
        bench.scheduler.add(make_search("wide", [1] * 5, 4, 3, tenant="a"))
    assert caught.value.param == "beam_width"
    bench.scheduler.add(make_search("fits", [1] * 5, 4, 2, tenant="a"))
    bench.run()


def test_rows_that_an_accepted_request_needs_to_begin_stay():
    """Also of a search that runs, if it may be preempted and must begin again."""
    bench = bench_of({"a": TenantLimits(max_running=3)}, max_num_seqs=4, budget=16)

    def lower(most: int) -> None:
        bench.scheduler.set_tenant("a", TenantLimits(max_running=most))

    parallel = make_request("n", [1] * 20, 6, n=3, ignore_eos=True, tenant="a")
    bench.scheduler.add(parallel)
    lower(1)  # each of them can begin, and go on, alone
    bench.run()
    assert bench.outputs["n", 2] == expected(parallel, 2)
    lower(2)
    search = make_search("search", [1] * 5, 6, 2, tenant="a", ignore_eos=True)
    bench.scheduler.add(search)
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"'search' needs 2 sequences to run at once"):
            lower(1)
        bench.step()
    bench.run()
    assert bench.found["search"] == expected_of_search(search)


def test_a_session_grows_to_its_limit_and_no_further():
    bench = bench_of({"a": TenantLimits(max_blocks_per_session=4)}, frames=20, block_size=SIZE)
    with pytest.raises(RequestTooLargeError, match=r"session may grow to 20 .* max_blocks_per_session .* 'a' is 4"):
        bench.scheduler.add(make_request("turn", [1] * 10, 10, tenant="a", in_session=True))
    for in_session, most in ((True, 4 * SIZE + 1), (False, 40)):
        request = make_request(f"{in_session}", [1] * 10, 30, ignore_eos=True, tenant="a", in_session=in_session)
        request.params.max_tokens = None
        bench.scheduler.add(request)
        assert request.max_len == most
    bench.run()


def test_what_others_are_guaranteed_can_not_be_counted_on():
    bench = bench_of({"calm": TenantLimits(guaranteed_blocks="50%")}, frames=8, block_size=SIZE)
    with pytest.raises(RequestTooLargeError, match=r"can count on 4 .*; others leave it 4 of the pool's 8"):
        bench.scheduler.add(make_request("big", [1] * 10, 10))
    bench.scheduler.add(make_request("fits", [1] * 10, 7, ignore_eos=True))
    bench.run()


def test_beyond_max_waiting_requests_are_refused_until_there_is_room():
    bench = bench_of({"a": TenantLimits(max_waiting=2)}, max_num_seqs=1, budget=8)
    for i in range(3):  # the first can begin at once
        bench.scheduler.add(make_request(f"a{i}", [i], 3, ignore_eos=True, tenant="a"))
    for _ in range(2):
        with pytest.raises(TooManyWaitingError, match=r"2 sequences of tenant 'a' wait, and max_waiting is 2"):
            bench.scheduler.add(make_request("a3", [3], 3, tenant="a"))
        bench.step()
    while bench.scheduler.num_waiting == 2:
        bench.step()
    bench.scheduler.add(make_request("a3", [3], 3, ignore_eos=True, tenant="a"))
    bench.run()
    assert {name for name, _ in bench.reasons} == {"a0", "a1", "a2", "a3"}


@pytest.mark.parametrize(("limits", "taken"), [({}, 4 + 2), ({"max_running": 3}, 3 + 2)])
def test_who_can_begin_at_once_does_not_wait(limits, taken):
    bench = bench_of({"a": TenantLimits(max_waiting=2, **limits)}, max_num_seqs=4)

    def add_all() -> int:
        names = [f"{bench.now}-{i}" for i in range(9)]
        for i, name in enumerate(names):
            with contextlib.suppress(TooManyWaitingError):
                bench.scheduler.add(make_request(name, [i], 3, ignore_eos=True, tenant="a"))
        return sum(name in bench.scheduler.state.requests for name in names)

    for _ in range(2):
        assert add_all() == taken
        bench.run()
    assert add_all() == taken
    for name in bench.scheduler.request_ids():
        bench.scheduler.abort(name, bench.now)
    assert add_all() == taken


def test_who_was_left_waiting_for_blocks_waits_although_rows_are_free():
    bench = bench_of({"a": TenantLimits(max_waiting=1)}, frames=4, block_size=SIZE, caching=False)
    for i in range(2):
        bench.scheduler.add(make_request(f"a{i}", [i] * 8, 6, ignore_eos=True, tenant="a"))
    bench.step()
    assert bench.scheduler.num_running == 1
    with pytest.raises(TooManyWaitingError, match=r"1 sequences of tenant 'a' wait"):
        bench.scheduler.add(make_request("a2", [2], 3, tenant="a"))
    bench.run()


def test_where_none_may_wait_none_is_taken():
    bench = bench_of({"a": TenantLimits(max_waiting=0)})
    with pytest.raises(TooManyWaitingError, match=r"0 sequences of tenant 'a' wait, and max_waiting is 0"):
        bench.scheduler.add(make_request("a", [1], 3, tenant="a"))


def test_an_unknown_tenant_is_refused():
    with pytest.raises(UnknownTenantError, match=r"no tenant 'nobody'; known: default"):
        Bench().scheduler.add(make_request("r", [1], 1, tenant="nobody"))


def test_a_tenant_is_told_nothing_of_another_but_what_is_left(caplog):
    limits = {"other": TenantLimits(guaranteed_blocks=2), "own": TenantLimits()}
    bench = bench_of(limits, frames=40, block_size=SIZE, budget=64)
    bench.scheduler.add(make_request("secret pin", [1] * 44, 1, tenant="other", pin="secret"))
    bench.run_steps()
    bench.scheduler.add(make_request("secret", [2] * 30, 75, tenant="other", ignore_eos=True))
    caplog.set_level(logging.INFO)
    refused = [
        (make_request("pin", [3] * 20, 1, tenant="own", pin="p"), "another request that was accepted would not fit"),
        (make_request("pin", [3] * 48, 1, tenant="own", pin="p"), "12 of them new, and 9 more may be pinned"),
        (make_request("large", [3] * 50, 90, tenant="own"), "the pool has 40, of which pins leave 29;"),
    ]
    for request, told in refused:
        with pytest.raises(InvalidRequestError, match=told) as caught:
            bench.scheduler.add(request)
        assert not re.search(r"secret|other'|\b(11|26|27|105)\b", str(caught.value)), "pins, needs, lengths"
    assert "pin 'p' of tenant 'own' is refused: the request 'secret' may grow to 105 tokens" in caplog.text
    bench.scheduler.set_tenant("other", TenantLimits(guaranteed_blocks=13))
    with pytest.raises(InvalidRequestError, match=r"can count on 27 .* others leave it 27 of the pool's 40") as caught:
        bench.scheduler.add(make_request("large", [3] * 50, 62, tenant="own"))
    assert not re.search(r"secret|other'|\b(11|13)\b", str(caught.value))


def test_limits_that_an_accepted_request_needs_stay():
    bench = bench_of({"a": TenantLimits(max_blocks=8)}, frames=20, block_size=SIZE)
    bench.scheduler.add(make_request("r", [1] * 10, 10, ignore_eos=True, tenant="a"))
    bench.step()
    with pytest.raises(ConfigError, match=r"'r' may grow to 20 tokens, which takes 5 .* 'a' could count on 4"):
        bench.scheduler.set_tenant("a", TenantLimits(max_blocks=4))
    with pytest.raises(ConfigError, match=r"tenant 'b': the request 'r' .* could count on 4"):
        bench.scheduler.set_tenant("b", TenantLimits(guaranteed_blocks=16))
    bench.scheduler.set_tenant("a", TenantLimits(max_blocks=5))
    bench.run()
    bench.scheduler.set_tenant("a", TenantLimits(max_blocks=4))
    assert load_of(bench, "a").account.charged <= 4


def test_tenants_are_set_at_once_or_not_at_all():
    """One guarantee may go down for another's to go up, in whatever order they are named."""
    bench = Bench(frames=20)
    bench.scheduler.set_tenants({"a": TenantLimits(guaranteed_blocks=15), "b": TenantLimits(guaranteed_blocks=5)})
    bench.scheduler.set_tenants({"b": TenantLimits(guaranteed_blocks=15), "a": TenantLimits(guaranteed_blocks=5)})
    with pytest.raises(ConfigError, match=r"^tenants: 25 blocks would be guaranteed, and the pool has 20"):
        bench.scheduler.set_tenants({"a": TenantLimits(guaranteed_blocks=10), "c": TenantLimits()})
    assert {each.account.name: each.account.guaranteed_blocks for each in bench.scheduler.tenants} == {
        "default": 0,
        "a": 5,
        "b": 15,
    }


def test_what_it_takes_to_accept_a_request_does_not_grow_with_the_tenants():
    calls = []
    for count in (2, 500):
        bench = Bench(frames=4000)
        bench.scheduler.set_tenants({f"t{i}": TenantLimits(guaranteed_blocks=1) for i in range(count)})
        request = make_request("r", [1] * 40, 1, tenant="t1")
        request.params.max_tokens, request.max_len = None, 3000
        made = 0

        def count_call(frame, event, arg):
            nonlocal made
            made += event == "call"

        sys.setprofile(count_call)
        try:
            bench.scheduler.add(request)
        finally:
            sys.setprofile(None)
        calls.append(made)
        bench.run()
    assert calls[0] == calls[1]
