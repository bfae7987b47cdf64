"""AsyncLLM with a real engine process: deltas, aborts, faults, and that the process never outlives its use."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import httpx
import pytest

from pagemill import AsyncLLM, BeamSearchParams, RequestOutputKind, SamplingParams, errors
from pagemill.frontend import frontend, process_client
from pagemill.kvcache.store_archive import list_stores
from pagemill.tenant_limits import TenantLimits

LONG = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, output_kind=RequestOutputKind.DELTA)


async def read(llm, prompt, params, *args, **kwargs):
    return [output async for output in llm.generate(prompt, params, *args, **kwargs)]


def alive(pid):
    """A process that has ended is dead even where nobody has taken note of it (a zombie)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def test_deltas_add_up(served):
    params = SamplingParams(n=2, seed=1, max_tokens=6, logprobs=0, output_kind=RequestOutputKind.DELTA)
    outputs = served.run(read(served.llm, "My name is", params, "the-id"))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"the-id"}
    for index in (0, 1):
        deltas = [new for output in outputs for new in output.outputs if new.index == index]
        tokens = [token for new in deltas for token in new.token_ids]
        assert len(deltas) > 1
        assert len(tokens) == 6
        assert len([position for new in deltas for position in new.logprobs]) == 6
        tokenizer = served.run(served.llm.tokenizer())
        assert "".join(new.text for new in deltas) == tokenizer.decode(tokens)
        assert deltas[-1].finish_reason == "length"
    served.wait_until_idle()


def test_outputs_hold_all_that_has_come_unless_others_are_asked_for(served):
    params = SamplingParams(n=2, seed=1, max_tokens=6)
    outputs = served.run(read(served.llm, "My name is", params))
    assert len(outputs) > 1
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for before, after in itertools.pairwise(outputs):
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.text.startswith(old.text)
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
    assert [len(output.token_ids) for output in outputs[-1].outputs] == [6, 6]
    params = dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
    (only,) = served.run(read(served.llm, "My name is", params))
    assert [each.token_ids for each in only.outputs] == [each.token_ids for each in outputs[-1].outputs]
    served.wait_until_idle()


class Reader:
    """Takes every second delta; `wrong` is raised by the third."""

    def __init__(self, wrong=None):
        self.taken, self.num_asked, self.wrong = [], 0, wrong

    def ready(self):
        self.num_asked += 1
        return self.num_asked % 2 == 0

    def take(self, output):
        self.taken.append(output)
        if self.wrong is not None and len(self.taken) == 3:
            raise self.wrong


async def read_beside(llm, reader):
    """Returns the deltas that a reader beside the consumer has left for the consumer."""
    stream = await llm.submit("My name is", dataclasses.replace(LONG, max_tokens=20))
    stream.hand_to(reader)
    async with contextlib.aclosing(stream):
        return [output async for output in stream]


def test_a_reader_and_the_consumer_get_all_between_them(served):
    reader = Reader()
    left = served.run(read_beside(served.llm, reader))
    assert len(reader.taken) > 3
    assert len(left) > 3
    assert [output.finished for output in left] == [False] * (len(left) - 1) + [True]
    whole = served.run(read(served.llm, "My name is", dataclasses.replace(LONG, max_tokens=20)))
    gotten = sorted(token for output in [*reader.taken, *left] for new in output.outputs for token in new.token_ids)
    assert gotten == sorted(token for output in whole for new in output.outputs for token in new.token_ids)
    served.wait_until_idle()


def test_what_a_reader_raises_ends_its_stream_alone(served):
    other = read(served.llm, "Another", SHORT)
    reader = Reader(ValueError("no room"))

    async def both():
        return await asyncio.gather(read_beside(served.llm, reader), other, return_exceptions=True)

    raised, answer = served.run(both())
    assert raised is reader.wrong
    assert answer[-1].finished
    assert len(reader.taken) == 3
    served.wait_until_idle()


def test_the_best_of_several_come_once_at_the_end(served):
    params = SamplingParams(n=2, best_of=4, seed=3, max_tokens=6)
    (only,) = served.run(read(served.llm, "My favourite", params))
    assert only.finished
    assert [len(output.token_ids) for output in only.outputs] == [6, 6]
    assert only.outputs[0].cumulative_logprob >= only.outputs[1].cumulative_logprob


def test_a_fork_answers_as_its_tokens_alone_and_shares_what_is_there(served):
    text = "Once upon a time, in a village by the sea, there lived an old man who"
    params = SamplingParams(
        temperature=0.9, seed=4, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def scenario():
        origin = await served.llm.submit(text, LONG, "origin")
        got = 0
        async for output in origin:
            got += len(output.outputs[0].token_ids)
            if got >= 25:
                break
        fork = await served.llm.fork("origin", params, "fork")
        assert fork.prompt_token_ids[: len(origin.prompt_token_ids)] == origin.prompt_token_ids
        assert len(fork.prompt_token_ids) >= len(origin.prompt_token_ids) + 25
        outputs = [output async for output in fork]
        origin.close()
        with pytest.raises(errors.RequestNotFoundError, match="no request 'origin' is running"):
            await served.llm.fork("origin")
        search = await served.llm.submit(text, BeamSearchParams(2, 500, ignore_eos=True), "search")
        with pytest.raises(errors.InvalidRequestError, match="is a beam search"):
            await served.llm.fork("search")
        search.close()
        alone = await read(served.llm, {"prompt_token_ids": fork.prompt_token_ids, "cache_salt": "alone"}, params)
        return fork, outputs, alone

    fork, outputs, alone = served.run(scenario())
    tokens, expected = ([t for o in run for c in o.outputs for t in c.token_ids] for run in (outputs, alone))
    assert tokens == expected
    assert len(tokens) == 12
    assert outputs[-1].num_cached_tokens == len(fork.prompt_token_ids) - 1
    assert alone[-1].num_cached_tokens == 0
    served.wait_until_idle()


def test_requests_run_together_and_do_not_mix(served):
    prompts = [f"{word} is a" for word in ("Paris", "Tokyo", "Bach", "Gold")]

    async def together():
        return await asyncio.gather(*(read(served.llm, prompt, SHORT) for prompt in prompts))

    texts = ["".join(new.text for output in outputs for new in output.outputs) for outputs in served.run(together())]
    for prompt, text in zip(prompts[:2], texts, strict=False):
        alone = served.run(read(served.llm, prompt, SHORT))
        assert "".join(new.text for output in alone for new in output.outputs) == text


def test_nobody_need_be_told_of_a_request_that_has_ended(served, monkeypatch):
    monkeypatch.setattr(served.llm, "on_request_end", [])
    assert served.run(read(served.llm, "Once", SHORT))[-1].finished
    assert served.llm.error is None


def test_abort_ends_the_iterator_and_gives_everything_back(served):
    async def aborted():
        outputs = []
        async for output in served.llm.generate("Once", LONG, "to-abort"):
            outputs.append(output)
            await served.llm.abort("to-abort")
        return outputs

    outputs = served.run(aborted())
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert sum(len(output.outputs[0].token_ids) for output in outputs) < 1000
    served.wait_until_idle()


@pytest.mark.parametrize("how", ["leave", "cancel", "close", "aclosing what generates", "aclosing a stream"])
def test_whoever_leaves_early_leaves_nothing_behind(served, how):
    async def leave():
        if how == "cancel":
            task = asyncio.ensure_future(read(served.llm, "Once", LONG))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "leave":
            async for _ in served.llm.generate("Once", LONG):
                break
        elif how.startswith("aclosing"):
            generates = how == "aclosing what generates"
            outputs = served.llm.generate("Once", LONG) if generates else await served.llm.submit("Once", LONG)
            async with contextlib.aclosing(outputs):
                await anext(outputs)
            with pytest.raises(StopAsyncIteration):
                await anext(outputs)
        else:
            stream = await served.llm.submit("Once", LONG)
            await anext(stream)
            stream.close()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    served.run(leave())
    served.wait_until_idle()


def test_a_slow_consumer_gets_what_has_gathered_in_one_delta(served):
    async def slow():
        stream = await served.llm.submit("Count:", dataclasses.replace(LONG, max_tokens=8))
        await anext(stream)
        while not stream.request.finished:
            await asyncio.sleep(0.01)
        return [output async for output in stream]

    (rest,) = served.run(slow())
    assert rest.finished
    assert len(rest.outputs[0].token_ids) == 7


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", errors.EmptyPromptError),
        ([49152], errors.TokenOutOfVocabularyError),
        ([5] * 4096, errors.PromptTooLongError),
    ],
)
def test_bad_input_has_its_own_error(served, prompt, error):
    with pytest.raises(error):
        served.run(read(served.llm, prompt, SHORT))


def test_a_stop_string_ends_the_sequence_in_the_engine_too(served):
    before = served.stats().generated_tokens
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True, stop=[","])
    outputs = served.run(read(served.llm, "1, 2, 3", params))
    assert outputs[-1].outputs[0].stop_reason == ","
    assert served.wait_until_idle().generated_tokens - before < 100


def test_an_id_in_use_is_refused(served):
    async def twice():
        stream = await served.llm.submit("Once", LONG, "same")
        try:
            with pytest.raises(errors.InvalidRequestError, match="'same' is still running"):
                await served.llm.submit("Once", LONG, "same")
        finally:
            stream.close()

    served.run(twice())
    served.wait_until_idle()


def test_a_name_that_is_used_again_brings_only_its_own_tokens(served):
    """Steps that were under way when the first request was given up still bring tokens for it."""

    async def again():
        texts = set()
        for _ in range(5):
            first = await served.llm.submit("Once upon a time", LONG, "again")
            await anext(first)
            first.close()
            second = await served.llm.submit("1, 2, 3,", SHORT, "again")
            first.close()
            texts.add("".join([new.text async for output in second for new in output.outputs]))
        return texts

    alone = served.run(read(served.llm, "1, 2, 3,", SHORT))
    assert served.run(again()) == {"".join(new.text for output in alone for new in output.outputs)}
    served.wait_until_idle()


def test_the_engine_process_ignores_ctrl_c(served):
    os.kill(served.llm.engine_pid, signal.SIGINT)
    assert served.run(read(served.llm, "Hi", SHORT))[-1].finished


def fail(*_):
    raise ZeroDivisionError


def test_what_callers_functions_raise_ends_nothing(served, monkeypatch):
    monkeypatch.setattr(served.llm, "on_request_end", [fail, *served.llm.on_request_end])
    for _ in range(2):
        assert served.run(read(served.llm, "Hi", SHORT))[-1].finished
    assert served.llm.error is None


def test_another_event_loop_is_refused_instead_of_hanging(served):
    async def elsewhere():
        await asyncio.wait_for(served.llm.stats(), 20)

    with pytest.raises(errors.InvalidRequestError, match="one event loop"):
        asyncio.run(elsewhere())
    assert served.stats()


def test_there_are_not_more_tenants_than_may_be(served, monkeypatch):
    monkeypatch.setattr(frontend, "MAX_TENANTS", len(served.llm.facts.tenants))
    with pytest.raises(errors.ConfigError, match="tenant 'one more' would be number"):
        served.run(served.llm.set_tenant("one more", TenantLimits()))
    served.run(served.llm.set_tenant("default", TenantLimits()))


def test_a_killed_engine_fails_everybody_and_leaves_nothing(recwarn):
    async def killed():
        llm = AsyncLLM("smollm2-135m", kv_memory="16MiB", max_num_seqs=8, on_progress=fail, max_engine_restarts=0)
        with pytest.raises(errors.RequestTooLargeError):
            await read(llm, [5] * 2000, SHORT)
        assert llm.max_model_len == llm.facts.max_model_len
        reading = [
            asyncio.ensure_future(read(llm, "Once", SamplingParams(max_tokens=200, ignore_eos=True))) for _ in "ab"
        ]
        waiting = asyncio.ensure_future(llm.stats())
        await waiting
        os.kill(llm.engine_pid, signal.SIGKILL)
        for task in reading:
            with pytest.raises(errors.EngineDeadError, match="SIGKILL"):
                await task
        with pytest.raises(errors.EngineDeadError):
            await llm.stats()
        with pytest.raises(errors.EngineDeadError):
            await llm.submit("x", SHORT)
        assert not llm.is_ready
        await llm.shutdown()
        assert not alive(llm.engine_pid)
        await llm.shutdown()

    asyncio.run(killed())
    assert [str(warning.message) for warning in recwarn if issubclass(warning.category, ResourceWarning)] == []


def test_a_model_that_does_not_exist_is_said_at_once():
    with pytest.raises(errors.ModelNotFoundError, match="no-such-model"):
        AsyncLLM("no-such-model")


def test_an_error_while_loading_arrives_with_its_type():
    async def load():
        async with AsyncLLM("smollm2-135m", device="warp") as llm:
            await llm.ready()

    with pytest.raises(errors.ConfigError, match="device is 'warp'"):
        asyncio.run(load())


def test_shutdown_while_loading_is_quick_and_leaves_no_process():
    async def leave():
        llm = AsyncLLM("smollm2-135m", max_model_len=256, kv_memory="16MiB", max_num_seqs=8)
        waiting = asyncio.ensure_future(llm.ready())
        await asyncio.sleep(0.1)
        assert llm.max_model_len is None
        await llm.shutdown()
        with pytest.raises(errors.EngineDeadError, match="shut down"):
            await waiting
        return llm.engine_pid

    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pid = asyncio.run(leave())
    assert time.monotonic() - started < 5
    assert not alive(pid)


def test_shutdown_with_requests_running_fails_them_and_nothing_else():
    async def leave():
        async with AsyncLLM("smollm2-135m", max_model_len=512, kv_memory="32MiB", max_num_seqs=8) as llm:
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            streams = [await llm.submit("Once", params) for _ in range(3)]
            await asyncio.gather(*(anext(stream) for stream in streams))
        for stream in streams:
            with pytest.raises(errors.EngineDeadError, match="shut down"):
                await anext(stream)
        return llm.engine_pid

    assert not alive(asyncio.run(leave()))


def test_a_shutdown_answers_questions_in_flight_and_lets_the_engine_save_its_blocks(tmp_path):
    async def leave():
        settings = {"kv_memory": "16MiB", "kv_disk_memory": "64MiB", "kv_disk_path": str(tmp_path)}
        async with AsyncLLM("smollm2-135m", max_model_len=256, max_num_seqs=8, **settings) as llm:
            await read(llm, "word " * 100, SHORT)
            asked = [asyncio.ensure_future(ask()) for ask in (llm.stats, llm.pins, llm.stats)]
            await asyncio.sleep(0)  # sent, and not answered
        for answer in asked:
            with pytest.raises(errors.EngineDeadError, match="shut down"):
                await answer

    asyncio.run(leave())
    (store,) = list_stores(tmp_path)
    assert store.blocks >= 6


@pytest.mark.parametrize("size", [2**64, "\ud800"])
def test_what_cannot_be_sent_is_refused_and_later_answers_keep_their_questions(served, size):
    with pytest.raises(errors.InvalidRequestError, match="cannot be sent"):
        served.run(served.llm.resize_kv_memory(size))
    assert served.run(served.llm.pins()) == []
    assert served.stats().frames > 0
    asked = [("POST", "kv_memory", {"kv_memory": size}, "cannot be sent")]
    asked += [("PUT", "tenants/default", {"max_blocks": size}, "max_blocks is ")]
    asked += [("PUT", "tenants/default", {size: 1}, "has no limit ")]
    for method, path, body, words in asked:
        content, headers = json.dumps(body), {"Content-Type": "application/json"}
        answer = httpx.request(method, f"{served.url}/v1/{path}", content=content, headers=headers)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
    assert served.stats().tenants["default"].limits == TenantLimits()


def test_a_question_whose_asker_has_gone_is_answered_to_nobody(served):
    async def scenario():
        asked = asyncio.ensure_future(served.llm.stats())
        await asyncio.sleep(0)
        asked.cancel()
        return await served.llm.pins(), await served.llm.stats()

    pins, stats = served.run(scenario())
    assert pins == []
    assert stats.frames > 0


def test_an_engine_that_keeps_blocks_on_disk_is_given_time(tmp_path, monkeypatch):
    monkeypatch.setattr(process_client, "SHUTDOWN_TIMEOUT_S", 0.0)

    async def serve_and_leave():
        settings = {"kv_memory": "16MiB", "kv_disk_memory": "64MiB", "kv_disk_path": str(tmp_path)}
        async with AsyncLLM("smollm2-135m", max_model_len=256, max_num_seqs=8, **settings) as llm:
            await read(llm, "word " * 100, SHORT)

    asyncio.run(serve_and_leave())
    (store,) = list_stores(tmp_path)
    assert store.blocks >= 6


def test_an_engine_that_is_killed_at_its_end_is_named(monkeypatch, caplog):
    monkeypatch.setattr(process_client, "SHUTDOWN_TIMEOUT_S", 0.0)

    async def serve_and_leave():
        async with AsyncLLM("smollm2-135m", max_model_len=256, max_num_seqs=8, kv_memory="16MiB") as llm:
            await read(llm, "word", SHORT)

    asyncio.run(serve_and_leave())
    assert "the engine has not ended in 0 s and is killed" in caplog.messages


def test_the_engine_process_ends_with_its_parent_and_the_parent_needs_no_torch():
    script = (
        "import asyncio, os, sys\n"
        "from pagemill import AsyncLLM\n"
        "async def main():\n"
        "    llm = AsyncLLM('smollm2-135m', max_model_len=256, kv_memory='16MiB', max_num_seqs=8)\n"
        "    async for _ in llm.generate('Hi'): pass\n"
        "    print(llm.engine_pid, 'torch' in sys.modules, 'transformers' in sys.modules, flush=True)\n"
        "    os._exit(0)\n"
        "asyncio.run(main())\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    pid, *imported = result.stdout.split()
    assert imported == ["False", "False"]
    deadline = time.monotonic() + 10
    while alive(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(pid))
