"""Methods of vLLM's LLM and AsyncLLM beside generation: sleep, a fresh prefix cache, defaults, metrics, chat."""

import asyncio
import io
import typing

import msgspec
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from pagemill import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    EngineArgs,
    LoRARequest,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from pagemill.errors import ConfigError, InvalidRequestError, UnknownArgumentError
from pagemill.frontend.metrics import metrics_of
from pagemill.server.routes.metrics import Metrics

SETTINGS = {"max_model_len": 256, "kv_memory": "32MiB", "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
PROMPT = "The capital of France is a city on a river, and it has had " * 2


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2-135m", **SETTINGS) as llm:
        yield llm


def answer(llm, prompt=PROMPT, **given):
    return llm.generate(prompt, GREEDY, use_tqdm=False, **given)[0]


def test_sleep_gives_the_pool_back_and_keeps_sessions_and_pins(llm):
    session = llm.session("talk")
    session.generate("Once upon a time", GREEDY)
    tokens = session.token_ids
    pin = llm.pin(PROMPT, name="kept")
    before, expected = llm.stats(), answer(llm)
    llm.sleep()
    llm.sleep()
    assert llm.is_sleeping()
    assert pin.num_blocks <= llm.stats().frames <= pin.num_blocks + 1 < before.frames
    for refused in (lambda: answer(llm), lambda: llm.resize_kv_memory("16MiB"), lambda: llm.embed("x", use_tqdm=False)):
        with pytest.raises(InvalidRequestError, match="wake_up"):
            refused()
    llm.wake_up()
    llm.wake_up()
    assert not llm.is_sleeping()
    assert llm.stats().frames == before.frames
    again = answer(llm)
    assert again.outputs == expected.outputs
    assert again.num_cached_tokens >= pin.num_tokens
    assert session.token_ids == tokens
    llm.unpin("kept")
    session.delete()


@pytest.mark.parametrize("level", [0, 2, True, None])
def test_another_level_is_refused(llm, level):
    with pytest.raises(InvalidRequestError, match="level 1 only") as caught:
        llm.sleep(level)
    assert caught.value.param == "level"
    with pytest.raises(InvalidRequestError, match="as a whole"):
        llm.wake_up(tags=["weights"])
    assert not llm.is_sleeping()


def test_the_prefix_cache_can_be_emptied(llm):
    answer(llm)
    assert answer(llm).num_cached_tokens > 0
    llm.pin(PROMPT, name="held")
    assert llm.reset_prefix_cache() is False
    llm.unpin("held")
    assert llm.reset_prefix_cache() is True
    stats = llm.stats()
    assert stats.frames_free == stats.frames
    assert answer(llm).num_cached_tokens == 0


def test_defaults_and_metrics(llm):
    assert llm.get_default_sampling_params() == SamplingParams()
    metrics = {(metric.name, *metric.labels.values()): metric for metric in llm.get_metrics()}
    assert metrics["pagemill:generation_tokens",].value == llm.stats().generated_tokens
    assert type(metrics["pagemill:generation_tokens",]).__name__ == "Counter"
    assert metrics["pagemill:kv_blocks", "free"].value > 0
    assert metrics["pagemill:tenant_running", "default"].value == 0


def test_python_has_the_metrics_of_http(llm):
    stats = llm.stats()
    tenants = {"default": msgspec.structs.replace(stats.tenants["default"], tier_blocks={"host": 1})}
    of_positions = {"drafted_per_position": [5, 5], "accepted_per_position": [4, 1]}
    of_labels = {"tier_blocks": {"host": 3}, "fetches_failed": {"slow": 2}, **of_positions}
    stats = msgspec.structs.replace(stats, tenants=tenants, **of_labels)
    here = {(metric.name, *metric.labels.values(), metric.value) for metric in metrics_of(stats)}
    there = {
        frozenset([sample.name.removesuffix("_total"), sample.value, *sample.labels.values()]) - {"a model"}
        for family in text_string_to_metric_families(Metrics("a model").render(stats, (0, 0)).decode())
        for sample in family.samples
    }
    assert {*map(frozenset, here)} <= there
    assert {
        ("pagemill:kv_tier_blocks", "host", 3),
        ("pagemill:kv_fetches_failed", "slow", 2),
        ("pagemill:spec_decode_num_accepted_tokens_per_pos", "1", 1),
        ("pagemill:spec_decode_num_draft_tokens_per_pos", "1", 5),
        ("pagemill:tenant_kv_tier_blocks", "default", "host", 1),
    } <= here


def test_vllms_arguments_of_calls_are_taken_where_they_ask_for_nothing(llm):
    expected = answer(llm).outputs
    assert answer(llm, lora_request=None, tokenization_kwargs=None).outputs == expected
    for wrong, words in (("adapter", "must be None or LoRARequest"), (LoRARequest("a", 1, "x"), "enable_lora=True")):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            answer(llm, lora_request=wrong)
        assert caught.value.param == "lora_request"
    messages = [{"role": "user", "content": "Hi"}]
    assert llm.chat(messages, GREEDY, use_tqdm=False, chat_template_content_format="auto", lora_request=None)


def test_prompts_and_settings_may_have_vllms_types(llm):
    token_ids = llm.tokenizer.encode(PROMPT)
    by_tokens = llm.generate(TokensPrompt(prompt_token_ids=token_ids), GREEDY, use_tqdm=False)
    assert by_tokens[0].outputs == llm.generate(TextPrompt(prompt=PROMPT), GREEDY, use_tqdm=False)[0].outputs
    assert EngineArgs("m", dtype=torch.float16).dtype == "float16"
    assert EngineArgs("m", seed=None).seed == EngineArgs("m").seed
    with pytest.raises(ConfigError, match="dtype is 'int8'; it must be one of"):
        EngineArgs("m", dtype=torch.int8)


def test_cloned_parameters_share_nothing():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    cloned = params.clone()
    assert cloned == params
    cloned.stop.append("b")
    cloned.logit_bias[3] = 1.0
    assert (params.stop, params.logit_bias) == (["a"], {1: 2.0})


def test_async_engines_have_them_too():
    async def run():
        async with AsyncLLMEngine.from_engine_args(AsyncEngineArgs("smollm2-135m", **SETTINGS)) as llm:
            messages = [{"role": "user", "content": "What is the capital of France?"}]
            texts = [out.outputs[0].text async for out in llm.chat(messages, GREEDY, lora_request=None)]
            with pytest.raises(InvalidRequestError, match="no place"):
                async for _ in llm.chat(messages, GREEDY, documents=[{"text": "a"}]):
                    pass
            frames = (await llm.stats()).frames
            await llm.sleep()
            assert await llm.is_sleeping()
            with pytest.raises(InvalidRequestError, match="wake_up"):
                await llm.submit("x", GREEDY)
            await llm.wake_up()
            assert (await llm.stats()).frames == frames
            assert await llm.reset_prefix_cache() is True
            embedded = await llm.embed("Hello")
            assert embedded.outputs.hidden_size == len(embedded.outputs.embedding) == 576
            return texts[-1]

    assert "capital" in asyncio.run(run())


def test_a_bar_may_be_made_by_the_caller(llm):
    made = []

    def bar(**how):
        made.append(tqdm(**how, file=io.StringIO()))
        return made[-1]

    llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=bar)
    assert [(each.total, each.n) for each in made] == [(2, 2)]


def test_a_misspelt_option_of_chat_is_refused_and_a_templates_own_may_be_unknown(llm):
    messages, one = [{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1, temperature=0)
    with pytest.raises(UnknownArgumentError, match="the chat template has no argument 'cache_slat'"):
        llm.chat(messages, one, cache_slat="x")
    llm.chat(messages, one, chat_template_kwargs={"enable_thinking": False})


def test_hints_of_types_can_be_resolved():
    for method in (LLM.generate, LLM.chat, LLM.embed, LLM.beam_search):
        assert "return" in typing.get_type_hints(method)


def test_without_stderr_an_engine_starts_and_answers(llm, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    settings = {"max_model_len": 64, "kv_memory": "4MiB", "max_num_seqs": 2}
    with LLM("smollm2-135m", **settings) as other:
        assert other.generate(["a"], SamplingParams(max_tokens=1))[0].outputs[0].token_ids
