"""OpenAI's own client against a real server: answers, streams, errors, and clients that go away."""

import asyncio
import concurrent.futures
import http.client as http_client
import json
import re
import time

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness import FRAME_BYTES
from pagemill.errors import PoolTooSmallError, PromptTooLongError, RequestTooLargeError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.frontend.request_stream import RequestStream
from pagemill.server.app import create_app
from pagemill.server.protocol.chat import ChatCompletionRequest
from pagemill.server.protocol.completions import CompletionRequest
from pagemill.server.routes.completions import CompletionCall

MODEL = "smollm2-135m"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


def test_what_is_served(client, http):
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve(MODEL).id == MODEL
    assert model.max_model_len == 2048
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json()["version"]
    api = http.get("/openapi.json").json()
    assert "/v1/chat/completions" in api["paths"]
    fields = api["components"]["schemas"]["CompletionRequest"]["properties"]
    assert "It must be" in fields["stop_token_ids"]["description"]
    for name in ("stop", "logit_bias"):  # which have another form in JSON than in Python
        assert not re.search("must be|several times", fields[name]["description"])


READ = ("/v1/models", f"/v1/models/{MODEL}", "/health", "/ready", "/live", "/version", "/metrics", "/v1/sessions")


@pytest.mark.parametrize("path", READ)
def test_head_is_served_where_get_is(http, path):
    got, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert http.head("/v1/completions").status_code == 405


def test_help_of_metrics_can_be_read_alone(http):
    helps = [family.documentation for family in text_string_to_metric_families(http.get("/metrics").text)]
    assert len(helps) > 30
    assert [text for text in helps if re.search(r"^(Those|Their)\b|\bthere\b", text)] == []


def metrics(http) -> dict[str, float]:
    """By name and labels, the model's name apart."""
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(response.text)
    return {
        " ".join(
            [
                sample.name.removeprefix("pagemill:"),
                *(value for label, value in sample.labels.items() if label != "model_name"),
            ]
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_count_what_was_served(served, client, http):
    served.wait_until_idle()
    create_app(served.llm, MODEL)  # another application of this engine takes nothing from the first
    before = metrics(http)
    stream = client.completions.create(model=MODEL, prompt="One two three four five " * 9, stream=True, max_tokens=50)
    next(stream)
    during = metrics(http)
    assert during["num_requests_running"] == 1
    assert 0 < during["kv_slots_written"] <= during["kv_slots_reserved"] == during["kv_blocks active"] * 16
    assert during["kv_cache_usage_perc"] > 0
    list(stream)
    with client.completions.create(model=MODEL, prompt="One", stream=True, max_tokens=500) as left:
        next(left)
    served.wait_until_idle()
    after = metrics(http)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("request_success_total length") == 1
    assert grown("request_success_total abort") == 1
    for name in ("time_to_first_token_seconds_count", "request_queue_time_seconds_count"):
        assert grown(name) == 2
    assert grown("request_time_per_output_token_seconds_count") in (1, 2)  # who left may have seen one token
    assert grown("e2e_request_latency_seconds_count") == 1
    assert grown("generation_tokens_total") > 50
    assert grown("prompt_tokens_total") > 45
    assert grown("engine_steps_total") >= 51
    assert sum(after[f"kv_blocks {state}"] for state in ("free", "cached", "active")) == served.stats().frames
    assert after["kv_blocks active"] == 0


def test_the_pool_is_resized_while_a_stream_runs(served, client, http):
    size = http.get("/v1/kv_memory").json()["kv_memory"]
    answers = {}
    for resized in (False, True):
        stream = client.completions.create(model=MODEL, prompt="Once upon a time", stream=True, seed=3, max_tokens=60)
        texts = [next(stream).choices[0].text]
        if resized:
            assert http.post("/v1/kv_memory", json={"kv_memory": "used"}).json()["kv_memory"] < size
            assert http.post("/v1/kv_memory", json={"kv_memory": "64MiB"}).json()["kv_memory"] <= 64 << 20
        answers[resized] = texts + [chunk.choices[0].text for chunk in stream]
    assert "".join(answers[True]) == "".join(answers[False])
    refused = http.post("/v1/kv_memory", json={"kv_memory": "1TiB"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "kv_memory"
    assert "are free" in refused.json()["error"]["message"]
    assert http.post("/v1/kv_memory", json={"kv_memory": None}).json() == {"kv_memory": size}
    served.wait_until_idle()


def test_who_has_no_room_in_a_pool_that_was_made_small_may_ask_again(served, http):
    body = {"model": MODEL, "prompt": "Once upon a time " * 20, "max_tokens": 8}
    assert http.post("/v1/kv_memory", json={"kv_memory": "used"}).status_code == 200
    refused = http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "try again later" in refused.json()["error"]["message"]
    assert http.post("/v1/kv_memory", json={"kv_memory": None}).status_code == 200
    assert http.post("/v1/completions", json=body).status_code == 200
    served.wait_until_idle()


def test_chat(client):
    answer = client.chat.completions.create(**CHAT, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert "Paris" in choice.message.content
    assert choice.finish_reason in ("length", "stop")
    assert answer.object == "chat.completion"
    usage = answer.usage
    assert usage.completion_tokens <= 6
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    again = client.chat.completions.create(**CHAT, **GREEDY)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= 16


def test_a_chat_stream_is_the_same_answer_in_pieces(client):
    whole = client.chat.completions.create(**CHAT, **GREEDY)
    chunks = list(client.chat.completions.create(**CHAT, **GREEDY, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert sum(c.choices[0].finish_reason is not None for c in chunks if c.choices) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_n_choices_stream_side_by_side(client):
    common = {**CHAT, "n": 3, "seed": 5, "max_tokens": 5, "temperature": 1.0}
    whole = client.chat.completions.create(**common)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**common, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1


def test_chat_logprobs(client):
    answer = client.chat.completions.create(**CHAT, **GREEDY, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].token == token.token  # greedy: the most likely token was taken
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert bytes(token.bytes).decode() == token.token
    bare = client.chat.completions.create(**CHAT, **GREEDY, logprobs=True)
    assert all(token.top_logprobs == [] for token in bare.choices[0].logprobs.content)


def test_content_parts_a_developer_and_answers_given_back(client):
    answer = client.chat.completions.create(**CHAT, **GREEDY).choices[0].message
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}],
        },
        {**answer.model_dump(), "provider_specific_fields": {"refusal": None}},  # as litellm does
        {"role": "user", "content": "And of Japan?"},
    ]
    assert client.chat.completions.create(model=MODEL, messages=messages, **GREEDY).choices[0].message.content


def test_completions_of_several_prompts(client):
    answer = client.completions.create(model=MODEL, prompt=["The capital of France is", "1, 2, 3, 4,"], **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith(" Paris")
    assert "5" in answer.choices[1].text
    assert answer.usage.completion_tokens == 12
    as_tokens = client.completions.create(model=MODEL, prompt=[504, 3575], **GREEDY)
    assert as_tokens.usage.prompt_tokens == 2


def test_completions_default_to_sixteen_tokens(client):
    answer = client.completions.create(model=MODEL, prompt="Once", extra_body={"ignore_eos": True}, temperature=0)
    assert answer.usage.completion_tokens == 16


def test_a_completion_stream_with_a_stop_string(client):
    prompt = "The capital of France is"
    whole = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12)
    stop = whole.choices[0].text[5:10]
    chunks = list(
        client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12, stop=stop, stream=True)
    )
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == whole.choices[0].text.split(stop)[0]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].stop_reason == stop


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_prompt_and_answer(client, stream):
    asked = {"model": MODEL, "prompt": "The capital of France", "echo": True, "logprobs": 1, "temperature": 0}
    answers = client.completions.create(**asked, max_tokens=3, stream=stream)
    choices = [chunk.choices[0] for chunk in answers] if stream else answers.choices
    text = "".join(choice.text for choice in choices)
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    values = [value for choice in choices for value in choice.logprobs.token_logprobs]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert "".join(tokens) == text
    assert text.startswith("The capital of France")
    assert values[0] is None
    assert all(value <= 0 for value in values[1:])
    assert [text[offset : offset + len(token)] for offset, token in zip(offsets, tokens, strict=True)] == tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_an_answer(client, stream):
    """As lm-eval-harness does."""
    asked = {"model": MODEL, "prompt": ["The capital of France", "Once upon"], "echo": True, "logprobs": 2}
    answers = client.completions.create(**asked, max_tokens=0, stream=stream)
    choices = [chunk.choices[0] for chunk in answers] if stream else answers.choices
    longer = client.completions.create(**asked, max_tokens=1, temperature=0).choices
    for choice, other in zip(sorted(choices, key=lambda choice: choice.index), longer, strict=True):
        count = len(choice.logprobs.tokens)
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.finish_reason == "length"
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert getattr(choice.logprobs, name) == getattr(other.logprobs, name)[:count]
    if not stream:
        assert (answers.usage.prompt_tokens, answers.usage.completion_tokens) == (6, 0)
    plain = client.completions.create(model=MODEL, prompt="The capital", echo=True, max_tokens=0).choices[0]
    assert (plain.text, plain.logprobs) == ("The capital", None)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "set stream to false"),
        ({"prompt_logprobs": 1, "echo": True, "logprobs": 2}, "prompt_logprobs", "leave it out"),
        ({"prompt_logprobs": 1, "use_beam_search": True}, "prompt_logprobs", "no meaning"),
        ({"prompt_logprobs": 1, "max_tokens": 0, "session_id": "s"}, "max_tokens", "goes on from an answer"),
    ],
)
def test_prompt_logprobs_that_cannot_be_are_refused(http, body, param, words):
    response = http.post("/v1/completions", json={"prompt": "Hello", **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert words in response.json()["error"]["message"]


def test_prompt_logprobs_have_vllms_shape(client):
    ask = {"model": MODEL, "max_tokens": 0, "extra_body": {"prompt_logprobs": 1}}
    scored = client.completions.create(prompt="The capital of France", **ask).choices[0]
    echoed = client.completions.create(
        model=MODEL, prompt="The capital of France", max_tokens=0, echo=True, logprobs=1
    ).choices[0]
    first, *positions = scored.prompt_logprobs
    assert (first, scored.text) == (None, "")
    for position, value, token in zip(
        positions, echoed.logprobs.token_logprobs[1:], echoed.logprobs.tokens[1:], strict=True
    ):
        entry = next(iter(position.values()))
        assert entry["logprob"] == value
        assert entry["decoded_token"] == token
        assert 1 <= len(position) <= 2
        assert [entry["rank"] for entry in position.values()][-1] == 1
    chat = client.chat.completions.create(messages=CHAT["messages"], **ask)
    assert chat.prompt_logprobs[0] is None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    assert chat.choices[0].message.content == ""


def test_an_echoed_prompt_is_made_out_once_for_all_choices(client, monkeypatch):
    made, whole = [], RequestStream.whole
    monkeypatch.setattr(RequestStream, "whole", lambda stream: made.append(stream) or whole(stream))
    asked = {"model": MODEL, "prompt": "The capital", "echo": True, "n": 4, "max_tokens": 2, "stream": True}
    texts = [""] * 4
    for chunk in client.completions.create(**asked):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert all(text.startswith("The capital") for text in texts)
    assert len(made) == 1


def test_vllms_extra_fields(client):
    def ask(**extra):
        return client.completions.create(
            model=MODEL, prompt="The capital of France is", max_tokens=3, temperature=0, extra_body=extra
        ).choices[0]

    plain = ask()
    assert ask(allowed_token_ids=[504]).text == "The" * 3
    assert ask(bad_words=["Paris"]).text != plain.text
    assert ask(top_k=1, min_p=0.1, repetition_penalty=1.1, cache_salt="x", priority=2, skip_special_tokens=False).text
    stopped = ask(stop_token_ids=[7042])
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", 7042)
    assert ask(stop_token_ids=[7042], min_tokens=2).text != ""


def test_best_of_chooses_and_can_not_be_streamed(client):
    common = {"model": MODEL, "prompt": ["My favourite", "Once"], "max_tokens": 4, "seed": 7}
    every = client.completions.create(**common, n=4, logprobs=0).choices
    best = client.completions.create(**common, best_of=4).choices
    likelihoods = [sum(choice.logprobs.token_logprobs) for choice in every]
    likeliest = [max(range(first, first + 4), key=likelihoods.__getitem__) for first in (0, 4)]
    assert likeliest != [0, 4]
    assert [choice.text for choice in best] == [every[i].text for i in likeliest]
    assert [choice.index for choice in best] == [0, 1]
    assert best[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match=r"best_of is 4 with n 1: .* cannot be streamed") as caught:
        client.completions.create(**common, best_of=4, stream=True)
    assert caught.value.param == "stream"
    assert list(client.completions.create(**common, n=2, best_of=2, stream=True))


def test_beam_search_as_vllm_has_it(client):
    common = {"model": MODEL, "prompt": ["Once upon a time", "My favourite"], "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**common, n=3, extra_body={"use_beam_search": True, "length_penalty": 0.5})
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert len({choice.text for choice in whole.choices}) == 6
    best = client.completions.create(**common, best_of=3, extra_body={"use_beam_search": True, "length_penalty": 0.5})
    assert [choice.text for choice in best.choices] == [whole.choices[0].text, whole.choices[3].text]
    tokens = client.completions.create(**common, extra_body={"use_beam_search": True, "ignore_eos": True}).usage
    assert tokens.completion_tokens == 2 * 6
    answer = client.chat.completions.create(**CHAT, **GREEDY, extra_body={"use_beam_search": True}, n=2)
    assert len({choice.message.content for choice in answer.choices}) == 2


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"stop": "x"}, "stop"),
        ({"top_p": 0.5}, "top_p"),
        ({"logprobs": 1}, "logprobs"),
        ({"n": 3, "best_of": 2}, "n"),
        ({"temperature": 0.5}, "temperature"),
        ({"n": 33}, "n"),
        ({"best_of": 33}, "best_of"),
        ({"session_id": "s"}, "session_id"),
        ({"stream": True}, "stream"),
    ],
)
def test_what_a_search_has_no_use_for_is_refused(http, extra, param):
    response = http.post("/v1/completions", json={"prompt": "x", "use_beam_search": True, **extra})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_habits_of_clients_change_nothing(client):
    plain = client.chat.completions.create(**CHAT, **GREEDY).choices[0].message.content
    habits = client.chat.completions.create(
        **CHAT,
        temperature=0,
        max_completion_tokens=6,
        user="me",
        metadata={"a": "b"},
        store=False,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        service_tier="auto",
        logit_bias=None,
        parallel_tool_calls=False,
        extra_body={"spaces_between_special_tokens": True, "return_token_ids": False, "truncate_prompt_tokens": None},
    )
    assert habits.choices[0].message.content == plain


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("chat/completions", {"model": "other"}, 404, "model", "'smollm2-135m'"),
        ("chat/completions", {"temperature": -1}, 400, "temperature", "at least 0"),
        ("chat/completions", {"temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
        ("chat/completions", {"n": "two"}, 400, "n", "integer"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "set echo or prompt_logprobs"),
        ("completions", {"prompt": "x", "max_tokens": 0, "echo": True, "n": 2}, 400, "n", "nothing is sampled"),
        ("chat/completions", {"max_tokens": 0}, 400, "max_tokens", "set prompt_logprobs"),
        ("chat/completions", {"max_tokens": 5000}, 400, "max_tokens", "max_model_len (2048)"),
        ("chat/completions", {"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens", "the same"),
        ("chat/completions", {"max_completion_tokens": 0}, 400, "max_completion_tokens", "max_completion_tokens is 0"),
        ("chat/completions", {"max_completion_tokens": 5000}, 400, "max_completion_tokens", "max_model_len (2048)"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "top_logprobs is 21"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x " * 3000}]}, 400, "messages", "2048"),
        ("chat/completions", {"top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
        ("chat/completions", {"stream_options": {"include_usage": True}}, 400, "stream_options", "stream"),
        ("chat/completions", {"messages": []}, 400, "messages", "at least one"),
        ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages", "role"),
        ("chat/completions", {"messages": [{"role": "function", "content": "x"}]}, 400, "messages", "'function'"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages",
            "image_url",
        ),
        ("completions", {"prompt": "x", "tools": [{"type": "function"}]}, 400, "tools", "does not serve"),
        ("chat/completions", {"store": True}, 400, "store", "does not serve"),
        ("completions", {"prompt": "x", "truncate_prompt_tokens": 4}, 400, "truncate_prompt_tokens", "does not serve"),
        ("completions", {"prompt": ""}, 400, "prompt", "no tokens"),
        ("completions", {"prompt": []}, 400, "prompt", "at least one"),
        ("completions", {"prompt": ["fine", ""]}, 400, "prompt", "no tokens"),
        ("completions", {"prompt": [49152]}, 400, "prompt", "49151"),
        (
            "completions",
            {"prompt": [5] * 3000},
            400,
            "prompt",
            "is longer than the model's context length: max_model_len",
        ),
        ("completions", {}, 400, "prompt", "missing"),
        ("completions", {"prompt": "x", "logprobs": 99}, 400, "logprobs", "20"),
        ("completions", {"prompt": "x", "n": 2, "best_of": 1}, 400, "best_of", "at least 2"),
        ("completions", {"prompt": "x", "length_penalty": 2.0}, 400, "length_penalty", "needs use_beam_search"),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix", "no tokens for filling in the middle"),
        ("completions", {"prompt": "x", "suffix": "y", "echo": True}, 400, "suffix", "echo has no meaning"),
        ("completions", {"prompt": "x", "suffix": "y", "session_id": "s"}, 400, "suffix", "session_id has no meaning"),
        ("completions", {"prompt": ["x", "z"], "suffix": "y"}, 400, "suffix", "here are 2"),
        ("completions", {"fork_of": "x", "suffix": "y"}, 400, "suffix", "takes no suffix"),
        ("completions", {"prompt": [5], "suffix": "y"}, 400, "suffix", "token ids"),
        ("chat/completions", {"suffix": "y"}, 400, "suffix", "suffix"),
        ("completions", {"prompt": "x", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", "999"),
        ("nothing", {}, 404, None, "Not Found"),
        ("score", {}, 404, None, "not served here; compare embeddings, see POST /v1/embeddings"),
        ("kv_memory", {"kv_memory": True}, 400, "kv_memory", "given: True"),
        ("models", {}, 405, None, "Method Not Allowed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_refusal_has_openais_shape(served, http, path, body, status, param, words, stream):
    if path == "chat/completions":
        body = {**CHAT, **body}
    response = http.post(f"/v1/{path}", json={**body, "stream": stream} if "stream_options" not in body else body)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.mark.parametrize("content", [b"{half", b"[1]", b""])
def test_a_body_that_is_no_json_object(http, content):
    response = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "\xff"}', "can't decode byte 0xff"),
        (b"[" * 60_000, "too deep in one another"),
        (b"[" * 100_000, "too deep in one another"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "over 4300 digits"),
    ],
    ids=["not Unicode", "deep", "deep and large", "many digits"],
)
def test_a_body_that_cannot_be_read_is_told_why(http, content, words):
    response = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "the body is not JSON" in response.json()["error"]["message"]
    assert words in response.json()["error"]["message"]


def test_half_of_a_surrogate_pair_is_refused_where_it_stands(http):
    fields = {"completions": [r"\ud800", "cache_salt", "stop", "session_id", "model", "bad_words"], "pins": ["name"]}
    for path, names in fields.items():
        for name in names:
            value = '["\\ud800"]' if name == "bad_words" else '"\\ud800"'
            body = f'{{"prompt": "{"x " * 30}", "{name}": {value}}}'
            response = http.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_a_prompt_that_a_small_pool_cannot_hold_is_too_long_a_context(served, http):
    (before,) = http.get("/v1/models").json()["data"]
    assert http.post("/v1/kv_memory", json={"kv_memory": 8 * FRAME_BYTES}).status_code == 200
    try:
        assert "8 blocks of 16 tokens" in served.run(served.llm.ready()).description
        (model,) = http.get("/v1/models").json()["data"]
        assert model["max_model_len"] == 8 * 16 + 1 < before["max_model_len"]
        messages = [{"role": "user", "content": "x " * 300}]
        for path, body, param in (
            ("completions", {"prompt": "x " * 300}, "prompt"),
            ("completions", {"prompt": "x " * 300, "max_tokens": 2}, "max_tokens"),
            ("chat/completions", {"messages": messages}, "messages"),
            ("chat/completions", {"messages": messages, "stream": True}, "messages"),
            ("chat/completions", {"messages": messages, "max_completion_tokens": 2}, "max_completion_tokens"),
        ):
            response = http.post(f"/v1/{path}", json=body)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == param
            assert "but the pool has 8" in error["message"]
        fits = {"prompt": "x", "max_tokens": model["max_model_len"] - 1, "ignore_eos": True}
        assert http.post("/v1/completions", json=fits).json()["usage"]["total_tokens"] == model["max_model_len"]
    finally:
        http.post("/v1/kv_memory", json={"kv_memory": None})
        served.wait_until_idle()


@pytest.mark.parametrize(
    ("body", "error", "param", "message"),
    [
        ({"n": 99}, RequestTooLargeError("beam_width is 99", param="beam_width"), "n", "n is 99"),
        ({"best_of": 9}, RequestTooLargeError("beam_width is 9", param="beam_width"), "best_of", "best_of is 9"),
        ({"fork_of": "a"}, PromptTooLongError("the prompt", param="prompt"), "fork_of", "the prompt"),
        ({"fork_of": "a"}, PoolTooSmallError("max_tokens", param="max_tokens"), "fork_of", "max_tokens"),
    ],
)
@pytest.mark.parametrize("request_class", [CompletionRequest, ChatCompletionRequest])
def test_an_error_of_the_engines_names_the_requests_own_field(request_class, body, error, param, message):
    beginning = {"prompt": "x"} if request_class is CompletionRequest else {"messages": CHAT["messages"]}
    request = request_class(**body, **({} if "fork_of" in body else beginning))
    refused = request.in_own_words(type(error)(error.message, param=error.param))
    assert (refused.param, refused.message) == (param, message)


def test_the_model_of_an_engine_that_is_gone_keeps_its_card():
    async def cards():
        async with AsyncLLM(MODEL, kv_memory="16MiB", max_num_seqs=4) as llm:
            transport = httpx.ASGITransport(create_app(llm, MODEL))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                loading = (await http.get("/v1/models")).json()["data"][0]
                await llm.ready()
                served = (await http.get("/v1/models")).json()
                await llm.shutdown()
                return loading, served, (await http.get("/v1/models")).json()

    loading, served, gone = asyncio.run(cards())
    assert loading["max_model_len"] is None
    assert gone == served
    assert served["data"][0]["max_model_len"] > 0


def test_openais_client_raises_its_own_types(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("kind", ["stream", "whole", "several prompts"])
def test_a_client_that_goes_away_gives_everything_back(served, kind):
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "n": 2}
    if kind == "several prompts":
        body["prompt"] = ["Once", "upon"]
    generated = served.stats().generated_tokens
    with httpx.Client(base_url=served.url) as http:
        if kind == "stream":
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                assert next(response.iter_lines()).startswith("data: ")
        else:
            connection = http_client.HTTPConnection(served.url.removeprefix("http://"))
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            while served.stats().generated_tokens == generated:
                time.sleep(0.01)
            connection.close()
    stats = served.wait_until_idle()
    assert 0 < stats.generated_tokens - generated < 2000


def test_a_stream_that_nobody_reads_gives_everything_back_when_it_is_closed(served):
    body = CompletionRequest(prompt="Once upon a time", max_tokens=2000, ignore_eos=True, stream=True)
    generated = served.stats().generated_tokens

    async def unread():
        events = await CompletionCall(served.llm, body, MODEL, "default").events()
        await events.aclose()

    served.run(unread())
    assert served.wait_until_idle().generated_tokens - generated < 1000


def test_a_small_answer_is_not_held_back(served):
    """Head and body are two parts: with Nagle's algorithm each answer on a kept connection took 44 ms."""
    connection = http_client.HTTPConnection(served.url.removeprefix("http://"))
    seconds = []
    for _ in range(30):
        began = time.perf_counter()
        connection.request("GET", "/version")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - began)
    connection.close()
    assert min(seconds) < 0.02


def test_many_clients_at_the_same_time(client, served):
    def ask(number):
        stream = client.completions.create(
            model=MODEL, prompt=f"{number}, {number + 1},", temperature=0, max_tokens=4, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(8)))
    assert texts[3] == ask(3)
    served.wait_until_idle()


def test_events_are_framed_as_openai_does(http):
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line[6:])["object"] == "text_completion" for line in lines[:-1])


def test_health_stays_quick_while_a_long_prompt_is_tokenized(http, served):
    body = {"model": MODEL, "prompt": "many words " * 400_000, "max_tokens": 1}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        refused = pool.submit(httpx.post, f"{served.url}/v1/completions", json=body, timeout=60)
        slowest = 0.0
        while not refused.done():
            started = time.process_time()
            assert http.get("/health").status_code == 200
            slowest = max(slowest, time.process_time() - started)
    assert refused.result().status_code == 400
    assert slowest < 1.0


def test_an_unexpected_failure_says_nothing_of_our_insides(served):
    app = create_app(served.llm, MODEL)

    @app.get("/broken")
    async def broken():
        raise RuntimeError("a secret")

    async def get():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/broken")

    response = served.run(get())
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "internal_server_error"
    assert "secret" not in response.text
