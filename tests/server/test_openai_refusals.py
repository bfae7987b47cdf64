"""Refusals have OpenAI's shape: every error names the field and the reason, and nothing of our insides."""

import httpx
import openai
import pytest
from pydantic import ValidationError

from harness import FRAME_BYTES
from pagemill.errors import PoolTooSmallError, PromptTooLongError, RequestTooLargeError
from pagemill.server.app import create_app
from pagemill.server.protocol.chat import ChatCompletionRequest
from pagemill.server.protocol.completions import CompletionRequest
from pagemill.server.protocol.generation import StreamOptions
from pagemill.server.protocol.messages import MessagesRequest
from pagemill.server.protocol.refusals import refusal_of
from pagemill.server.protocol.responses import ResponsesRequest
from pagemill.server.routes.embeddings import EmbeddingRequest
from pagemill.server.routes.tokens import TokenizeRequest
from server.questions import CHAT, MODEL


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("chat/completions", {"model": "other"}, 404, "model", "'smollm2-135m'"),
        ("chat/completions", {"temperature": -1}, 400, "temperature", "from 0 to"),
        ("chat/completions", {"temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
        ("chat/completions", {"n": "two"}, 400, "n", "integer"),
        ("chat/completions", {"n": True}, 400, "n", "n is true; it must be an integer"),
        ("chat/completions", {"max_tokens": "8"}, 400, "max_tokens", "max_tokens is '8'; it must be an integer"),
        ("completions", {"prompt": "x", "temperature": True}, 400, "temperature", "is true; it must be a number"),
        ("completions", {"prompt": "x", "echo": "yes"}, 400, "echo", "echo is 'yes'; it must be true or false"),
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
        ("chat/completions", {"store": True}, 400, "store", "does not serve 'store' other than false; leave it out"),
        ("chat/completions", {"verbosity": "low"}, 400, "verbosity", "'verbosity' other than \"medium\""),
        ("chat/completions", {"enable_thinking": True}, 400, "enable_thinking", "give it in chat_template_kwargs"),
        ("completions", {"prompt": "x", "truncate_prompt_tokens": 4}, 400, "truncate_prompt_tokens", "does not serve"),
        ("completions", {"prompt": ""}, 400, "prompt", "no tokens"),
        ("completions", {"prompt": []}, 400, "prompt", "at least one"),
        ("completions", {"prompt": ["fine", ""]}, 400, "prompt", "prompt.1: the prompt has no tokens"),
        ("completions", {"prompt": [[5], [5] * 2040], "max_tokens": 9}, 400, "max_tokens", "prompt.1: the prompt's"),
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
        *(
            (path, {**body, "cache_salt": ""}, 400, "cache_salt", "one character at least: give it some, or leave it")
            for path, body in (
                ("chat/completions", {}),
                ("completions", {"prompt": "x"}),
                ("responses", {"input": "x"}),
                ("embeddings", {"input": "x"}),
            )
        ),
        ("nothing", {}, 404, None, "Not Found"),
        ("score", {}, 404, None, "not served here; compare embeddings, see POST /v1/embeddings"),
        ("kv_memory", {"kv_memory": True}, 400, "kv_memory", "kv_memory is true; it must be an integer or a number or"),
        ("completions", {"prompt": "x", "stop": 5}, 400, "stop", "stop is 5; it must be a text or a list"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": 5}]},
            400,
            "messages",
            "messages.0.content is 5",
        ),
        ("completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs", "integer from 0 to 20 or null; null gives"),
        (
            "pins",
            {"name": "x", "messages": []},
            400,
            "messages",
            "messages is []; it must be a list of 1 or more entries",
        ),
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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{half", "the body is not JSON"),
        (b"[1]", "the body is [1]; it must be an object"),
        (b"", "the body is missing; give it"),
    ],
)
def test_a_body_that_is_no_json_object(http, content, words):
    response = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert words in response.json()["error"]["message"]


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (CompletionRequest, {"prompt": "x", "stop": ["a", 5]}, "stop.1 is 5; it must be a text"),
        (CompletionRequest, {"prompt": [1, "a"]}, "prompt.1 is 'a'; it must be an integer"),
        (CompletionRequest, {"prompt": ["a", 1]}, "prompt.1 is 1; it must be a text"),
        (CompletionRequest, {"prompt": [[1], "a"]}, "prompt.1 is 'a'; it must be a list"),
        (CompletionRequest, {"prompt": "x", "logit_bias": {"5": "x"}}, "logit_bias.5 is 'x'; it must be a number"),
        (
            ChatCompletionRequest,
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options has no argument 'include_usages'; did you mean 'include_usage'?",
        ),
        (
            ChatCompletionRequest,
            {"tools": [{**TOOL, "function": {"name": "f", "parametrs": {}}}]},
            "tools.0.function has no argument 'parametrs'; did you mean 'parameters'?",
        ),
        (ChatCompletionRequest, {"tool_choice": "x"}, "is 'x'; it must be 'none', 'auto' or 'required' or an object"),
        (
            ChatCompletionRequest,
            {"tool_choice": {"type": "function", "function": {"nam": "f"}}},
            "tool_choice.function has no argument 'nam'; did you mean 'name'?",
        ),
        (ChatCompletionRequest, {"tool_choice": {"type": "function"}}, "tool_choice.function is missing; give it"),
        (
            ResponsesRequest,
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            "input.0.content.0.text is 5; it must be a text",
        ),
    ],
)
def test_a_field_is_named_without_the_branches_of_its_union(kind, body, words):
    given = {**(CHAT if kind is ChatCompletionRequest else {}), **body}
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(given)
    assert refusal_of(caught.value.errors(), given, kind).message.endswith(words)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": "x"}),
        (ChatCompletionRequest, CHAT),
        (ResponsesRequest, {"input": "x"}),
        (MessagesRequest, {"messages": CHAT["messages"], "max_tokens": 1}),
        (EmbeddingRequest, {"input": "x"}),
        (TokenizeRequest, {"prompt": "x"}),
        (TokenizeRequest, {"messages": CHAT["messages"]}),
        (StreamOptions, {}),
    ],
)
def test_null_means_not_given(kind, body):
    nulls = {name: None for name, field in kind.model_fields.items() if not field.is_required()}
    assert kind.model_validate({**nulls, **body}) == kind.model_validate(body)


MARKS = {"prompt_cache_breakpoint": {"mode": "explicit"}, "cache_control": {"type": "ephemeral"}}
HINTS = {"prompt_cache_options": {"mode": "implicit"}, "prompt_cache_key": "x", "prompt_cache_retention": "24h"}
TEXT = {"type": "text", "text": "x"}
INPUT = {"role": "user", "content": [{**TEXT, "type": "input_text"}]}


@pytest.mark.parametrize(
    ("kind", "plain", "marked"),
    [
        (ChatCompletionRequest, CHAT, {**CHAT, **HINTS}),
        (ResponsesRequest, {"input": [INPUT]}, {"input": [{**INPUT, **MARKS}], **HINTS}),
        *(
            (
                kind,
                {field: [{"role": "user", "content": [part]}]},
                {field: [{"role": "user", "content": [{**part, **m}]}]},
            )
            for kind, field, part in (
                (ChatCompletionRequest, "messages", TEXT),
                (ResponsesRequest, "input", INPUT["content"][0]),
            )
            for m in (MARKS, dict.fromkeys(MARKS))
        ),
        (ChatCompletionRequest, CHAT, {**CHAT, "messages": [{**turn, **MARKS} for turn in CHAT["messages"]]}),
    ],
)
def test_hints_to_a_cache_change_nothing(kind, plain, marked):
    assert kind.model_validate(marked) == kind.model_validate(plain)


@pytest.mark.parametrize(
    ("kind", "plain", "harmless"),
    [
        (
            ChatCompletionRequest,
            CHAT,
            {"echo": False, "add_special_tokens": False, "vllm_xargs": {}, "chat_template": None},
        ),
        (CompletionRequest, {"prompt": "x"}, {"add_special_tokens": True, "vllm_xargs": None}),
        (StreamOptions, {}, {"continuous_usage_stats": None, "include_usage": None}),
        (StreamOptions, {"continuous_usage_stats": False}, {}),
    ],
)
def test_what_asks_for_nothing_is_taken(kind, plain, harmless):
    assert kind.model_validate({**plain, **harmless}) == kind.model_validate(plain)


def test_no_log_probabilities_may_be_asked_for():
    plain, none = (
        ChatCompletionRequest(**CHAT, **asked).params() for asked in ({}, {"logprobs": False, "top_logprobs": 0})
    )
    assert plain == none


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


def test_openais_client_raises_its_own_types(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"


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
