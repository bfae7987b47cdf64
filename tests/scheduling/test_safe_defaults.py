"""Tenants of a file of which nothing else is said: whatever one of them does, another gets its part."""

from __future__ import annotations

import contextlib
import json

import pytest
from scheduler_bench import Bench, expected, make_request

from pagemill.errors import PinLimitError, RequestTooLargeError, SessionLimitError, TooManyWaitingError
from pagemill.namespace import Namespace
from pagemill.sessions.store import SessionStore
from pagemill.tenant_limits import TenantLimits, read_tenants_file

SIZE = 4
ROWS = 16


def limits_of(tmp_path, **tenants) -> dict[str, TenantLimits]:
    """The limits that a tenants file with these tenants gives them."""
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": tenants}))
    return read_tenants_file(path).limits


@pytest.fixture
def bench(tmp_path):
    bench = Bench(frames=240, block_size=SIZE, max_num_seqs=ROWS, budget=32)
    for name, limits in limits_of(tmp_path, wild={}, wilder={}, calm={}).items():
        bench.scheduler.set_tenant(name, limits)
    return bench


def add_all(bench: Bench, requests, refusal) -> int:
    """Adds requests until one is refused. Returns how many were taken."""
    taken = 0
    with contextlib.suppress(refusal):
        for request in requests:
            bench.scheduler.add(request)
            taken += 1
    return taken


def test_a_tenant_that_does_its_worst_lets_another_begin_within_its_fair_share(bench):
    """The others have every row, every block and all places to wait and to pin when calm's first request comes."""
    with pytest.raises(RequestTooLargeError, match=r"n is 16, but max_running lets 12 run at once for tenant 'wild'"):
        bench.scheduler.add(make_request("all rows", [1] * 9, 30, n=ROWS, tenant="wild"))
    pins = (make_request(f"pin{i}", [8, i] * 8, 1, tenant="wild", pin=f"pin{i}") for i in range(99))
    assert add_all(bench, pins, PinLimitError) == 7  # four blocks each, of the 30 that are a quarter of the pinnable
    bench.run_steps()
    bench.scheduler.add(make_request("wide", [1] * 9, 150, n=12, ignore_eos=True, arrival_s=bench.now, tenant="wild"))
    bench.step()
    flood = (
        make_request(f"{name}{i}", [2, i] * 3, 150, ignore_eos=True, arrival_s=bench.now, priority=-3, tenant=name)
        for i in range(1100)
        for name in ("wild", "wilder")
    )
    assert add_all(bench, flood, TooManyWaitingError) > 1900
    for _ in range(5):
        bench.step()
    tenants = bench.scheduler.tenants
    assert tenants["wild"].rows + tenants["wilder"].rows == ROWS
    asked = make_request("calm", [9] * 40, 20, ignore_eos=True, arrival_s=bench.now, tenant="calm")
    before = bench.now
    bench.scheduler.add(asked)
    while "calm" not in bench.first_step:
        bench.step()
        assert bench.now - before <= 4, "the prompt takes three steps"
    while ("calm", 0) not in bench.reasons:
        bench.step()
    assert bench.now - before <= 40
    assert bench.outputs["calm", 0] == expected(asked, 0)
    assert tenants["calm"].preemptions == 0
    bench.scheduler.add(make_request("pin", [9] * 40, 1, tenant="calm", arrival_s=bench.now, pin="mine"))
    while ("pin", 0) not in bench.reasons:
        bench.step()
    assert bench.scheduler.pins.held("calm") == 10


def test_a_tenant_gets_its_part_of_the_rows_from_one_that_has_borrowed_no_block():
    bench = Bench(frames=200, block_size=SIZE, max_num_seqs=8, budget=32)
    for name in "ab":
        bench.scheduler.set_tenant(name, TenantLimits(guaranteed_blocks="50%"))
    bench.scheduler.add(make_request("a", [1] * 9, 30, n=8, ignore_eos=True, tenant="a"))
    for _ in range(3):
        bench.step()
    for number in range(2):
        bench.scheduler.add(make_request(f"b{number}", [2] * 9, 9, ignore_eos=True, arrival_s=bench.now, tenant="b"))
    bench.step()
    assert [bench.scheduler.tenants[name].rows for name in "ab"] == [7, 1], "a quarter of eight, in three parts"
    bench.run()
    assert all(bench.outputs["a", index] == expected(make_request("a", [1] * 9, 30, ignore_eos=True), index)
               for index in range(8))  # fmt: skip


def test_a_request_for_many_rows_is_not_starved_by_those_who_take_their_parts(bench):
    for number in range(200):
        for name in ("wilder", "calm", "default"):
            for i in range(2):
                name_of = f"{name}{number}-{i}"
                short = make_request(name_of, [2, number], 5 + i, ignore_eos=True, arrival_s=bench.now, tenant=name)
                bench.scheduler.add(short)
        if number == 10:
            wide = make_request("wide", [1] * 9, 20, n=12, ignore_eos=True, arrival_s=bench.now, tenant="wild")
            bench.scheduler.add(wide)
        bench.step()
        if ("wide", 11) in bench.reasons:
            return
    raise AssertionError("it does not end")


def test_no_tenant_keeps_all_sessions(tmp_path):
    store = SessionStore(None, max_sessions=8, timeout_s=None)
    for name, limits in limits_of(tmp_path, wild={}, calm={}, free={"max_sessions": None}).items():
        store.set_limit(name, limits)

    for tenant, kept in (("wild", 2), ("calm", 2), ("free", 4)):
        for number in range(kept):
            store.begin(str(number), Namespace(tenant), model="m", tokenizer="t")
        with pytest.raises(SessionLimitError):
            store.begin("more", Namespace(tenant), model="m", tokenizer="t")


def test_pins_of_few_blocks_are_counted_too(tmp_path):
    bench = Bench(frames=20, block_size=SIZE, budget=64)
    bench.scheduler.set_tenant("a", TenantLimits(max_pinned_blocks=3))
    for number in range(3):
        bench.scheduler.add(make_request(f"r{number}", [1] * SIZE, 1, tenant="a", pin=str(number)))
    with pytest.raises(PinLimitError, match=r"number 4 of tenant 'a', which can have no more pins than .* 3;"):
        bench.scheduler.add(make_request("one too many", [1] * SIZE, 1, tenant="a", pin="3"))
    with pytest.raises(PinLimitError, match=r"'a' would have 5 pinned, over its max_pinned_blocks, 3; unpin"):
        bench.scheduler.add(make_request("too large", [2] * 4 * SIZE, 1, tenant="a", pin="4"))
    bench.run()


def test_a_pin_that_takes_the_place_of_another_is_not_one_more():
    bench = Bench(frames=40, block_size=SIZE, budget=64)
    bench.scheduler.set_tenant("a", TenantLimits(max_pinned_blocks=1))
    for number in range(2):
        bench.scheduler.add(make_request(f"r{number}", [1] * SIZE, 1, tenant="a", pin="system"))
        bench.run_steps()
    with pytest.raises(PinLimitError, match="number 2 of tenant 'a'"):
        bench.scheduler.add(make_request("one too many", [1] * SIZE, 1, tenant="a", pin="other"))
    bench.run()


@pytest.mark.parametrize(
    ("tenants", "guaranteed"),
    [
        ({"a": {}, "b": {}}, {"a": "25%", "b": "25%"}),
        ({"a": {"guaranteed_blocks": "40%"}, "b": {}, "c": {}}, {"a": "40%", "b": "15%", "c": "15%"}),
        ({"a": {"guaranteed_blocks": 40}, "b": {}}, {"a": 40, "b": "0%"}),
        ({"a": {"guaranteed_blocks": 0}, "b": {}}, {"a": 0, "b": "50%"}),
        ({"a": {"guaranteed_blocks": "98%"}, "b": {}, "c": {}, "d": {}}, {"a": "98%", "b": "0.33%"}),
        ({"a": {"max_blocks": "10%"}, "b": {"max_blocks": 9}}, {"a": "10%", "b": 0}),
    ],
)
def test_only_what_nobody_is_guaranteed_by_name_is_guaranteed_by_default(tmp_path, tenants, guaranteed):
    limits = limits_of(tmp_path, **tenants)
    assert {name: limits[name].guaranteed_blocks for name in guaranteed} == guaranteed
    bench = Bench(frames=200)
    for name, each in limits.items():
        bench.scheduler.set_tenant(name, each)


def test_null_is_no_limit(tmp_path):
    free = {"max_running": None, "max_waiting": None, "max_sessions": None, "max_pinned_blocks": None}
    limits = limits_of(tmp_path, a={**free, "guaranteed_blocks": 0}, b={})
    assert limits["a"] == TenantLimits()
    assert limits["b"] == TenantLimits(
        guaranteed_blocks="50%",
        max_running="75%",
        max_waiting=1000,
        max_sessions="33.33%",
        max_pinned_blocks="33.33%",
    )
