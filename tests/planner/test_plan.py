"""A plan: cheaper devices for looser limits, what binds, and one line for what cannot be."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from pagemill.cli.main import main
from pagemill.errors import ConfigError
from pagemill.planner.limits import Limits, find_capacity
from pagemill.planner.load import Generated, Load, Traced
from pagemill.planner.model_shape import find_shape
from pagemill.planner.replica import ReplicaSettings, _simulate, run_trial
from pagemill.planner.report import as_dict, table
from pagemill.planner.search import Choices, _Search, make_plan
from pagemill.planner.workload import WORKLOADS, Lengths, Workload, workload_named
from pagemill.simulate.roofline import Roofline, read_device, read_shape
from pagemill.simulate.simulator import replay
from pagemill.simulate.trace import MOONCAKE_BLOCK, TracedRequest

SHORT = Workload(Lengths(300, 0.5, 440), Lengths(20, 0.5, 60), 512)
ONE = Choices(ranks=(1,), max_num_seqs=(64,), max_num_batched_tokens=(512,))


def load(rate=100.0, workload=SHORT, count=60):
    return Load(Generated(workload, 0), rate, count)


def plan_of(device="l4", model="llama-3-8b", limits=None, choices=ONE, **given):
    return make_plan(
        read_device(device), read_shape(model), "bfloat16", load(**given), limits or Limits(0.2, 3.0), choices
    )


def test_the_replicas_serve_the_load_within_the_limits_and_one_less_would_not():
    plan = plan_of()
    (option,) = plan.options
    assert option.at_share.rate == 100 / option.replicas
    assert option.at_share.tpot_p99_s <= 0.2
    assert option.at_share.ttft_p99_s <= 3.0
    assert option.replicas > 1
    assert 100 / (option.replicas - 1) > option.size.capacity
    assert option.price_per_hour == pytest.approx(0.8 * option.replicas)
    output, everything = option.at_share.output_len, option.at_share.length
    assert option.cost_output == pytest.approx(option.price_per_hour / 3600 / (100 * output) * 1e6)
    assert option.cost_all == pytest.approx(option.cost_output * output / everything)
    assert plan_of(limits=Limits(0.08, 0.5)).options[0].replicas > option.replicas


def test_what_binds_is_named():
    many = replace(ONE, max_num_seqs=(512,))
    assert plan_of(limits=Limits(0.5, 1.0), choices=many).options[0].binds.startswith("compute: ")
    assert plan_of(limits=Limits(0.07, 5.0)).options[0].binds.startswith("the limit: ")
    few = replace(ONE, max_num_seqs=(2,))
    assert plan_of(limits=Limits(1.0, 0.5), choices=few).options[0].binds.startswith("max_num_seqs: 2 run at once")
    small = replace(read_device("l4"), memory_bytes=19_500_000_000)
    long = Workload(Lengths(300, 0.1, 350), Lengths(100, 0.1, 150), 512)
    plan = make_plan(small, read_shape("llama-3-8b"), "bfloat16", load(2.0, long), Limits(1.0, 3.0), ONE)
    assert plan.options[0].binds.startswith("memory: ")


def test_requests_that_their_timeout_ends_are_no_served_ones():
    """Limits on tokens hold at rates at which answers take too long as a whole."""
    limits = Limits(0.2, 3.0)
    loose, tight, little = (
        plan_of(limits=limits, workload=replace(SHORT, timeout=timeout)) for timeout in (None, 5.0, 0.05)
    )
    assert tight.options[0].at_share.timed_out <= 0.01 * tight.options[0].at_share.counted
    assert tight.options[0].replicas > loose.options[0].replicas
    assert "are ended by their timeout" in tight.options[0].binds
    assert not little.options
    assert "timeout is 0.05 s, and a request of" in little.refused[1]


def test_tokens_of_all_samples_are_counted_and_those_of_the_rest_are_work():
    roofline, settings = Roofline(read_device("l4"), read_shape("llama-3-8b"), "bfloat16"), ReplicaSettings(1)
    one, two, best = (
        run_trial(roofline, settings, replace(SHORT, **asked).requests(8.0, 10.0), 8.0)
        for asked in ({}, {"n": 2}, {"n": 2, "best_of": 4})
    )
    assert two.output_len == best.output_len == 2 * one.output_len
    assert two.length - two.output_len == pytest.approx(one.length - one.output_len)
    assert 1.5 * one.running < two.running < best.running / 1.5
    assert best.ttft_median_s > 5 * two.ttft_median_s


def test_settings_are_tried_and_the_better_one_is_taken():
    choices = Choices(ranks=(1,), max_num_seqs=(2, 64), max_num_batched_tokens=(512,))
    assert plan_of(choices=choices).options[0].size.settings.max_num_seqs == 64


def test_settings_that_only_help_together_are_found(monkeypatch):
    """More rows alone and more tokens alone hold no more; both do."""
    found = {(64, 4): 1.0, (64, 64): 1.0, (512, 4): 1.02, (512, 64): 2.0}

    def capacity(search, settings, first):
        return found[settings.max_num_batched_tokens, settings.max_num_seqs]

    monkeypatch.setattr(_Search, "_capacity", capacity)
    monkeypatch.setattr(_Search, "_holds", lambda search, settings, rate: capacity(search, settings, 0.0) >= rate)
    search = _Search(
        read_device("l4"), read_shape("llama-3-8b"), "bfloat16", load(), Limits(0.2, 3.0), lambda line: None
    )
    choices = Choices(ranks=(1,), max_num_seqs=(4, 64), max_num_batched_tokens=(64, 512))
    size = search.choose(ReplicaSettings(1, "auto", 4, 64, 0), choices)
    assert (size.settings.max_num_batched_tokens, size.settings.max_num_seqs, size.capacity) == (512, 64, 2.0)


def test_a_trial_is_cut_only_where_a_limit_breaks():
    roofline, limits = Roofline(read_device("l4"), read_shape("llama-3-8b"), "bfloat16"), Limits(0.07, 1.0)
    cut, held = 0, 0
    for rate in (1.0, 2.0, 5.0, 8.0):
        trace = load().requests(rate, limits)
        whole, ended = (run_trial(roofline, ReplicaSettings(1), trace, rate, given) for given in (None, limits))
        within = limits.hold({"tpot_p99_s": whole.tpot_p99_s, "ttft_p99_s": whole.ttft_p99_s})
        assert not whole.cut
        assert not (ended.cut and within)
        assert ended.cut or ended == whole
        assert ended.cut <= (ended.requests < whole.requests)
        cut, held = cut + ended.cut, held + within
    assert cut >= 2
    assert held >= 2


def test_a_trial_whose_slowest_requests_alone_break_a_limit_is_not_cut():
    roofline = Roofline(read_device("l4"), read_shape("llama-3-8b"), "bfloat16")
    trace = load().requests(5.0, Limits(0.2, 3.0))
    whole = run_trial(roofline, ReplicaSettings(1), trace, 5.0)
    for slack, cut in ((1.001, False), (0.9, True)):
        for limits in (Limits(slack * whole.tpot_p99_s), Limits(1.0, slack * whole.ttft_p99_s)):
            assert run_trial(roofline, ReplicaSettings(1), trace, 5.0, limits).cut == cut


@pytest.mark.parametrize(
    ("asked", "memory", "preempts"),
    [
        ({}, 80e9, False),
        ({"prompt": Lengths(20, 0.3, 40), "output": Lengths(100, 0.3, 160)}, 16.5e9, True),
        ({"n": 2}, 80e9, False),
        ({"timeout": 4.0}, 80e9, False),
        ({"prefixes": 2, "prefix_len": 512, "context": 2048, "turns": 3, "think_s": 1}, 80e9, False),
    ],
)
def test_what_is_left_out_of_a_simulation_changes_nothing(monkeypatch, asked, memory, preempts):
    """Against one in which no sequence coasts, and all blocks have names and go to host memory."""
    device = replace(read_device("l4"), memory_bytes=int(memory), memory_share=1.0, working_bytes=1 << 28)
    roofline = Roofline(device, read_shape("llama-3-8b"), "bfloat16")
    trace = replace(SHORT, **asked).requests(8.0, 12.0)
    quick = run_trial(roofline, ReplicaSettings(1), trace, 8.0)
    assert (quick.preemptions > 0) == preempts

    def whole(*given, **options):
        return replay(*given, **{**options, "coasts": False})

    monkeypatch.setattr("pagemill.planner.replica.replay", whole)
    plain = _simulate(roofline, ReplicaSettings(1), trace, 8.0, None, caching=True)
    assert plain == quick


def test_what_binds_is_told_of_a_whole_trial():
    size = plan_of(limits=Limits(0.07, 3.0)).options[0].size
    broken = [trial for trial in size.own_trials if trial.rate > size.capacity]
    assert not broken[0].cut
    assert any(trial.cut for trial in broken[1:])


def test_rows_that_nobody_needs_change_nothing_and_are_not_simulated_again(monkeypatch):
    roofline, limits = Roofline(read_device("l4"), read_shape("llama-3-8b"), "bfloat16"), Limits(0.2, 3.0)
    trace = load().requests(5.0, limits)
    few, some, many = (run_trial(roofline, ReplicaSettings(1, max_num_seqs=rows), trace, 5.0) for rows in (4, 64, 128))
    assert some == many
    assert some.most_rows <= 64
    assert few.most_rows > 4
    tried = []

    def noted(roofline, settings, *others):
        tried.append((settings.max_num_batched_tokens, settings.max_num_seqs))
        return run_trial(roofline, settings, *others)

    monkeypatch.setattr("pagemill.planner.search.run_trial", noted)
    choices = replace(ONE, max_num_seqs=(256, 512), max_num_batched_tokens=(2048, 1024))
    size = plan_of(limits=Limits(0.068, 3.0), choices=choices).options[0].size
    asked = {(settings.max_num_batched_tokens, settings.max_num_seqs) for settings, _ in size.trials}
    assert asked == {(2048, 256), (2048, 512), (1024, 256), (1024, 512)}
    assert asked - set(tried) == {(1024, 512)}


def test_sizes_that_do_not_hold_the_model_are_said_and_others_planned():
    plan = plan_of("h100", "llama-3-70b", choices=replace(ONE, ranks=(1, 2, 4)), rate=3.0)
    assert plan.refused.keys() == {1}
    assert "141.1 GB of weights" in plan.refused[1]
    assert {option.size.settings.ranks for option in plan.options} == {2, 4}
    assert plan.options[0].devices == min(option.devices for option in plan.options)
    with pytest.raises(ConfigError, match="choose a smaller dtype, a larger device or more of them"):
        plan_of("l4", "llama-3-70b", choices=ONE)


def test_limits_that_no_rate_meets_are_said():
    plan = plan_of(limits=Limits(0.001, 3.0))
    assert not plan.options
    assert re.match(r"--slo-tpot-p99 is 1 ms, and a request alone takes \d+", plan.refused[1])


def test_answers_of_one_token_meet_the_limit_per_token():
    one = Workload(Lengths(100, 0.5, 400), Lengths(1, 0.1, 1), 512)
    assert plan_of(workload=one, rate=5.0).options[0].at_share.tpot_p99_s == 0


def test_the_rate_of_the_whole_load_is_tried_where_the_search_begins_below_it():
    tried = []
    assert find_capacity(lambda rate: not tried.append(rate) and rate <= 10, 4.0, most=10.0) == 10
    assert tried == [4, 6, 9, 10]


def test_an_overload_is_seen_however_few_requests_are_asked_for():
    few = load(count=50)
    limits = Limits(0.2, 3.0)
    requests = few.requests(20.0, limits)
    assert requests[-1].arrival_s >= 0.9 * 3 * 3.0
    roofline = Roofline(read_device("l4"), read_shape("llama-3-8b"), "bfloat16")
    trial = run_trial(roofline, ReplicaSettings(1, max_num_seqs=4), few.requests(50.0, limits), 50.0)
    assert trial.waiting_grows
    assert not run_trial(roofline, ReplicaSettings(1), few.requests(1.0, limits), 1.0).waiting_grows


def test_a_short_trace_is_repeated_without_shared_prompts():
    source = Traced([TracedRequest(number, float(number), 50, 5, (number,)) for number in range(60)])
    taken = source.take(150, 1.0)
    assert len({one.hash_ids for one in taken}) == len(taken) == 150
    assert all(before.arrival_s < after.arrival_s for before, after in pairwise(taken))


def test_ranks_halve_what_they_share_and_pay_for_their_messages():
    from pagemill.simulate.step_time import StepWork

    device, model = read_device("h100"), read_shape("llama-3-8b")
    free = replace(device, all_reduce_s=0.0, peer_bytes_per_s=1e30, step_s=0.0, row_s=0.0)
    work = StepWork(8, 600, 8, 10**6, 10**5)
    one, two = (Roofline(free, model, "bfloat16", "auto", ranks) for ranks in (1, 2))
    assert two.seconds(work) == pytest.approx(one.seconds(work) / 2, rel=1e-6)
    assert two.shape.frame_bytes(16) == one.shape.frame_bytes(16) / 2
    paid = Roofline(device, model, "bfloat16", "auto", 2).seconds(work) - Roofline(
        replace(device, peer_bytes_per_s=1e30, all_reduce_s=0.0), model, "bfloat16", "auto", 2
    ).seconds(work)
    # Two all-reduces a layer of 600 x 4,096 numbers, as a ring of two; half of 8 x 128,256 logits; 65 collectives.
    sent = (2 * 32 * 2 * 600 * 4096 + 8 * 128256) / 2 * 2
    assert paid == pytest.approx(sent / (0.8 * 450e9) + 65e-5, rel=1e-6)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3, which does not divide 32"):
        Roofline(device, model, "bfloat16", "auto", 3)
    with pytest.raises(ConfigError, match="works as one with up to 8"):
        Roofline(device, model, "bfloat16", "auto", 16)


def test_kv_formats_hold_more_tokens_in_the_same_memory():
    rooflines = [
        Roofline(read_device("h100"), read_shape("llama-3-8b"), "bfloat16", kv)
        for kv in ("auto", "int8", "int4", "int4_mixed")
    ]
    auto, int8, int4, mixed = (one.shape.frame_bytes(16) for one in rooflines)
    assert 1.9 < auto / int8 < 2
    assert 3.3 < auto / int4 < 3.7
    assert mixed == int4
    assert [group.window for group in rooflines[-1].shape.groups.groups] == [None, 128]
    assert rooflines[-1].shape.slot_bytes == rooflines[-2].shape.slot_bytes


def test_conversations_find_what_was_said_before():
    talk = Workload(Lengths(60, 0.3, 200), Lengths(40, 0.3, 100), 4096, prefixes=1, prefix_len=512, turns=5, think_s=1)
    requests = talk.requests(4.0, 60.0)
    assert requests == talk.requests(4.0, 60.0)
    assert len(requests) == pytest.approx(240, rel=0.35)
    turns = [one for one in requests if one.prompt_len > 512 + 200]
    first = {one.continued_ids[:2]: one for one in requests}
    assert len(turns) > len(requests) / 4
    assert len(first) < len(requests) / 2, "turns of a conversation have the same name"
    for one in requests:
        assert len(one.hash_ids) == -(-one.prompt_len // MOONCAKE_BLOCK)
        assert one.continued_ids[: len(one.hash_ids)] == one.hash_ids
        assert one.length <= 4096
    trial = run_trial(
        Roofline(read_device("h100"), read_shape("llama-3-8b"), "bfloat16"), ReplicaSettings(1), requests, rate=4.0
    )
    assert trial.cached > 0.8, "the system prompt, and the turns before with their answers"
    plain = replace(talk, prefixes=0, prefix_len=0, turns=1.0)
    assert (
        run_trial(
            Roofline(read_device("h100"), read_shape("llama-3-8b"), "bfloat16"),
            ReplicaSettings(1),
            plain.requests(4.0, 20.0),
            4.0,
        ).cached
        == 0
    )


def test_bursts_are_as_bursty_as_asked():
    from statistics import mean, stdev

    for burstiness in (0.0, 0.5, 3.0):
        times = [one.arrival_s for one in replace(SHORT, burstiness=burstiness).requests(10.0, 300.0)]
        gaps = [after - before for before, after in pairwise(times)]
        assert mean(gaps) == pytest.approx(0.1, rel=0.2)
        assert stdev(gaps) / mean(gaps) == pytest.approx(burstiness, abs=0.35)


def test_a_trace_is_stretched_to_the_rate():
    trace = [TracedRequest(number, 0.5 * number + 0.1 * (number % 3), 50, 5) for number in range(200)]
    source = Traced(trace)
    assert source.rate == pytest.approx(2.0, rel=0.01)
    taken = source.take(100, 8.0)
    assert len(taken) == 100
    assert taken[-1].arrival_s == pytest.approx(99 / 8)
    assert [one.prompt_len for one in taken] == [50] * 100


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rate", "0"), "rate is 0; it must be a number of requests per second above 0"),
        (("--requests", "3"), "requests is 3; a p99 needs 50 or more"),
        (("--slo-tpot-p99", "-1"), "--slo-tpot-p99 is -1; it must be a number of milliseconds above 0"),
        (("--price", "-2"), "price is -2; it must be US dollars per device and hour, 0 or more"),
        (("--kv-cache-dtype", "int3"), "kv_cache_dtype is 'int3'; choose of auto,"),
        (("--max-num-seqs", "many"), "max_num_seqs is 'many'; give whole numbers above 0, by commas"),
        (("--max-num-batched-tokens", "16"), "max_num_batched_tokens is at most 16, below max_num_seqs (256)"),
        (("--workload", "cats"), "there is no workload 'cats'; choose one of sharegpt"),
        (("--trace", "none.csv"), "there is no trace none.csv"),
        (("--seed", "0", "--trace", "TRACE"), "--seed is 0 beside --trace, which says what comes and when"),
        (("--workload", "chat", "--trace", "TRACE"), "--workload is 'chat' beside --trace"),
        (
            ("--kv-host-memory", "1GiB", "--workload", "chat", "--device", "server-64"),
            "which would have no effect: one AMD EPYC 9554",
        ),
        (("--dtype", "int3"), "has no rate for int3; choose one of"),
        (("--tensor-parallel-size", "3"), "tensor_parallel_size is 3, which does not divide 32"),
        (("--plot", "plot.txt"), "its name must end in .svg, .png, .pdf"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:17:{second:02}.0000000,100,20\n" for second in range(60))
    )
    arguments = [str(path) if one == "TRACE" else one for one in arguments]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "llama-3-8b", "--device", "h100", *arguments])
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


def test_the_command_tells_people_and_programs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "60")  # narrower than the line that is to be pasted
    workload = tmp_path / "short.json"
    workload.write_text(json.dumps({"prompt": vars(SHORT.prompt), "output": vars(SHORT.output), "context": 512}))
    few = ["--requests", "60", "--max-num-seqs", "64", "--max-num-batched-tokens", "512", "--tensor-parallel-size", "1"]
    asked = ["plan", "llama-3-8b", "--device", "l4", "--workload", str(workload), "--rate", "5", *few]
    for extra in ([], ["--json", "--price", "2"], ["--plot", str(tmp_path / "plan.svg")]):
        with pytest.raises(SystemExit) as ended:
            main([*asked, *extra])
        assert not ended.value.code
        if not extra:
            said = capsys.readouterr().out
            assert "*modelled* by a roofline: Llama 3 8B in bfloat16 on NVIDIA L4 24 GB" in " ".join(said.split())
            assert re.search(
                r"^Serve it with \d+ x --dtype bfloat16 --max-num-seqs 64 .* per million output tokens$", said, re.M
            )
        elif extra[0] == "--json":
            found = json.loads(capsys.readouterr().out)
            (option,) = found["options"]
            assert found["modelled"] is True
            assert option["price_per_hour"] == pytest.approx(2 * option["replicas"])
            assert option["trials"]
    assert "modelled" in (tmp_path / "plan.svg").read_text()


def test_shapes_are_read_from_models_without_weights():
    known, found = read_shape("smollm2-135m"), find_shape("smollm2-135m")
    assert known == found
    from pagemill.hub import resolve_model

    path = str(resolve_model("smollm2-135m"))
    of_file = replace(find_shape(path), about=known.about, source=known.source)
    assert of_file == known


def test_a_request_that_only_the_check_sees_and_no_replica_can_hold_is_said():
    small = replace(read_device("l4"), memory_bytes=19_500_000_000)
    plain = [TracedRequest(number, number / 10, 300, 20) for number in range(150)]
    trace = [*plain[:100], replace(plain[100], prompt_len=60_000), *plain[101:]]
    plan = make_plan(small, read_shape("llama-3-8b"), "bfloat16", Load(Traced(trace), 10.0, 60), Limits(0.2, 3.0), ONE)
    assert plan.options == []
    assert "with 2 times as many requests as the search had" in plan.refused[1]
    assert "1 requests are too long for the pool; raise --requests" in plan.refused[1]


def test_settings_that_serve_the_whole_load_are_taken_however_little_more_that_is():
    one = _Search(read_device("l4"), read_shape("llama-3-8b"), "bfloat16", load(), Limits(0.2, 3.0), lambda line: None)
    size = one.with_settings(ReplicaSettings(1, "auto", 64, 512, 0))
    nearly = _Search(
        read_device("l4"), read_shape("llama-3-8b"), "bfloat16", load(rate=size.capacity), Limits(0.2, 3.0),
        lambda line: None,
    )  # fmt: skip
    before = replace(size, capacity=size.capacity / 1.01, settings=replace(size.settings, max_num_seqs=2))
    assert nearly._better(before, max_num_seqs=64).capacity == size.capacity  # noqa: SLF001


def test_json_has_no_numbers_that_only_python_reads():
    plan = plan_of()
    (option,) = plan.options
    timed_out = replace(option, at_share=replace(option.at_share, ttft_p99_s=math.inf, tpot_p99_s=math.nan))
    told = json.loads(json.dumps(as_dict(replace(plan, options=[timed_out])), allow_nan=False))
    at_share = told["options"][0]["at_share"]
    assert (at_share["ttft_p99_s"], at_share["tpot_p99_s"]) == (None, None)
    assert at_share["rate"] == option.at_share.rate


def test_all_workloads_can_be_drawn():
    for name in WORKLOADS:
        requests = workload_named(name).requests(5.0, 20.0)
        assert requests[0].arrival_s >= 0
        assert all(one.length <= WORKLOADS[name].context for one in requests)
    with pytest.raises(ConfigError, match="a workload's turns is 0; it must be at least 1"):
        replace(SHORT, turns=0)
    with pytest.raises(ConfigError, match="whole blocks of 512 tokens"):
        replace(SHORT, prefixes=2, prefix_len=100)


def test_a_model_whose_weights_are_elsewhere_has_a_shape(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = find_shape(str(tmp_path))
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (3, 4, 2, 16)


def test_what_a_plan_says_to_serve_with_is_of_all_ranks():
    choices = replace(ONE, ranks=(2,), kv_host_memory=(4 << 30,))
    plan = plan_of(device="h100", choices=choices)
    roofline = plan.options[0].size.roofline
    head = str(table(plan)[1])
    assert f"--kv-memory {2 * roofline.kv_bytes / 2**30:.1f}GiB" in head
    assert "--kv-host-memory 8GiB" in head


@pytest.mark.parametrize(("host", "said"), [(None, ""), (0, " --kv-host-memory 0")])
def test_a_plan_says_what_of_host_memory_is_not_an_engines_default(host, said):
    head = str(table(plan_of(device="h100", choices=replace(ONE, kv_host_memory=(host,))))[1])
    assert head.partition("GiB")[2].startswith(said + ", $")


def test_only_pairs_that_an_engine_takes_are_tried():
    choices = Choices(max_num_seqs=(1024, 256), max_num_batched_tokens=(512, 2048))
    assert choices.batches() == [(512, 256), (2048, 1024), (2048, 256)]
    plan = plan_of(choices=replace(choices, ranks=(1,)))
    best = plan.options[0].size.settings
    assert best.max_num_batched_tokens >= best.max_num_seqs
