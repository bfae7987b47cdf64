"""`/v1/messages`, with Anthropic's own client."""

import functools
import json
from pathlib import Path

import anthropic
import httpx
import pytest

from pagemill.text.answer.of_model import AnswerFormats
from pagemill.text.chat_template import ChatTemplate
from scripted import END, say

MODEL = "smollm2-135m"
ASKED = {"model": MODEL, "max_tokens": 4}
GREEDY = {**ASKED, "extra_body": {"temperature": 0}}
SCRIPTED = {"model": MODEL, "max_tokens": 60, "stop_sequences": [END], "extra_body": {"ignore_eos": True}}
HELLO = [{"role": "user", "content": "Hello!"}]
TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
WEATHER = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(served):
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client
    served.wait_until_idle()


@pytest.fixture
def calls_tools(served, monkeypatch):
    """Gives the model a chat template with tools and reasoning."""
    use_template(served, monkeypatch, "hermes.jinja")


def use_template(served, monkeypatch, name):
    tokenizer = served.run(served.llm.tokenizer())
    source = (TEMPLATES / name).read_text()
    template = ChatTemplate(source, {})
    monkeypatch.setattr(tokenizer, "_compiled", lambda *_: template)
    monkeypatch.setattr(tokenizer, "template_source", lambda with_tools: source)
    monkeypatch.setattr(tokenizer, "answers", AnswerFormats(tokenizer, "hermes", "qwen3"))
    return tokenizer


@pytest.fixture
def says(monkeypatch):
    """Makes all answers this text, twelve characters a token."""
    return functools.partial(say, monkeypatch, size=12)


def chat(v1, messages, **fields):
    """What chat answers to the same."""
    body = {"model": MODEL, "max_tokens": 4, "temperature": 0, "messages": messages, **fields}
    answer = v1.post("/chat/completions", json=body).json()
    return answer["choices"][0]["message"]["content"], answer["usage"]


def prompt_tokens(usage):
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_text_in_text_out(client, v1):
    message = client.messages.create(**GREEDY, system="Be brief.", messages=HELLO, metadata={"user_id": "ada"})
    expected, usage = chat(v1, [{"role": "system", "content": "Be brief."}, *HELLO])
    (block,) = message.content
    assert (block.type, block.text) == ("text", expected)
    assert (message.type, message.role, message.model, message.stop_sequence) == ("message", "assistant", MODEL, None)
    assert message.stop_reason == {4: "max_tokens"}.get(usage["completion_tokens"], "end_turn")
    assert prompt_tokens(message.usage) == usage["prompt_tokens"]
    assert message.usage.output_tokens == usage["completion_tokens"]
    in_blocks = client.messages.create(
        **GREEDY,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}],
    )
    assert in_blocks.content == message.content
    assert in_blocks.usage.cache_read_input_tokens == (usage["prompt_tokens"] - 1) // 16 * 16 > 0


@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_line_for_billing_changes_no_prompt(client, in_blocks):
    """Else requests of one conversation would not begin alike."""
    plain = client.messages.create(**GREEDY, system="Be brief, and kind to cats and dogs.", messages=HELLO)
    line = "x-anthropic-billing-header: cc_version=1; cch=36ee5;"
    system = f"{line}\nBe brief, and kind to cats and dogs."
    blocks = [text(line), text("Be brief, and kind to cats and dogs.")]
    message = client.messages.create(**GREEDY, system=blocks if in_blocks else system, messages=HELLO)
    assert message.content == plain.content
    assert prompt_tokens(message.usage) == prompt_tokens(plain.usage)


def test_the_client_knows_a_request_by_its_id(client):
    answer = client.messages.with_raw_response.create(**ASKED, messages=HELLO)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.parse()._request_id == answer.headers["request-id"]  # noqa: SLF001
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.create(**ASKED | {"model": "other"}, messages=HELLO)
    assert refused.value.request_id
    assert refused.value.body["request_id"] == refused.value.request_id


@pytest.mark.parametrize(
    ("headers", "status"), [({}, 400), ({"Content-Encoding": "gzip"}, 415), ({"X-Request-Id": "a b"}, 400)]
)
def test_errors_from_every_layer_name_the_request(http, headers, status):
    answer = http.post("/v1/messages", json={}, headers=headers)
    assert answer.status_code == status
    assert answer.json()["request_id"] == answer.headers["request-id"]


def test_the_client_lists_models(client, http):
    page = client.models.list()
    (model,) = page
    assert (model.type, model.lifecycle, page.has_more) == ("model", "active", False)
    assert (model.id, model.display_name, page.first_id, page.last_id) == (MODEL,) * 4
    assert model.created_at.timestamp() == http.get("/v1/models").json()["data"][0]["created"]
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(anthropic.NotFoundError, match="other"):
        client.models.retrieve("other")


def test_turns_of_one_role_are_one(client, v1):
    turns = [
        {"role": "user", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "I am Ada."}, {"type": "text", "text": "And you?"}]},
    ]
    message = client.messages.create(**GREEDY, messages=turns)
    assert message.content[0].text == chat(v1, [{"role": "user", "content": "Hello!\nI am Ada.\nAnd you?"}])[0]


def test_an_answer_that_has_begun_goes_on(client, v1):
    turns = [*HELLO, {"role": "assistant", "content": "Dear Ada, I"}]
    expected, _ = chat(v1, turns, continue_final_message=True, add_generation_prompt=False)
    assert client.messages.create(**GREEDY, messages=turns).content[0].text == expected


def test_the_client_parses_the_stream(client):
    with client.messages.stream(**GREEDY, messages=HELLO) as stream:
        events = [event for event in stream if event.type != "text"]  # which the client makes itself
        final = stream.get_final_message()
    types = [event.type for event in events]
    deltas = types.count("content_block_delta")
    assert deltas >= 1
    assert types == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    begun = events[0].message
    assert (begun.content, begun.stop_reason, begun.id) == ([], None, final.id)
    assert prompt_tokens(begun.usage) == prompt_tokens(final.usage)
    whole = client.messages.create(**GREEDY, messages=HELLO)
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.id.startswith("msg_")


@pytest.mark.parametrize("streams", [False, True])
def test_stop_sequences_are_told(client, says, streams):
    says("One, two.")
    asked = {**SCRIPTED, "messages": HELLO}
    if streams:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert message.content[0].text == "One, two."
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", END)


@pytest.mark.parametrize("streams", [False, True])
def test_the_context_ends_an_answer_that_asks_for_more(client, streams):
    asked = {"model": MODEL, "max_tokens": 4000, "messages": [{"role": "user", "content": "Hello! " * 1000}]}
    asked["extra_body"] = {"temperature": 0, "ignore_eos": True}
    if streams:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert message.stop_reason == "model_context_window_exceeded"
    assert prompt_tokens(message.usage) + message.usage.output_tokens == 2048


@pytest.mark.parametrize("streams", [False, True])
def test_reasoning_and_calls_are_blocks(client, calls_tools, says, streams):
    says(f"<think>\nWhere? In Paris.\n</think>\n\nLet me look.\n{CALL}")
    asked = {**SCRIPTED, "messages": HELLO, "tools": [WEATHER], "tool_choice": {"type": "auto"}}
    if streams:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    thought, text, call = message.content
    assert (thought.type, thought.thinking) == ("thinking", "Where? In Paris.")
    assert (text.type, text.text) == ("text", "Let me look.")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)


@pytest.mark.parametrize("streams", [False, True])
def test_reasoning_may_be_left_out(client, calls_tools, says, streams):
    says("<think>\nWhere?\n</think>\n\nIn Paris.")
    asked = {**SCRIPTED, "messages": HELLO, "thinking": {"type": "adaptive", "display": "omitted"}}
    if streams:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert [(block.type, block.text) for block in message.content] == [("text", "In Paris.")]


def test_a_call_that_was_cut_has_what_came(client, calls_tools, says):
    says('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "day')
    asked = {**SCRIPTED, "messages": HELLO, "tools": [{**WEATHER, "input_schema": {"type": "object"}}]}
    (block,) = client.messages.create(**asked).content
    assert block.input == {"city": "Paris"}


def test_what_tools_brought_goes_to_the_template(client, http, calls_tools):
    """The answer is sent back as the client has it, with what the tool brought, which the prompt has as chat's does."""
    blocks = [
        {"type": "thinking", "thinking": "Where?", "signature": ""},
        {"type": "text", "text": "Let me look."},
        USE,
    ]
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "Rain."}]}
    turns = [*HELLO, {"role": "assistant", "content": blocks}, said(result, text("And now?"))]
    function = {"name": "get_weather", "description": "Tells the weather.", "parameters": WEATHER["input_schema"]}
    same = [
        *HELLO,
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Where?",
            "tool_calls": [{"id": "call_1", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
        {"role": "user", "content": "And now?"},
    ]
    tools = [{"type": "function", "function": function}]
    count = http.post("/tokenize", json={"messages": same, "tools": tools}).json()["count"]
    assert client.messages.count_tokens(model=MODEL, messages=turns, tools=[WEATHER]).input_tokens == count
    message = client.messages.create(**GREEDY, messages=turns, tools=[WEATHER])
    assert prompt_tokens(message.usage) == count
    failed = [*turns[:2], said({**result, "is_error": True}, text("And now?"))]
    same[2]["content"] = "Error: Rain."
    count = http.post("/tokenize", json={"messages": same, "tools": tools}).json()["count"]
    assert client.messages.count_tokens(model=MODEL, messages=failed, tools=[WEATHER]).input_tokens == count


RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "Rain."}
USE = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Paris"}}


ASKS = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": [USE]}]


def said(*blocks):
    return {"role": "user", "content": list(blocks)}


def text(words):
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("choice", "parallel"),
    [({"type": "any", "disable_parallel_tool_use": True}, False), ({"type": "tool", "name": "get_weather"}, True)],
)
def test_a_call_can_be_made_sure(client, calls_tools, choice, parallel):
    """The small model calls no tools by itself."""
    asked = {**GREEDY, "max_tokens": 40, "messages": HELLO, "tools": [WEATHER], "tool_choice": choice}
    message = client.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert call.input == {"city": "Paris"}


def test_answers_are_held_to_a_schema(client):
    schema = {"enum": ["yes"]}
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(**{**GREEDY, "max_tokens": 40}, messages=HELLO, output_config=config)
    assert (message.content[0].text, message.stop_reason) == ('"yes"', "end_turn")


@pytest.mark.parametrize(
    ("thinking", "options"),
    [
        ({}, {}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
    ],
)
def test_thinking_is_asked_of_the_template(client, monkeypatch, served, thinking, options):
    tokenizer = use_template(served, monkeypatch, "smollm3.jinja")
    apply, given = tokenizer.apply_chat_template, []

    def noting(messages, **template):
        given.append(template["chat_template_kwargs"])
        return apply(messages, **template)

    monkeypatch.setattr(tokenizer, "apply_chat_template", noting)
    more = {"thinking": thinking} if thinking else {}
    client.messages.create(**GREEDY, messages=HELLO, **more)
    client.messages.count_tokens(model=MODEL, messages=HELLO, **more)
    assert given == [options, options]


REFUSED = [
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "role is 'tool'; it must be 'user', 'assistant' or 'system'"),
    ({"messages": [{"role": ["user"], "content": "Hi"}]}, "messages.0.role is ['user']"),
    ({"messages": [said({"type": "text", "text": None})]}, "messages.0.content.0.text is null; it must be a text"),
    ({"messages": [said({"type": "text"})]}, "messages.0.content.0.text is missing"),
    ({"messages": [*ASKS, said({**RESULT, "content": [{"type": "image"}]})]}, "this server does not serve a block of"),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": [{**USE, "input": {"a": "x" * 300000}}]}]},
        "input of a tool",
    ),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "does not serve 'context_management'"),
    ({"tools": [{**WEATHER, "defer_loading": True}]}, "defer_loading"),
    ({"messages": [said({"type": "image", "source": {}})]}, "block of type 'image' in a turn"),
    ({"messages": [said({"text": "Hi"})]}, "block of type None in a turn of role 'user'"),
    ({"messages": [said({**text("Hi"), "mood": 1})]}, "serve 'mood' in a block of type 'text'"),
    ({"messages": [said({"type": "thinking", "thinking": ""})]}, "it takes text, tool_result"),
    ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "'redacted_thinking'"),
    ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "tool_use that nothing answers"),
    ({"messages": [said(RESULT), *ASKS[1:], said(RESULT)]}, "tool_use_id 'call_1', and no tool_use before it has this"),
    ({"messages": [*ASKS, said(RESULT, {**RESULT, "tool_use_id": "call_2"})]}, "a tool_result has the tool_use_id 'ca"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools of type 'web_search_20250305'"),
    ({"tools": [WEATHER, WEATHER]}, "tools have 'get_weather' twice"),
    ({"tools": [WEATHER]}, "tools are given, but this model's chat template has no place for them"),
    ({"tool_choice": {"type": "tool"}}, "type 'tool' and no name; give one"),
    ({"tool_choice": {"type": "auto", "name": "a"}}, "type 'auto' and a name"),
    ({"tool_choice": {"type": "any"}}, "the type 'any', but there are no tools"),
    ({"output_config": {"effort": "max"}}, "output_config.effort is 'max', but this model's chat template does not"),
    ({"messages": [*HELLO, {"role": "user", "content": []}]}, "a turn has no blocks"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"mcp_servers": [{"url": "x"}]}, "does not serve 'mcp_servers'"),
    ({"cache_salt": ""}, "cache_salt is ''; it must have one character"),
    ({"temperature": -1}, "temperature is -1"),
    ({"temperatur": 1}, "temperatur"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=[said[:24] for _, said in REFUSED])
def test_what_is_not_served_is_refused_in_anthropics_shape(http, fields, said):
    answer = http.post("/v1/messages", json={**ASKED, "messages": HELLO, **fields})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert said in answer.json()["error"]["message"]
    assert set(answer.json()["error"]) == {"type", "message"}


def test_what_agents_send_is_taken(http, calls_tools):
    """Marks for the cache, fields that ask for nothing, notes in between, and the header and query of betas."""
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        **ASKED,
        "system": [text("x-anthropic-billing-header: cch=1;"), {**text("Be brief."), **mark}],
        "tools": [{**WEATHER, **mark, "defer_loading": False, "allowed_callers": ["direct"], "type": None}],
        "messages": [
            *HELLO,
            {"role": "assistant", "content": [{**USE, "caller": {"type": "direct"}}]},
            said({**RESULT, **mark, "is_error": True, "content": None}),
            {"role": "system", "content": "The user is away."},
            said({**text("Go on."), **mark}),
        ],
        "metadata": {"user_id": "ada"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "diagnostics": {"previous_message_id": None},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
        "service_tier": "auto",
        "stream": False,
    }
    answer = http.post("/v1/messages?beta=true", json=body, headers={"anthropic-beta": "a,b"})
    assert answer.status_code == 200, answer.text
    count = http.post("/v1/messages/count_tokens", json={name: body[name] for name in ("system", "tools", "messages")})
    usage = answer.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count.json()["input_tokens"]


def test_a_result_may_come_behind_another_turn(http, calls_tools):
    body = {**ASKED, "messages": [*ASKS, {"role": "assistant", "content": "Wait."}, said(text("Well?"), RESULT)]}
    assert http.post("/v1/messages", json=body).status_code == 200


def test_half_of_a_character_is_refused(http, calls_tools):
    use = {**USE, "input": {"city": "\ud800"}}
    body = {**ASKED, "tools": [WEATHER], "messages": [*HELLO, {"role": "assistant", "content": [use]}, said(RESULT)]}
    answer = http.post("/v1/messages", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "Unicode" in answer.json()["error"]["message"]


def test_thinking_is_not_asked_for_twice(http, served, monkeypatch):
    use_template(served, monkeypatch, "smollm3.jinja")
    body = {**ASKED, "messages": HELLO, "thinking": {"type": "adaptive"}}
    answer = http.post("/v1/messages", json={**body, "chat_template_kwargs": {"enable_thinking": False}})
    assert "enable_thinking False, but the request asks for True" in answer.json()["error"]["message"]


def test_max_tokens_must_be_said(http):
    answer = http.post("/v1/messages", json={"model": MODEL, "messages": HELLO})
    assert answer.json()["error"]["message"] == "max_tokens is missing; give it"


def test_clients_raise_their_own_errors(client, http):
    with pytest.raises(anthropic.NotFoundError, match="other"):
        client.messages.create(**{**GREEDY, "model": "other"}, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="max_model_len"):
        client.messages.create(**GREEDY, messages=[{"role": "user", "content": "Hello! " * 3000}])
    assert http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert http.post("/v1/messages/batches", json={}).json()["error"]["type"] == "not_found_error"


def test_what_fails_on_the_way_is_an_event(client, monkeypatch, served):
    """The engine's own failure of a running request reaches the client as its error."""
    from pagemill.errors import StepFailedError

    streams = []
    submit = served.llm.submit

    async def noting(*args, **how):
        streams.append(await submit(*args, **how))
        return streams[-1]

    monkeypatch.setattr(served.llm, "submit", noting)

    def read_all():
        with client.messages.stream(**{**GREEDY, "max_tokens": 500}, messages=HELLO) as stream:
            for event in stream:
                if event.type == "text":
                    served.loop.call_soon_threadsafe(streams[0].fail, StepFailedError("the step failed"))

    with pytest.raises(anthropic.APIStatusError, match="the step failed") as caught:
        read_all()
    assert caught.value.body["error"]["type"] == "api_error"


def test_keys_come_in_anthropics_header(tmp_path):
    from served import serving

    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": {"ada": {"api_keys": ["a-key-of-adas"]}}}))
    with serving(tenants=path) as server:
        asked = {**ASKED, "messages": HELLO}
        with anthropic.Anthropic(base_url=server.url, api_key="a-key-of-adas", max_retries=0) as client:
            assert client.messages.create(**asked).content
        with (
            anthropic.Anthropic(base_url=server.url, api_key="another", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError, match="no known API key"),
        ):
            client.messages.create(**asked)
        bearer = {"Authorization": "Bearer a-key-of-adas"}
        assert httpx.post(f"{server.url}/v1/messages", json=asked, headers=bearer, timeout=60).status_code == 200
