"""The LLM class on the default model: what it accepts, returns, refuses, and that nothing stays behind."""

import concurrent.futures
import gc
import signal
import threading
import weakref

import pytest

from pagemill import LLM, BeamSearchParams, SamplingParams, TenantLimits, errors
from waiting import wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2-135m", max_model_len=256, kv_memory="64MiB", max_num_seqs=16) as llm:
        yield llm
    llm.close()
    with pytest.raises(errors.EngineDeadError, match="closed"):
        llm.generate("x", use_tqdm=False)


def test_a_closed_engine_gives_its_memory_back():
    """Before anything else collects what knows each other; a thread that makes pages ahead holds it a little longer."""
    llm = LLM("smollm2-135m", max_model_len=64, kv_memory="8MiB", max_num_seqs=2)
    core = llm.client._core  # noqa: SLF001
    parts = [weakref.ref(part) for part in (core.executor.pool, core.executor.decoder)]
    del core
    gc.disable()
    try:
        llm.close()
        wait_until(lambda: not any(part() for part in parts), "its pool or its weights are still there")
    finally:
        gc.enable()


@pytest.fixture(autouse=True)
def _nothing_stays_behind(request):
    yield
    if "llm" in request.fixturenames:
        stats = request.getfixturevalue("llm").stats()
        assert (stats.running, stats.waiting, stats.frames_active) == (0, 0, 0)


def test_outputs_are_in_the_order_of_the_prompts(llm):
    prompts = ["The capital of France is", "1, 2, 3, 4,", {"prompt_token_ids": llm.tokenizer.encode("Once upon a")}]
    params = [GREEDY, SamplingParams(temperature=0.0, max_tokens=2), GREEDY]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == [prompts[0], prompts[1], None]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 2, 4]
    assert outputs[0].outputs[0].text.startswith(" Paris")
    assert outputs[0].outputs[0].finish_reason == "length"
    for output in outputs:
        assert output.finished
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)
        metrics = output.metrics
        assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
        assert metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time
    alone = llm.generate(prompts[1], params[1], use_tqdm=False)
    assert alone[0].outputs == outputs[1].outputs


def test_threads_take_turns(llm):
    """Before, steps of one ran amid those of another: unreadable errors, and now and then a wrong answer."""
    prompts = [f"{number}, {number + 1}," for number in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    alone = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]

    def ask(prompt):
        assert llm.stats().running == 0
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        assert list(threads.map(ask, prompts)) == alone


def test_n_sequences_come_in_order_and_a_seed_repeats_them(llm):
    params = SamplingParams(n=3, seed=7, max_tokens=4, logprobs=1, prompt_logprobs=0)
    first, second = (llm.generate("My favourite", params, use_tqdm=False)[0] for _ in range(2))
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in first.outputs}) > 1
    assert [output.token_ids for output in first.outputs] == [output.token_ids for output in second.outputs]
    output = first.outputs[0]
    assert [next(iter(position)) for position in output.logprobs] == output.token_ids
    assert output.cumulative_logprob == pytest.approx(sum(next(iter(p.values())).logprob for p in output.logprobs))
    assert first.prompt_logprobs[0] is None
    assert [next(iter(p)) for p in first.prompt_logprobs[1:]] == first.prompt_token_ids[1:]


def test_best_of_returns_the_likeliest_of_what_n_would_have_sampled(llm):
    every = llm.generate("My favourite", SamplingParams(n=5, seed=7, max_tokens=4, logprobs=0), use_tqdm=False)[0]
    best = llm.generate("My favourite", SamplingParams(n=2, best_of=5, seed=7, max_tokens=4), use_tqdm=False)[0]
    ranked = sorted(every.outputs, key=lambda output: -output.cumulative_logprob)
    assert [output.index for output in ranked] != list(range(5))
    assert [output.index for output in best.outputs] == [0, 1]
    assert [output.token_ids for output in best.outputs] == [output.token_ids for output in ranked[:2]]
    assert [output.cumulative_logprob for output in best.outputs] == [o.cumulative_logprob for o in ranked[:2]]
    assert best.outputs[0].logprobs is None
    asked = llm.generate("My favourite", SamplingParams(best_of=5, seed=7, max_tokens=4, logprobs=1), use_tqdm=False)[0]
    assert [next(iter(position)) for position in asked.outputs[0].logprobs] == ranked[0].token_ids


def test_beam_search_finds_likelier_sequences_than_greedy(llm):
    prompts = ["Once upon a time", "The capital of France is"]
    params = BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=0.0)
    outputs = llm.beam_search(prompts, params)
    greedy = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, logprobs=0), use_tqdm=False)
    for prompt, output, likeliest in zip(prompts, outputs, greedy, strict=True):
        sums = [sequence.cum_logprob for sequence in output.sequences]
        assert len(sums) == 4
        assert sums == sorted(sums, reverse=True)
        assert sums[0] >= likeliest.outputs[0].cumulative_logprob - 1e-4
        best = output.sequences[0]
        assert best.tokens[: len(likeliest.prompt_token_ids)] == likeliest.prompt_token_ids
        assert best.text == llm.tokenizer.decode(best.tokens)
        assert best.text.startswith(prompt)
    assert any(
        o.sequences[0].cum_logprob > g.outputs[0].cumulative_logprob for o, g in zip(outputs, greedy, strict=True)
    )
    (alone,) = llm.beam_search(prompts[0], params)
    assert alone == outputs[0]


@pytest.mark.parametrize("include", [False, True])
def test_a_search_that_ends_in_a_stop_token_keeps_its_text_apart(llm, include):
    chat = "<|im_start|>user\nWhat is 2 + 2? Answer in one word.<|im_end|>\n<|im_start|>assistant\n"
    params = BeamSearchParams(4, 20, include_stop_str_in_output=include)
    ended = [s for s in llm.beam_search(chat, params)[0].sequences if s.finish_reason == "stop"]
    assert ended
    for sequence in ended:
        assert sequence.tokens[-1] == 2
        assert sequence.text == llm.tokenizer.decode(sequence.tokens if include else sequence.tokens[:-1])


def test_a_search_that_fails_says_so_and_the_others_go_on(llm, monkeypatch):
    sampler = llm.client.core.executor.sampler
    sample, calls = sampler.sample, iter(range(100))

    def damaged(logits, rows):
        if next(calls) == 3:
            logits[0] = float("nan")
        return sample(logits, rows)

    monkeypatch.setattr(sampler, "sample", damaged)
    failed, fine = llm.beam_search(["Once upon", "The capital of France is"], BeamSearchParams(2, 5, ignore_eos=True))
    assert isinstance(failed.error, errors.StepFailedError)
    assert failed.sequences == []
    assert fine.error is None
    assert len(fine.sequences) == 2


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.7}, "temperature"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"ignore_eos": None}, "ignore_eos"),
        ({"beam_width": 17}, "beam_width"),
        ({"max_tokens": 300}, "max_tokens"),
    ],
)
def test_a_search_that_can_not_be_is_refused_by_name(llm, params, param):
    with pytest.raises(errors.InvalidRequestError) as caught:
        llm.beam_search("x", BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **params}))
    assert caught.value.param == param
    with pytest.raises(errors.SamplingParamsError, match="must be BeamSearchParams"):
        llm.beam_search("x", SamplingParams())
    with pytest.raises(errors.UnknownArgumentError, match="did you mean 'beam_width'"):
        BeamSearchParams(beam_with=3, max_tokens=4)


def test_chat_takes_one_conversation_or_several(llm):
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    one = llm.chat(conversation, GREEDY, use_tqdm=False)
    two = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert len(one) == 1
    assert [output.outputs[0].text for output in two] == [one[0].outputs[0].text] * 2
    assert one[0].prompt.count("<|im_start|>") == 3  # the template's own system message, the question, the answer
    for wrong in (None, conversation[0], [None], [[]], "hi", ["hi"]):
        with pytest.raises(errors.InvalidRequestError, match="it must be a list of at least one message, each a dict"):
            llm.chat(wrong, GREEDY, use_tqdm=False)
    with pytest.raises(errors.InvalidRequestError, match="messages is 'hi'; "):
        llm.chat("hi")


def test_a_stop_string_ends_its_request_alone(llm):
    whole = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    text = whole[0].outputs[0].text
    stop = text[4:9]
    stopped, other = llm.generate(
        ["The capital of France is"] * 2,
        [
            SamplingParams(temperature=0.0, max_tokens=12, stop=stop),
            SamplingParams(temperature=0.0, max_tokens=12),
        ],
        use_tqdm=False,
    )
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert other.outputs[0].text == text


def test_a_stop_string_ends_the_sequence_in_the_engine_too(llm):
    before = llm.stats().generated_tokens
    llm.generate(
        "1, 2, 3", SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, stop=[","]), use_tqdm=False
    )
    assert llm.stats().generated_tokens - before < 100


def test_a_repeated_prompt_is_found_in_the_prefix_cache_unless_salted_otherwise(llm):
    prompt = "A rather long prompt about nothing at all, " * 4
    llm.generate({"prompt": prompt, "cache_salt": "mine"}, GREEDY, use_tqdm=False)
    again = llm.generate({"prompt": prompt, "cache_salt": "mine"}, GREEDY, use_tqdm=False)[0]
    other = llm.generate({"prompt": prompt, "cache_salt": "theirs"}, GREEDY, use_tqdm=False)[0]
    assert again.num_cached_tokens >= 16
    assert other.num_cached_tokens == 0
    assert again.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("", errors.EmptyPromptError),
        ([49152], errors.TokenOutOfVocabularyError),
        ([5] * 256, errors.PromptTooLongError),
        ({"prompt": "x", "salt": ""}, errors.UnknownArgumentError),
    ],
)
def test_one_bad_prompt_stops_the_list_before_anything_runs(llm, bad, error):
    before = llm.stats()
    with pytest.raises(error):
        llm.generate(["good", bad], GREEDY, use_tqdm=False)
    assert llm.stats() == before
    assert llm.generate("good", GREEDY, use_tqdm=False)[0].finished


def test_a_request_that_fails_says_so_and_the_others_go_on(llm, monkeypatch):
    run = llm.client.core.executor.run

    def faulty(plan):
        if 7 in plan.query_lens.tolist():
            raise RuntimeError("no luck")
        return run(plan)

    monkeypatch.setattr(llm.client.core.executor, "run", faulty)
    failed, fine = llm.generate([[901, 902, 903, 904, 905, 906, 907], [911, 912, 913]], GREEDY, use_tqdm=False)
    assert failed.finished
    assert failed.outputs[0].finish_reason == "error"
    assert isinstance(failed.outputs[0].error, errors.StepFailedError)
    assert "no luck" in str(failed.outputs[0].error)
    assert (fine.outputs[0].finish_reason, fine.outputs[0].error) == ("length", None)


def test_a_step_without_rows_that_fails_is_logged_and_not_run_again(llm, monkeypatch, caplog):
    """It cannot be halved; nobody's tokens are lost with it, so nobody else is told."""
    core, plans = llm.client.core, []

    def faulty(plan):
        plans.append(plan)
        raise RuntimeError("no luck")

    with monkeypatch.context() as patched:
        patched.setattr(core.executor, "run", faulty)
        patched.setattr(core.scheduler, "schedule", lambda now: core.scheduler.state.batch.plan({}))
        assert core.step() == []
    assert [len(plan.rows) for plan in plans] == [0]
    assert "a step that concerned no request failed: RuntimeError: no luck" in caplog.text
    (fine,) = llm.generate([[911, 912, 913]], GREEDY, use_tqdm=False)
    assert fine.outputs[0].finish_reason == "length"


def test_what_can_never_run_ends_with_an_error(llm):
    """There should be no such request; a bug that lets one in is told of, and does not spin."""
    core = llm.client.core
    assert core.step() == []
    tenant = core.scheduler.tenants["default"]
    item = llm.frontend.inputs.process("Hello", SamplingParams(n=2, max_tokens=3), "stuck")
    core.add_request(item.asked)
    allowed, tenant.max_rows = tenant.max_rows, 0
    try:
        assert core.step() == [], "the next step may find what this one has left"
        outputs = core.step()
    finally:
        tenant.max_rows = allowed
    assert [(output.index, output.finish_reason, output.error.error_type) for output in outputs] == [
        (0, "error", "StepFailedError"),
        (1, "error", "StepFailedError"),
    ]
    assert "report it" in outputs[0].error.message
    assert not core.has_work()


def test_as_many_parameters_as_prompts(llm):
    with pytest.raises(errors.InvalidRequestError, match="1 params were given for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)


def test_an_unknown_argument_of_generate_names_the_nearest(llm):
    with pytest.raises(errors.UnknownArgumentError, match="'use_tqmd'; did you mean 'use_tqdm'"):
        llm.generate("a", use_tqmd=False)


def test_prompts_and_parameters_of_a_wrong_type_are_refused_by_name(llm):
    with pytest.raises(errors.InvalidRequestError, match="prompts is None; it must be a text"):
        llm.generate(None)
    with pytest.raises(errors.SamplingParamsError, match=r"\{'max_tokens': 2\}; it must be SamplingParams"):
        llm.generate("a", {"max_tokens": 2})


@pytest.mark.parametrize("model", [None, "", 7])
def test_a_model_that_is_no_name_is_refused(model):
    with pytest.raises(errors.ConfigError, match="it must be a path, a name"):
        LLM(model)


def test_the_pool_is_printed_and_vllms_short_dtypes_are_known(capsys):
    with LLM("smollm2-135m", dtype="half", max_model_len=64, kv_memory="4MiB") as small:
        assert small.config.dtype == "float16"
    assert "KV pool 4 MiB" in capsys.readouterr().err


def test_a_context_of_one_token_is_enough_for_a_prompt_without_an_answer():
    with LLM("smollm2-135m", max_model_len=1) as small:
        prompt = {"prompt_token_ids": [504]}
        (output,) = small.generate(prompt, SamplingParams(max_tokens=0), use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        with pytest.raises(errors.PromptTooLongError, match=r"max_model_len is 1; raise max_model_len$"):
            small.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(
        errors.UnknownArgumentError, match="LLM has no argument 'max_modellen'; did you mean 'max_model_len'"
    ):
        LLM("smollm2-135m", max_modellen=5)


def test_ctrl_c_ends_the_call_and_gives_everything_back(llm):
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
    timer.join()
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.frames_active) == (0, 0, 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate("good", GREEDY, use_tqdm=False)[0].finished


def test_what_a_signals_handler_raises_in_a_step_is_not_lost(llm, monkeypatch):
    """Within a step it is taken for a fault, and the step runs again."""
    step, ran = llm.client.core.executor.submit, []

    def submit(plan):
        ran.append(plan.step)
        if len(ran) == 3:
            signal.raise_signal(signal.SIGALRM)
        return step(plan)

    def late(*_):
        raise TimeoutError("late")

    before = signal.signal(signal.SIGALRM, late)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(llm.client.core.executor, "submit", submit)
            with pytest.raises(TimeoutError, match="late"):
                llm.generate(["a", "b"], SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
        assert signal.getsignal(signal.SIGALRM) is late
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(ran) < 10
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.frames_active) == (0, 0, 0)
    assert llm.generate("good", GREEDY, use_tqdm=False)[0].finished


def test_truth_values_are_no_token_ids(llm):
    with pytest.raises(errors.InvalidRequestError, match=r"must be a list of integers, not \[True, 5\]"):
        llm.generate([[True, 5]], GREEDY, use_tqdm=False)


def test_a_prompt_that_may_not_even_wait_is_not_counted_against_its_minute(llm):
    llm.set_tenant("default", TenantLimits(max_waiting=0, requests_per_minute=5, tokens_per_minute=100))
    try:
        with pytest.raises(errors.TooManyWaitingError):
            llm.generate("x", GREEDY, use_tqdm=False)
        left = {name: status.remaining for name, status in llm.frontend.rates.status("default").items()}
    finally:
        llm.set_tenant("default", TenantLimits())
    assert left == {"requests": 5, "tokens": 100}
