"""Capacity under a limit: the search finds it, and the table states it."""

import pytest
from benchmarks.peers.capacity import FACTOR, find_capacity, markdown
from benchmarks.peers.plots import plot_capacity


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
    result = {"machine": machine, "model": "m", "engines": engines, "slo_tpot_p99_s": 0.2, "seconds": 40.0}
    table = markdown(result)
    assert "| pagemill | 2.00 | 220 | 200 | 1000 |  |  |" in table
    assert "| vllm | 1.00 | 110 | 100 | 1000 | 2.00x | 1.5x |" in table
    assert "| slow | under 0.1 |" in table
    plot_capacity(result, "title", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
