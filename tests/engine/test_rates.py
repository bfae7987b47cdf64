"""Requests and tokens per minute by tenant."""

from types import SimpleNamespace

import pytest

from pagemill.errors import RateLimitError
from pagemill.frontend import rates as module
from pagemill.frontend.rates import Rates
from pagemill.tenant_limits import TenantLimits


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the rates see, as a list of one."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def wait_of(rates, tenant="a"):
    """Seconds that a request has to wait, None if it can begin."""
    try:
        rates.check(tenant)
    except RateLimitError as error:
        return error.retry_after_s


def test_requests_come_back_evenly(clock):
    rates = Rates({"a": TenantLimits(requests_per_minute=6), "b": TenantLimits()})
    for _ in range(6):
        rates.begin("a", 1000)
    assert wait_of(rates) == pytest.approx(10)
    assert wait_of(rates, "b") is None
    assert rates.status("a")["requests"] == (6, 0, pytest.approx(60))
    with pytest.raises(RateLimitError, match=r"tenant 'a' has used up the 6 of its requests_per_minute; .* 10 s"):
        rates.begin("a", 1)
    clock[0] = 10.001
    rates.begin("a", 1)
    assert wait_of(rates) == pytest.approx(9.999)
    clock[0] = 1000
    assert rates.status("a") == {"requests": (6, 6, 0)}
    assert rates.status("b") == {}


def test_tokens_that_an_answer_overdraws_are_waited_for(clock):
    rates = Rates({"a": TenantLimits(tokens_per_minute=600)})
    rates.begin("a", 500)
    assert rates.status("a")["tokens"] == (600, 100, pytest.approx(50))
    rates.begin("a", 90)
    rates.spend("a", 70)
    assert rates.status("a")["tokens"].remaining == 0
    assert wait_of(rates) == pytest.approx(6.1)
    clock[0] = 6.2
    assert wait_of(rates) is None


def test_a_prompt_above_the_limit_is_taken_when_nothing_has_been_used(clock):
    rates = Rates({"a": TenantLimits(tokens_per_minute=60)})
    rates.begin("a", 120)
    assert wait_of(rates) == pytest.approx(61)
    clock[0] = 61.1
    rates.begin("a", 1)


def test_limits_change(clock):
    rates = Rates({"a": TenantLimits(requests_per_minute=1)})
    rates.begin("a", 1)
    rates.set_limits("a", TenantLimits(requests_per_minute=1, max_running=1))
    assert wait_of(rates) is not None
    rates.set_limits("a", TenantLimits(requests_per_minute=2))
    assert wait_of(rates) is None
    rates.set_limits("a", TenantLimits())
    assert rates.status("a") == {}
