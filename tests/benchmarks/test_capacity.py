"""Capacity under a limit: the search finds it, and the table states it."""

import argparse

import pytest
from benchmarks.capacity import add_limit_arguments, chosen_limits
from benchmarks.peers.capacity import markdown
from benchmarks.peers.plots import plot_capacity

from pagemill.errors import ConfigError
from pagemill.planner.limits import FACTOR, Limits, find_capacity


@pytest.mark.parametrize("true_capacity", [0.15, 0.59, 0.6, 0.61, 2.0, 17.0])
def test_search_comes_close_from_below(true_capacity):
    tried = []

    def holds(rate):
        tried.append(rate)
        return rate <= true_capacity

    found = find_capacity(holds, first=0.6)
    assert found in tried
    assert true_capacity / FACTOR ** (1 / 8) * 0.999 < found <= true_capacity
    assert len(tried) == len(set(tried))


def test_an_engine_that_is_always_too_slow_has_no_capacity():
    tried = []
    assert find_capacity(lambda rate: bool(tried.append(rate)), first=0.6) is None
    assert min(tried) > 0.1


def row(rate, tpot_p99_s):
    latency = {"tpot_p99_s": tpot_p99_s, "tpot_median_s": 0.1, "ttft_p99_s": 1.0, "ttft_median_s": 0.5}
    return {"rate": rate, "requests": 40, "offered_tokens_per_s": 110 * rate, **latency}


def test_table_states_the_ratio_at_equal_latency(tmp_path):
    machine = {"cpu": "a CPU", "features": [], "cores": 2, "memory_gib": 1, "load_average": [0, 0, 0], "date": "now"}
    slow, fast = [row(1.0, 0.1), row(1.5, 0.3)], [row(1.0, 0.1), row(2.0, 0.2)]
    engines = {
        "pagemill": {"description": "ours", "rates": fast, "capacity": fast[1]},
        "vllm": {"description": "theirs", "rates": slow, "capacity": slow[0]},
        "slow": {"description": "slower", "rates": slow, "capacity": None},
    }
    limits = {"slo_tpot_p99_s": 0.2, "slo_ttft_p99_s": None}
    result = {"machine": machine, "model": "m", "engines": engines, "seconds": 40.0, **limits}
    table = markdown(result)
    assert "the p99 over requests of the time per output token is at most 200 ms.\n" in table
    both = markdown({**result, "slo_ttft_p99_s": 1.5})
    assert "is at most 200 ms, and that of the time to first token at most 1500 ms.\n" in both
    assert "| pagemill | 2.00 | 220 | 200 | 1000 |  |  |" in table
    assert "| vllm | 1.00 | 110 | 100 | 1000 | 2.00x | 1.5x |" in table
    assert "| slow | under 0.1 |" in table
    for name, limit_s in (("one", None), ("both", 1.5)):
        plot_capacity({**result, "slo_ttft_p99_s": limit_s}, "title", tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "both.png").read_bytes()


def limits_of(*typed):
    parser = argparse.ArgumentParser()
    add_limit_arguments(parser)
    return chosen_limits(parser.parse_args(typed))


@pytest.mark.parametrize(
    ("tpot_p99_s", "ttft_p99_s", "within_one", "within_both"),
    [
        (0.25, 1.0, True, True),
        (0.25, 1.001, True, False),
        (0.251, 0.5, False, False),
        (0.1, float("nan"), True, False),
        (None, 0.5, False, False),
    ],
)
def test_each_limit_that_is_given_must_hold(tpot_p99_s, ttft_p99_s, within_one, within_both):
    row = {"tpot_p99_s": tpot_p99_s, "ttft_p99_s": ttft_p99_s}
    assert limits_of().hold(row) is within_one
    assert limits_of("--slo-ttft-p99", "1000").hold(row) is within_both


def test_limits_are_typed_in_milliseconds_and_are_above_0():
    assert limits_of("--slo-tpot-p99", "100", "--slo-ttft-p99", "2000") == Limits(0.1, 2.0)
    for flag in ("--slo-tpot-p99", "--slo-ttft-p99"):
        for limit in ("0", "inf", "nan"):
            with pytest.raises(ConfigError, match=f"{flag} is {limit}"):
                limits_of(flag, limit)
