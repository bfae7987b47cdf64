"""Conversations that go on by their token ids, on the default model: the same answers as without an interruption, from
the pool, from host memory and disk, after a restart; and what a session refuses."""

import asyncio

import pytest

from pagemill import LLM, BeamSearchParams, RequestOutputKind, SamplingParams, errors
from shallow import FRAME_BYTES

SETTINGS = {"dtype": "float32", "max_model_len": 640, "max_num_seqs": 4, "max_num_batched_tokens": 64}
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, logprobs=2)
TURNS = [
    "Tell me a long story about a lighthouse keeper and his dog, who live on a small island far from the coast.",
    "What was the name of the dog?",
    "And where did they go in winter?",
]


def user(text):
    return [{"role": "user", "content": text}]


def same(ours, theirs):
    """To the last bit: tokens, and the log probabilities behind them."""
    assert ours.token_ids == theirs.token_ids
    assert ours.logprobs == theirs.logprobs
    assert ours.text == theirs.text


@pytest.fixture(scope="module")
def whole(shallow_path):
    """Every turn's prompt and answer, computed at once by an engine that keeps nothing: (prompt token ids, answer)."""
    with LLM(str(shallow_path), enable_prefix_caching=False, **SETTINGS, kv_memory=60 * FRAME_BYTES) as llm:
        tokens, turns = [], []
        opening = llm.tokenizer.encode(llm.tokenizer.apply_chat_template(user(TURNS[0])), add_special_tokens=False)
        for text in TURNS:
            following = f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            tokens = tokens + llm.tokenizer.encode(following, add_special_tokens=False) if tokens else opening
            (output,) = llm.generate(tokens, PARAMS, use_tqdm=False)
            turns.append((tokens, output.outputs[0]))
            tokens = tokens + output.outputs[0].token_ids
        return turns


def flood(llm):
    """Other prompts, as many as the pool holds, so that everything else is evicted."""
    frames = llm.stats().frames
    prompts = [[900 + at] * 150 for at in range(frames // 10 + 1)]
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    llm.client.core.tiers.transfers.flush()


@pytest.mark.parametrize(
    "tier",
    [
        "pool",
        pytest.param("host", marks=pytest.mark.slow),
        "disk",
        pytest.param("restart", marks=pytest.mark.slow),
        "restart from host",
    ],
)
def test_a_resumed_session_answers_as_if_it_had_never_stopped(whole, shallow_path, tmp_path, tier):
    settings = {**SETTINGS, "kv_memory": 60 * FRAME_BYTES, "check_invariants": True}
    restarts = tier.startswith("restart")
    if tier in ("host", "restart from host"):
        settings["kv_host_memory"] = 200 * FRAME_BYTES
    if tier == "disk" or restarts:
        settings |= {"kv_disk_memory": "1GiB", "kv_disk_path": str(tmp_path)}
    if restarts:
        settings["session_path"] = str(tmp_path / "sessions")
    llm = LLM(str(shallow_path), **settings)
    known = 0
    for text, (tokens, answer) in zip(TURNS, whole, strict=True):
        output = llm.session("story").chat(user(text), PARAMS)
        assert output.prompt_token_ids == tokens
        same(output.outputs[0], answer)
        assert output.num_cached_tokens == known
        session = llm.session("story")
        assert session.token_ids == tokens + answer.token_ids
        known = (len(session.token_ids) - 1) // 16 * 16  # the last token was sampled and never computed
        tiers = {name: 0 for name in ("host", "disk") if f"kv_{name}_memory" in settings}
        assert session.kv_blocks == {"device": known // 16, **tiers}
        if tier not in ("pool", "restart"):
            flood(llm)
        if restarts:
            llm.close()
            llm = LLM(str(shallow_path), **settings)
        blocks = llm.session("story").kv_blocks
        assert sum(blocks.values()) == known // 16
        lies_in = {"restart": "disk", "restart from host": "disk", "pool": "device"}.get(tier, tier)
        assert blocks[lies_in] == known // 16
    assert [message["role"] for message in llm.session("story").messages] == ["user", "assistant"] * 3
    assert llm.stats().frames_active == 0
    llm.close()


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2-135m", max_model_len=256, kv_memory="64MiB", max_num_seqs=8, max_sessions=3) as llm:
        yield llm


@pytest.fixture
def session(llm):
    yield llm.session("s")
    for record in llm.sessions():
        llm.session(record.name).delete()
    assert llm.stats().frames_active == 0


GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def test_prompts_go_on_where_the_last_ended(llm, session):
    first = session.generate("The capital of France is", GREEDY)
    assert session.token_ids == first.prompt_token_ids + first.outputs[0].token_ids
    second = session.generate(" The capital of Japan is", GREEDY)
    more = llm.tokenizer.encode(" The capital of Japan is", add_special_tokens=False)
    assert second.prompt_token_ids == first.prompt_token_ids + first.outputs[0].token_ids + more
    third = session.generate([28, 198], GREEDY)
    assert third.prompt_token_ids[-2:] == [28, 198]
    assert session.token_ids == third.prompt_token_ids + third.outputs[0].token_ids
    assert session.messages is None
    assert session.record.num_turns == 3


def test_an_end_of_sequence_gives_way_to_what_follows(llm, session):
    question = user("What is the capital of France? Answer in one word.")
    first = session.chat(question, SamplingParams(temperature=0.0, max_tokens=40))
    assert first.outputs[0].finish_reason == "stop"
    assert session.token_ids[-1] == llm.tokenizer.eos_token_id
    second = session.chat(user("And of Italy?"), GREEDY)
    answer = {"role": "assistant", "content": first.outputs[0].text}
    rendered = llm.tokenizer.apply_chat_template([*question, answer, *user("And of Italy?")])
    assert llm.tokenizer.decode(second.prompt_token_ids) == rendered
    end = SamplingParams(allowed_token_ids=[llm.tokenizer.eos_token_id])
    ended = llm.session("t").generate([28, 198], end)
    assert ended.outputs[0].token_ids == [llm.tokenizer.eos_token_id]
    assert llm.session("t").generate([30], GREEDY).prompt_token_ids == [28, 198, 30]


def test_a_stop_token_with_which_the_template_ends_an_answer_stands_there_once(llm, session):
    template = (
        "{% for m in messages %}{{ 'Answer:' * (m.role == 'assistant') }}{{ m.content }}<|endoftext|>{% endfor %}"
        "{{ 'Answer:' * add_generation_prompt }}"
    )
    (end,) = llm.tokenizer.encode("<|endoftext|>", add_special_tokens=False)
    stopped = SamplingParams(allowed_token_ids=[end], stop_token_ids=[end], ignore_eos=True)
    first = session.chat(user("Hi"), stopped, chat_template=template)
    assert first.outputs[0].token_ids == [end]
    second = session.chat(user("Ho"), GREEDY, chat_template=template)
    assert llm.tokenizer.decode(second.prompt_token_ids) == "Hi<|endoftext|>Answer:<|endoftext|>Ho<|endoftext|>Answer:"


def test_a_template_that_writes_earlier_turns_anew_is_given_the_whole(llm, session):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last or m.role == 'user' else '(said)' }}\n"
        "{% endfor %}assistant:"
    )
    session.chat(user("What is the capital of France? " * 3), GREEDY, chat_template=template)
    second = session.chat(user("And of Italy?"), GREEDY, chat_template=template)
    question = "user: " + "What is the capital of France? " * 3 + "\n"
    assert second.prompt == question + "assistant: (said)\nuser: And of Italy?\nassistant:"
    assert second.prompt_token_ids == llm.tokenizer.encode(second.prompt, add_special_tokens=False)
    common = len(llm.tokenizer.encode(question, add_special_tokens=False)) // 16 * 16
    assert common <= second.num_cached_tokens < len(second.prompt_token_ids) - 16
    assert session.token_ids == second.prompt_token_ids + second.outputs[0].token_ids


def test_a_fork_shares_all_blocks(llm, session):
    session.chat(user("Tell me a story about a ship. " * 5), SamplingParams(temperature=0.0, max_tokens=33))
    fork = session.fork("t")
    assert fork.token_ids == session.token_ids
    for each in (session, fork):
        output = each.chat(user("Why?"), GREEDY)
        assert output.num_cached_tokens >= (len(fork.token_ids) - 40) // 16 * 16
    assert session.token_ids == fork.token_ids
    fork.chat(user("Why not?"), GREEDY)
    assert session.record.num_turns + 1 == fork.record.num_turns


def test_a_turn_that_failed_leaves_no_trace(llm, session, monkeypatch):
    session.generate("Once", GREEDY)
    before = session.record

    def faulty(plan):
        raise RuntimeError("no luck")

    with monkeypatch.context() as patch:
        patch.setattr(llm.client.core.executor, "run", faulty)
        assert session.generate(" more", GREEDY).outputs[0].finish_reason == "error"
    for bad, words in [
        (lambda: session.generate(" more", SamplingParams(n=2)), "n is 2, but a session goes on from one answer"),
        (
            lambda: session.generate(" more", BeamSearchParams(beam_width=2, max_tokens=4)),
            "SamplingParams, not BeamSearchParams",
        ),
        (lambda: session.generate([49152], GREEDY), "49152"),
        (lambda: session.generate({"prompt": "x"}, GREEDY), "text or token ids, not dict"),
        (lambda: session.chat(user("x"), GREEDY), "goes on with prompts, not with messages"),
        (
            lambda: session.generate([5] * 250, GREEDY),
            r"max_model_len \(256\).*; 5 of them are those of session 's'",
        ),
    ]:
        with pytest.raises(errors.InvalidRequestError, match=words):
            bad()
    assert session.record == before
    llm.session("t").chat(user("x"), GREEDY)
    for messages in (None, [], user("x")[0]):
        with pytest.raises(errors.InvalidRequestError, match="must be a list of at least one message") as caught:
            llm.session("t").chat(messages, GREEDY)
        assert caught.value.param == "messages"
    with pytest.raises(errors.InvalidRequestError, match="goes on with messages, not with a prompt"):
        llm.session("t").generate("x", GREEDY)


def test_limits(llm, session):
    for name in ("s", "t", "u"):
        llm.session(name).generate("Once", GREEDY)
    with pytest.raises(errors.SessionLimitError, match="max_sessions is 3"):
        llm.session("v").generate("Once", GREEDY)
    llm.session("t").delete()
    llm.session("v").generate("Once", GREEDY)
    assert [record.name for record in llm.sessions()] == ["v", "u", "s"]
    with pytest.raises(errors.ConfigError, match="session_timeout_s is 0"):
        LLM("smollm2-135m", session_timeout_s=0)


def test_a_session_keeps_no_long_texts_that_its_template_leaves_out(llm, session):
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "x" * 10_000}
    llm.session("s").chat([*user("Once"), said, *user("Go on")], GREEDY)
    for name, messages in (("s", [*user("And?"), said, *user("Go on")]), ("t", [{**said, "name": "x" * 60_000}])):
        with pytest.raises(errors.InvalidRequestError, match="keeps at most") as error:
            llm.session(name).chat(messages, GREEDY)
        assert error.value.param == "messages"
    assert llm.session("s").record.num_turns == 1


@pytest.fixture
def served_session(served):
    async def forget(name):
        return await served.llm.session(name).delete()

    yield served.llm.session("s")
    for record in served.run(served.llm.sessions()):
        served.run(forget(record.name))
    served.wait_until_idle()


LONG = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


async def read(stream):
    return [output async for output in stream]


def test_an_asynchronous_session(served, served_session):
    async def talk():
        outputs = await read(served_session.chat(user("Who are you?"), GREEDY))
        assert outputs[-1].finished
        fork = await served_session.fork("t")
        await read(fork.chat(user("Why?"), SamplingParams(best_of=3, seed=1, max_tokens=4)))
        await read(served.llm.session("p").generate("Once", GREEDY))
        return (await served_session.record()), (await fork.record()), await served.llm.sessions()

    ours, theirs, records = served.run(talk())
    assert (ours.num_turns, theirs.num_turns) == (1, 2)
    assert theirs.token_ids[: len(ours.token_ids) - 1] == ours.token_ids[:-1]
    assert {record.name for record in records} == {"s", "t", "p"}


@pytest.mark.parametrize("how", ["abort", "abort by name", "leave", "cancel"])
def test_an_aborted_answer_stays_and_one_that_nobody_reads_leaves_no_trace(served, served_session, how):
    async def talk():
        await read(served_session.generate("Once", GREEDY))
        before = await served_session.record()
        stream = await served_session.submit(" upon a time", LONG, "the-turn")
        first = await anext(stream)
        with pytest.raises(errors.SessionBusyError, match="'s' is in use by another request"):
            await served_session.submit(" there", GREEDY)
        if how == "leave":
            stream.close()
        elif how == "cancel":
            task = asyncio.ensure_future(read(stream))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            stream.close()
        else:
            if how == "abort":
                stream.abort()
            else:
                await served.llm.abort("the-turn")
            rest = await read(stream)
            assert rest[-1].outputs[0].finish_reason == "abort"
            first.outputs[0].token_ids += [token for output in rest for token in output.outputs[0].token_ids]
            stream.close()
        return before, first, stream.prompt_token_ids, await served_session.record()

    before, first, prompt, after = served.run(talk())
    if how.startswith("abort"):
        assert after.token_ids == prompt + first.outputs[0].token_ids
        assert after.num_turns == 2
    else:
        assert after == before


def test_whoever_leaves_before_a_turn_has_begun_gives_the_session_back(served, served_session):
    async def leave():
        for attempt in range(20):
            task = asyncio.ensure_future(served_session.submit("many words " * 900, GREEDY))
            await asyncio.sleep(0.0004 * attempt)
            task.cancel()
            (stream,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(stream, BaseException):
                stream.close()
        await served.llm.respond()  # what has been begun for somebody who has left ends
        return await read(served_session.generate("Once", GREEDY))

    assert served.run(leave())[-1].finished


def test_sessions_end_with_their_engine():
    llm = LLM("smollm2-135m", max_model_len=64, kv_memory="8MiB", max_num_seqs=2)
    session = llm.session("a")
    llm.close()
    for use in (llm.sessions, lambda: session.messages, lambda: session.fork("b")):
        with pytest.raises(errors.EngineDeadError, match="this LLM is closed"):
            use()
