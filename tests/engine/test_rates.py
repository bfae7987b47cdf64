"""Requests and tokens per minute by tenant."""

import contextlib
from types import SimpleNamespace

import pytest

from pagemill.errors import InvalidRequestError, RateLimitError, TooManyWaitingError
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
        rates.charge("a").use(1000)
    assert wait_of(rates) == pytest.approx(10)
    assert wait_of(rates, "b") is None
    assert rates.status("a")["requests"] == (6, 0, pytest.approx(60))
    with pytest.raises(RateLimitError, match=r"tenant 'a' has used up the 6 of its requests_per_minute; .* 10 s"):
        rates.charge("a").use(1)
    clock[0] = 10.001
    rates.charge("a").use(1)
    assert wait_of(rates) == pytest.approx(9.999)
    clock[0] = 1000
    assert rates.status("a") == {"requests": (6, 6, 0)}
    assert rates.status("b") == {}


def test_tokens_that_an_answer_overdraws_are_waited_for(clock):
    rates = Rates({"a": TenantLimits(tokens_per_minute=600)})
    rates.charge("a").use(500)
    assert rates.status("a")["tokens"] == (600, 100, pytest.approx(50))
    rates.charge("a").use(90)
    rates.spend("a", 70)
    assert rates.status("a")["tokens"].remaining == 0
    assert wait_of(rates) == pytest.approx(6.1)
    clock[0] = 6.2
    assert wait_of(rates) is None


def test_a_prompt_above_the_limit_is_taken_when_nothing_has_been_used(clock):
    rates = Rates({"a": TenantLimits(tokens_per_minute=60)})
    rates.charge("a").use(120)
    assert wait_of(rates) == pytest.approx(61)
    clock[0] = 61.1
    rates.charge("a").use(1)


def test_the_prompts_of_a_call_begin_together_or_take_nothing(clock):
    rates = Rates({"a": TenantLimits(requests_per_minute=6, tokens_per_minute=600)})
    rates.charge("a", 4).use(10)
    left = r"tenant 'a' has 2 left of the 6 of its requests_per_minute, and this has 5 prompts; .* 30 s"
    for _ in range(2):
        with pytest.raises(RateLimitError, match=left) as refused:
            rates.charge("a", 5)
        assert refused.value.retry_after_s == pytest.approx(30)
    assert rates.status("a")["requests"].remaining == 2
    clock[0] = 30.001
    rates.charge("a", 5)
    assert rates.status("a")["requests"].remaining == 0
    clock[0] = 1000
    with pytest.raises(InvalidRequestError, match=r"has 7 prompts, .* is 6; send at most 6 at a time") as never:
        rates.charge("a", 7)
    assert not isinstance(never.value, RateLimitError)
    assert rates.status("a")["requests"].remaining == 6


def test_a_call_may_overdraw_tokens_with_any_of_its_prompts(clock):
    rates = Rates({"a": TenantLimits(tokens_per_minute=600)})
    with rates.charge("a", 3) as charge:
        for _ in range(3):
            charge.use(400)
    assert wait_of(rates) == pytest.approx(60.1)


def test_prompts_that_never_begin_are_given_back(clock):
    rates = Rates({"a": TenantLimits(requests_per_minute=6)})
    with rates.charge("a", 5) as charge:
        charge.use(1)
    assert rates.status("a")["requests"].remaining == 5


def test_a_call_that_may_not_even_wait_takes_nothing(clock):
    rates = Rates({"a": TenantLimits(requests_per_minute=6, tokens_per_minute=600)})
    with contextlib.suppress(TooManyWaitingError), rates.charge("a", 5) as charge:
        charge.use(70)
        raise TooManyWaitingError("the third of them finds no room")
    assert [status.remaining for status in rates.status("a").values()] == [6, 600]


def test_limits_change(clock):
    rates = Rates({"a": TenantLimits(requests_per_minute=1)})
    rates.charge("a").use(1)
    rates.set_limits("a", TenantLimits(requests_per_minute=1, max_running=1))
    assert wait_of(rates) is not None
    rates.set_limits("a", TenantLimits(requests_per_minute=2))
    assert wait_of(rates) is None
    rates.set_limits("a", TenantLimits())
    assert rates.status("a") == {}
