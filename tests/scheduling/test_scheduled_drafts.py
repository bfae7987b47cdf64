"""Drafts in the scheduler's steps, and results that a plan does not allow."""

from __future__ import annotations

import pytest
from scheduler_bench import EOS, Bench, Oracle, expected, make_request

from pagemill.sampling.params import TokenLogprobs
from pagemill.scheduling.model_drafting import ModelDrafter
from pagemill.scheduling.step_plan import StepPlan, StepResult
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


def test_a_branch_that_is_right_takes_the_place_of_drafts_that_are_wrong():
    steps = []
    for branches, rows in ((0, 8), (2, 8), (2, 1)):
        drafter = Oracle(0, right=0.0, branches=branches)
        bench, request = (
            Bench(drafter=drafter, max_num_seqs=rows),
            make_request("r", range(20, 29), 30, ignore_eos=True),
        )
        bench.scheduler.add(request)
        bench.run()
        assert bench.outputs["r", 0] == expected(request, 0)
        steps.append(bench.steps)
        counts = bench.scheduler.drafts
        assert sum(counts.num_accepted_tokens_per_pos) == counts.num_accepted_tokens == 30 - bench.steps
        assert sum(counts.num_draft_tokens_per_pos) <= counts.num_draft_tokens <= bench.drafted
        assert (drafter.branched > 0) == (branches > 0 and rows > 1), "each takes a row that is free"
    plain, branched, alone = steps
    assert branched < plain - 5
    assert plain - 3 <= alone <= plain, "by chance a wrong draft is right"


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
@pytest.mark.parametrize("branches", [0, 2])
def test_drafts_take_what_is_left_and_preempt_nobody(right, branches, limits):
    """Two sequences that fill the pool, or their tenant's part of it, to the last block, whatever is drafted."""
    drafter = Oracle(2, right=right, branches=branches)
    bench = Bench(frames=6 if limits.max_blocks is None else 30, budget=9, drafter=drafter)
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


def with_branches() -> tuple[Bench, StepPlan]:
    """A request that generates, and the plan of a step in which its drafts branch."""
    bench = Bench(drafter=Oracle(3, most=3, right=1.0, branches=3))
    bench.scheduler.add(make_request("r", [1, 2, 3], 40, ignore_eos=True))
    while not (plan := bench.scheduler.schedule(0.0)).branches.any():
        bench.device.apply(plan)
        bench.scheduler.commit(bench.device.run(plan), 0.0)
    return bench, plan


@pytest.mark.parametrize("ends", ["abort", "lose_plan", "finish"])
def test_branches_in_flight_end_with_their_sequence(ends):
    bench, plan = with_branches()
    if ends == "lose_plan":
        bench.scheduler.lose_plan(plan, RuntimeError("the device is gone"), 1.0)
    else:
        bench.device.apply(plan)
        result = bench.device.run(plan)
        bench.scheduler.abort("r", 1.0) if ends == "abort" else bench.scheduler.finish("r", 0, 1.0)
        assert bench.scheduler.commit(result, 2.0) == []
    bench.memory.check()
    bench.assert_all_free()


def test_a_result_with_tokens_for_none_or_several_paths_is_refused():
    _, plan = with_branches()
    samples = len(plan.sample_from)
    for with_tokens in ([], [0, 1], range(samples)):
        tokens = [[4] if sample in with_tokens else [] for sample in range(samples)]
        with pytest.raises(ValueError, match="accept"):
            StepResult(tokens, [None] * samples).check(plan)
    StepResult([[], [4], *[[]] * (samples - 2)], [None] * samples).check(plan)
    orphans = plan.select(1, len(plan.rows))
    StepResult([[]] * (samples - 1), [None] * (samples - 1)).check(orphans)


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


def test_a_step_without_rows_teaches_a_drafter_nothing():
    bench = Bench(drafter=ModelDrafter(4, 0.1, takes_in=False, most_branches=2))
    plan = bench.scheduler.state.batch.plan({})
    bench.scheduler.commit(StepResult(), 0.0)
    bench.scheduler.note_step(plan, 0.01)
    assert not bench.scheduler.drafter.may_draft(1), "nothing has been measured"
