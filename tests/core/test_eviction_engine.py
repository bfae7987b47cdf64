"""The engine evicts by the policy that its settings name."""

from __future__ import annotations

import pytest
from drive import drive, request

from pagemill.sampling.params import SamplingParams
from shallow import FRAME_BYTES

pytestmark = pytest.mark.shallow
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@pytest.mark.parametrize(("policy", "stays"), [("lru", False), ("lfu", True), ("cost", True)])
def test_a_prefix_of_many_uses_outlives_a_flood_or_not(make_engine, policy, stays):
    core = make_engine(kv_memory=30 * FRAME_BYTES, max_model_len=352, eviction_policy=policy)
    for number in range(3):
        drive(core, [request(f"often{number}", [5] * 160 + [number], ONE)])
    for number in range(3):
        drive(core, [request(f"once{number}", [6 + number] * 160, ONE)])
    cached = drive(core, [request("again", [5] * 160, ONE)]).cached["again"]
    assert (cached > 0) == stays, cached


def test_a_deep_block_is_worth_more_where_computing_it_again_counts(make_engine):
    """Each used once: by use they are equal, and the oldest goes first; by cost the beginnings of short prompts do."""
    found = {}
    for policy in ("lfu", "cost"):
        core = make_engine(kv_memory=30 * FRAME_BYTES, max_model_len=352, eviction_policy=policy)
        drive(core, [request("long", [5] * 320, ONE)])
        for number in range(3):
            drive(core, [request(f"short{number}", [6 + number] * 64, ONE)])
        found[policy] = drive(core, [request("again", [5] * 320, ONE)]).cached["again"]
    assert found["lfu"] < found["cost"]
