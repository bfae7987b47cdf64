"""Prompts whose log probabilities are asked for: each token costs a whole vocabulary's logits, so streams go before."""

from __future__ import annotations

from scheduler_bench import Bench, expected, make_request

from pagemill.engine.outputs import outputs_of
from pagemill.sampling.params import TokenLogprobs
from pagemill.scheduling.scheduler import SCORED_BESIDE


def scored(name: str, length: int, **how):
    request = make_request(name, [3] * length, 4, ignore_eos=True, **how)
    request.params.prompt_logprobs = 5
    return request


def computed(bench: Bench, name: str) -> int:
    return bench.scheduler.state.requests[name][0].scheduled


def test_beside_a_stream_a_step_takes_few_of_their_tokens_and_holds_nobody_up():
    bench = Bench(frames=200, block_size=4, max_num_seqs=8, budget=64)
    bench.scheduler.add(make_request("stream", [1] * 5, 60, ignore_eos=True))
    bench.step()
    prompts = [scored(name, 50) for name in ("first", "second")]
    for request in prompts:
        bench.scheduler.add(request)
    bench.scheduler.add(make_request("plain", [2] * 40, 4, ignore_eos=True))
    bench.step()
    assert [computed(bench, name) for name in ("first", "second", "plain")] == [SCORED_BESIDE, 1, 40]
    before = len(bench.outputs["stream", 0])
    bench.step()
    assert [computed(bench, name) for name in ("first", "second")] == [2 * SCORED_BESIDE, 1]
    assert len(bench.outputs["stream", 0]) == before + 1
    bench.run()
    assert all(bench.outputs[request.request_id, 0] == expected(request, 0) for request in prompts)


def test_alone_they_fill_the_step():
    bench = Bench(frames=200, block_size=4, max_num_seqs=8, budget=64)
    bench.scheduler.add(scored("alone", 50))
    bench.step()
    assert computed(bench, "alone") == 50
    bench.run()


def test_what_is_told_of_several_steps_at_once_has_the_prompts_with_the_first_token():
    bench = Bench(frames=200, block_size=4, max_num_seqs=8, budget=64)
    bench.scheduler.add(scored("r", 8))
    of_prompt, updates = [TokenLogprobs([3], [-1.0], 1)] * 7, []
    for found in ({0: of_prompt}, {}):
        plan = bench.scheduler.schedule(0.0)
        bench.device.apply(plan)
        result = bench.device.run(plan)
        result.prompt_logprobs = found
        updates += bench.scheduler.commit(result, 0.0)
    told = outputs_of(updates, bench.memory)
    assert [output.prompt_logprobs for output in told] == [[None, *of_prompt], None]


def test_of_several_sequences_the_first_alone_scores_the_prompt(monkeypatch):
    bench, counted = Bench(frames=200, block_size=4, max_num_seqs=4, budget=64), []
    for name in "ab":
        bench.scheduler.add(make_request(name, [1], 8, ignore_eos=True))
    bench.step()
    request, run = scored("r", 20, n=4), bench.device.run

    def count(plan, *args):
        counted.extend(plan.query_lens[plan.prompt_logprobs].tolist())
        return run(plan, *args)

    monkeypatch.setattr(bench.device, "run", count)
    bench.scheduler.add(request)
    bench.run()
    assert sum(counted) == 20
    assert all(bench.outputs["r", index] == expected(request, index) for index in range(4))
