"""160 requests of a 13B model at once, modelled: what the default costs, and what it computes again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.replay.foresight import KNOWN, drawn, serve
from benchmarks.replay.setup import link_speed

from pagemill.planner.replica import Setup
from pagemill.simulate.roofline import Roofline, read_device, read_shape
from pagemill.simulate.trace import TracedRequest

TIMES = Roofline(read_device("a100-40"), read_shape("llama-13b"), "bfloat16")
SPEED = link_speed(TIMES)
POOL = 12_000 * 2**20
OFF = Setup(POOL)
AUTO = replace(OFF, target_tpot_s=None)
TRACES = {"equal": [TracedRequest(number, 0.0, 161, 338) for number in range(160)], "drawn": drawn(160, 161, 338)}


@pytest.mark.parametrize("known", list(KNOWN))
@pytest.mark.parametrize("lengths", list(TRACES))
def test_with_host_memory_of_the_pools_size_the_default_keeps_throughput_and_even_gaps(lengths, known):
    trace, max_tokens = TRACES[lengths], KNOWN[known]
    off = serve(trace, OFF, TIMES, max_tokens, 0, SPEED)
    auto = serve(trace, AUTO, TIMES, max_tokens, POOL, SPEED)
    assert auto.tokens_per_s > 0.97 * off.tokens_per_s
    assert auto.again < 0.02 < off.again
    assert auto.gaps_s[1] < 3 * auto.gaps_s[0]
