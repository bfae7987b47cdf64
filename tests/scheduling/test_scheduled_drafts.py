"""Drafts in the scheduler's steps, and results that a plan does not allow."""

from __future__ import annotations

import pytest
from scheduler_bench import EOS, Bench, Oracle, expected, make_request

from pagemill.sampling.params import TokenLogprobs
from pagemill.scheduling.step_plan import StepResult
from pagemill.tenant_limits import TenantLimits


def test_right_drafts_take_fewer_steps_and_wrong_ones_as_many():
    steps = []
    for drafter in (None, Oracle(0, right=1.0), Oracle(0, right=0.0)):
        bench, request = Bench(drafter=drafter), make_request("r", range(20, 29), 30, ignore_eos=True)
        bench.scheduler.add(request)
        bench.run()
        assert bench.outputs["r", 0] == expected(request, 0)
        steps.append(bench.steps)
        counts = bench.scheduler.drafts
        assert counts.num_draft_tokens == bench.drafted
        assert sum(counts.num_accepted_tokens_per_pos) == counts.num_accepted_tokens == 30 - bench.steps
    plain, right, wrong = steps
    assert right <= plain // 2
    assert plain // 2 < wrong <= plain


def test_drafts_that_the_device_did_not_propose_are_not_counted():
    bench, request = Bench(drafter=Oracle(0, leaves=1.0)), make_request("r", range(20, 29), 60, ignore_eos=True)
    bench.scheduler.add(request)
    bench.run()
    assert bench.outputs["r", 0] == expected(request, 0)
    counts = bench.scheduler.drafts
    assert 0 < counts.num_draft_tokens < bench.drafted
    assert sum(counts.num_accepted_tokens_per_pos) == counts.num_accepted_tokens == 60 - bench.steps


@pytest.mark.parametrize("limits", [TenantLimits(), TenantLimits(max_blocks=6)])
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_drafts_take_what_is_left_and_preempt_nobody(right, limits):
    """Two sequences that fill the pool, or their tenant's part of it, to the last block, whatever is drafted."""
    bench = Bench(frames=6 if limits.max_blocks is None else 30, budget=9, drafter=Oracle(2, right=right))
    bench.scheduler.set_tenant("one", limits)
    requests = [make_request(f"r{i}", [20 + i] * 4, 8, tenant="one", ignore_eos=True) for i in range(2)]
    for request in requests:
        bench.scheduler.add(request)
    bench.run()
    assert [bench.outputs[request.request_id, 0] for request in requests] == [expected(one, 0) for one in requests]
    assert bench.drafted > 0
    assert bench.scheduler.preemptions == 0


def test_what_is_accepted_behind_the_end_is_cut():
    for max_tokens in range(1, 40):
        bench, request = Bench(drafter=Oracle(1)), make_request("r", [1, 2, 3], max_tokens, seed=4)
        bench.scheduler.add(request)
        bench.run()
        assert bench.outputs["r", 0] == expected(request, 0)
        assert bench.reasons["r", 0] == ("stop" if bench.outputs["r", 0][-1] == EOS else "length")
    assert bench.outputs["r", 0][-1] == EOS, "the seed is to end it"


@pytest.mark.parametrize(
    ("tokens", "logprobs"), [([], None), ([4, 4], None), ([4], []), ([4], [TokenLogprobs([4], [0.0], 1)] * 2)]
)
def test_a_result_that_the_plan_does_not_allow_is_refused(tokens, logprobs):
    bench = Bench()
    bench.scheduler.add(make_request("r", [1, 2, 3], 9))
    plan = bench.scheduler.schedule(0.0)
    StepResult([[4]], [None]).check(plan)
    with pytest.raises(ValueError, match="accept"):
        StepResult([tokens], [logprobs]).check(plan)
    with pytest.raises(ValueError, match="zip"):
        StepResult().check(plan)
