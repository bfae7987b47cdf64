"""What an engine tells who routes: which blocks came, and what work takes, only where it is asked to."""

from types import SimpleNamespace

from pagemill.engine.core import EngineCore
from pagemill.memory.kv_events import KVEvents


def core(measured):
    made = object.__new__(EngineCore)  # without a model: what is told concerns none
    made._measured, made._told_times, made.tiers = measured, (0.0,) * 4, None
    made.memory = SimpleNamespace(take_events=lambda: KVEvents([], []))
    return made


def test_times_that_have_moved_are_told_without_any_block():
    times = SimpleNamespace(token_s=0.0, plain_s=0.0)
    engine = core(times)
    assert engine.take_held() is None
    times.token_s = 1e-3
    assert engine.take_held().token_s == 1e-3
    times.token_s = 1.05e-3
    assert engine.take_held() is None
    times.token_s, times.plain_s = 1.05e-3, 2e-2
    assert engine.take_held().step_s == 2e-2


def test_an_engine_that_does_not_publish_tells_nothing():
    assert core(None).take_held() is None
