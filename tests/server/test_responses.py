"""`/v1/responses`, with OpenAI's own client."""

import functools
import json
from pathlib import Path

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseOutputMessage

from pagemill.server.protocol.responses import LOGPROBS
from pagemill.text.answer.of_model import AnswerFormats
from pagemill.text.chat_template import ChatTemplate
from scripted import END, say

MODEL = "smollm2-135m"
GREEDY = {"model": MODEL, "temperature": 0, "max_output_tokens": 3}
TEMPLATE = Path(__file__).parents[1] / "data" / "templates" / "hermes.jinja"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LONG = "My name is Ada, and I live in a small house by the sea with two cats and a dog. Say hello."


@pytest.fixture
def calls_tools(served, monkeypatch):
    """Gives the model a chat template with tools and reasoning."""
    tokenizer = served.run(served.llm.tokenizer())
    template = ChatTemplate(TEMPLATE.read_text(), {})
    monkeypatch.setattr(tokenizer, "_compiled", lambda *_: template)
    monkeypatch.setattr(tokenizer, "answers", AnswerFormats(tokenizer, "hermes", "qwen3"))


@pytest.fixture
def says(monkeypatch):
    """Makes all answers this text, twelve characters a token."""
    return functools.partial(say, monkeypatch, size=12)


SCRIPTED = {"model": MODEL, "max_output_tokens": 60, "extra_body": {"stop": END, "ignore_eos": True}}


def whole_blocks(usage):
    return (usage.total_tokens - 1) // 16 * 16


def test_text_in_text_out(client, v1):
    asked = {**GREEDY, "instructions": "Be brief.", "metadata": {"a": "b"}}
    response = client.responses.create(**asked, input="Hello!", store=False)
    chat = client.chat.completions.create(
        model=MODEL,
        temperature=0,
        max_tokens=3,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}],
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.total_tokens == chat.usage.total_tokens
    assert response.status == {"stop": "completed", "length": "incomplete"}[chat.choices[0].finish_reason]
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be brief.", {"a": "b"}, 3)
    same = client.responses.create(
        **asked, input=[{"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}], store=False
    )
    assert same.output_text == response.output_text
    assert v1.get("/sessions").json()["data"] == []


@pytest.mark.parametrize("store", [False, True])
def test_the_client_parses_the_stream(client, store):
    asked = {**GREEDY, "max_output_tokens": 4}
    with client.responses.stream(**asked, input="Hello!", store=store) as stream:
        events = list(stream)
    types = [event.type for event in events]
    deltas = types.count("response.output_text.delta")
    assert types == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * deltas,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert last.incomplete_details.reason == "max_output_tokens"
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == last.output_text
    assert client.responses.create(**asked, input="Hello!", store=False).output_text == last.output_text
    assert last.output[0].status == "incomplete"
    if store:
        assert client.responses.retrieve(last.id).to_dict() == last.to_dict()


def test_a_completed_stream_has_a_final_response(client, says):
    says("Hello.")
    with client.responses.stream(**SCRIPTED, input="Hi", store=False) as stream:
        stream.until_done()
        final = stream.get_final_response()
    assert (final.output_text, final.status, final.usage.output_tokens_details.reasoning_tokens) == (
        "Hello.",
        "completed",
        0,
    )


def test_a_response_goes_on_and_forks(client, v1):
    first = client.responses.create(**GREEDY, input=LONG)
    second = client.responses.create(**GREEDY, input="What is my name?", previous_response_id=first.id)
    other = client.responses.create(**GREEDY, input="Where do I live?", previous_response_id=first.id)
    for branch in (second, other):
        assert branch.usage.input_tokens_details.cached_tokens >= whole_blocks(first.usage)
        assert branch.previous_response_id == first.id
    third = client.responses.create(**GREEDY, input="Thanks.", previous_response_id=second.id)
    assert third.usage.input_tokens_details.cached_tokens >= whole_blocks(second.usage)
    for text, found in (("What is my name?", second), ("Where do I live?", other)):
        card = v1.get(f"/sessions/{found.id}").json()
        said = [message["content"] for message in card["messages"]]
        assert said == [LONG, first.output_text, text, found.output_text]
        assert sum(card["kv_blocks"].values()) == (found.usage.total_tokens - 1) // 16


def test_what_is_not_stored_goes_on_without_a_trace(client):
    first = client.responses.create(**GREEDY, input=LONG)
    loose = client.responses.create(**GREEDY, input="Hm?", previous_response_id=first.id, store=False)
    assert loose.usage.input_tokens_details.cached_tokens >= whole_blocks(first.usage)
    for wrong in (loose.id, "talk"):
        with pytest.raises(openai.NotFoundError, match="store false") as refused:
            client.responses.create(**GREEDY, input="Hm?", previous_response_id=wrong)
        assert refused.value.param == "previous_response_id"


def test_instructions_are_of_one_response(client, v1):
    first = client.responses.create(**GREEDY, input=LONG, instructions="Be brief.")
    same = client.responses.create(**GREEDY, input="Hm?", instructions="Be brief.", previous_response_id=first.id)
    assert same.usage.input_tokens_details.cached_tokens >= whole_blocks(first.usage)
    none = client.responses.create(**GREEDY, input="Hm?", previous_response_id=first.id)
    other = client.responses.create(**GREEDY, input="Hm?", instructions="Rhyme.", previous_response_id=none.id)
    asked = [{"role": "user", "content": LONG}, {"role": "assistant", "content": first.output_text}]
    asked.append({"role": "user", "content": "Hm?"})
    whole = client.chat.completions.create(model=MODEL, messages=asked, temperature=0, max_tokens=3)
    assert whole.choices[0].message.content == none.output_text
    assert whole.usage.prompt_tokens == none.usage.input_tokens
    card = v1.get(f"/sessions/{other.id}").json()
    assert (card["instructions"], card["num_messages"]) == ("Rhyme.", 6)


def test_kept_responses_are_read_listed_and_deleted(client, v1):
    items = [{"role": "user", "content": text} for text in ("One.", "Two.", "Three.")]
    response = client.responses.create(**GREEDY, input=items, user="ada")
    found = client.responses.retrieve(response.id)
    assert found.to_dict() == response.to_dict()
    page = client.responses.input_items.list(response.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["Three.", "Two."]
    assert page.has_more
    assert [item.content[0].text for item in page] == ["Three.", "Two.", "One."]
    (first, *_) = client.responses.input_items.list(response.id, order="asc").data
    assert (first.content[0].text, first.role) == ("One.", "user")
    with pytest.raises(openai.BadRequestError, match="no item of this input"):
        client.responses.input_items.list(response.id, after="x")
    client.responses.delete(response.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            gone(response.id)


def test_a_response_is_its_namespaces(client, v1):
    mine = client.responses.create(**GREEDY, input=LONG, extra_body={"cache_salt": "mine"})
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(mine.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**GREEDY, input="Hm?", previous_response_id=mine.id)
    assert client.responses.retrieve(mine.id, extra_query={"cache_salt": "mine"}).output_text == mine.output_text
    on = client.responses.create(**GREEDY, input="Hm?", previous_response_id=mine.id, extra_body={"cache_salt": "mine"})
    assert on.usage.input_tokens_details.cached_tokens >= whole_blocks(mine.usage)


def test_a_session_is_no_response_and_a_response_no_session(client, v1):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    v1.post("/chat/completions", json={**body, "session_id": "talk"}).raise_for_status()
    for name in ("talk", "nobodys"):
        for answer in (v1.get(f"/responses/{name}"), v1.delete(f"/responses/{name}")):
            assert (answer.status_code, "there is no response" in answer.text) == (404, True)
    response = client.responses.create(**GREEDY, input="Hi")
    refused = v1.post("/chat/completions", json={**body, "session_id": response.id})
    assert (refused.status_code, "previous_response_id" in refused.text) == (400, True)
    fork = v1.post(f"/sessions/{response.id}/fork", json={"session_id": "fork"})
    assert fork.json()["num_messages"] == 2
    v1.post("/chat/completions", json={**body, "session_id": "fork"}).raise_for_status()
    assert v1.get("/sessions/fork").json()["num_turns"] == 2


def test_answers_follow_a_schema(client):
    class Point(pydantic.BaseModel):
        x: bool
        y: bool

    asked = 'Repeat: {"x": true, "y": false}'
    response = client.responses.parse(
        model=MODEL, input=asked, text_format=Point, max_output_tokens=60, temperature=0, store=False
    )
    assert isinstance(response.output_parsed, Point)
    assert response.text.format.name == "Point"
    response = client.responses.create(
        model=MODEL, input="An object.", text={"format": {"type": "json_object"}}, max_output_tokens=5, store=False
    )
    assert response.output_text.lstrip().startswith("{")


def test_an_agent_calls_a_tool_and_goes_on(client, calls_tools):
    asked = {"model": MODEL, "tools": [WEATHER], "max_output_tokens": 40, "temperature": 0}
    first = client.responses.create(**asked, input="What is the weather in Paris?", tool_choice="required")
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    short = {**asked, "max_output_tokens": 4, "tool_choice": "none"}
    second = client.responses.create(**short, input=[result], previous_response_id=first.id)
    again = client.responses.create(
        **asked, input=[result], previous_response_id=first.id, tool_choice="required", store=False
    )
    assert again.usage.input_tokens_details.cached_tokens >= whole_blocks(first.usage)
    assert [item.type for item in again.output] == ["function_call"]
    assert [item.type for item in second.output] == ["message"]


SAID = f"<think>\nRain?\n</think>\n\nLet me look.{CALL}{CALL}"


def test_reasoning_without_words_is_left_out(client):
    empty = {"type": "reasoning", "id": "rs_1", "summary": []}
    asked = [empty, empty, {"role": "user", "content": "Hi"}]
    assert client.responses.create(model="smollm2-135m", input=asked, max_output_tokens=2).status == "incomplete"


def test_streams_tell_of_reasoning_text_and_calls(client, calls_tools, says):
    says(SAID)
    with client.responses.stream(**SCRIPTED, input="Rain?", tools=[WEATHER], tool_choice="auto") as stream:
        events = list(stream)
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output[0].content[0].text == "Rain?"
    assert final.output_text == "Let me look."
    assert final.usage.output_tokens_details.reasoning_tokens > 0
    assert len({call.call_id for call in final.output[2:]}) == 2
    arguments = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in arguments] == [{"city": "Paris"}] * 2
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "Rain?"
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert added == done == [item.id for item in final.output]
    kept = client.responses.retrieve(final.id)
    assert [item.id for item in kept.output] == added
    assert (kept.output_text, kept.usage) == (final.output_text, final.usage)
    alone = client.responses.create(**SCRIPTED, input="Rain?", tools=[WEATHER], parallel_tool_calls=False, store=False)
    assert [item.type for item in alone.output] == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize("behind", ["", "\nSoon."])
def test_what_goes_out_may_come_in_again(client, calls_tools, says, v1, behind):
    says(SAID + behind)
    asked = {**SCRIPTED, "tools": [WEATHER]}
    first = client.responses.create(**asked, input="Rain?")
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "Yes."}
        for item in first.output
        if item.type == "function_call"
    ]
    says("It rains.")
    sent = client.responses.create(**asked, input=[{"role": "user", "content": "Rain?"}, *first.output, *results])
    kept = client.responses.create(**asked, input=results, previous_response_id=first.id)
    messages = [v1.get(f"/sessions/{each.id}").json()["messages"] for each in (sent, kept)]
    assert messages[0] == messages[1]
    assert messages[0][1]["reasoning_content"] == "Rain?"
    listed, answer = (v1.get(f"/responses/{sent.id}{rest}").json() for rest in ("/input_items", ""))
    assert ResponseItemList.model_validate(listed)
    assert Response.model_validate(answer)
    again = client.responses.create(**asked, input=[{"role": "assistant", "content": "Yes."}])
    (said,) = v1.get(f"/responses/{again.id}/input_items").json()["data"]
    assert ResponseOutputMessage.model_validate(said).status == "completed"


def output_of(call_id):
    return {"type": "function_call_output", "call_id": call_id, "output": "Yes."}


def test_an_output_belongs_to_a_call(client, calls_tools, says, v1):
    """The call may be in the input, in the previous response, or in a response before that one."""
    says(CALL)
    first = client.responses.create(**SCRIPTED, input="Rain?", tools=[WEATHER])
    (call,) = first.output
    says("It rains.")
    second = client.responses.create(**SCRIPTED, input="Well?", previous_response_id=first.id)
    for asked in (
        {"input": [output_of("call_x")]},
        {"input": [output_of(call.call_id)]},
        {"input": [call, output_of(call.call_id), output_of("call_x")]},
        {"input": [output_of("call_x")], "previous_response_id": first.id},
    ):
        with pytest.raises(openai.BadRequestError, match="no tool call found for function call output") as refused:
            client.responses.create(**SCRIPTED, **asked)
        assert refused.value.body["param"] == "input"
    for asked in (
        {"input": [output_of(call.call_id), call]},
        {"input": [output_of(call.call_id)], "previous_response_id": second.id},
    ):
        assert client.responses.create(**SCRIPTED, **asked).output_text == "It rains."


def test_an_output_may_belong_to_a_call_beside_one_that_was_cut(client, calls_tools, says, v1):
    says(f'{CALL}<tool_call>\n{{"name": "get_weather", "arguments": {{"ci')
    first = client.responses.create(**SCRIPTED, input="Rain?", tools=[WEATHER])
    whole, cut = first.output
    assert cut.arguments == '{"ci'
    says("It rains.")
    asked = {"input": [output_of(whole.call_id)], "previous_response_id": first.id}
    assert client.responses.create(**SCRIPTED, **asked).output_text == "It rains."


def test_input_tokens_are_those_of_the_same_request(client, calls_tools, says, v1):
    says(SAID)
    first = client.responses.create(**SCRIPTED, input="Rain?", instructions="Be brief.", tools=[WEATHER])
    outputs = [output_of(item.call_id) for item in first.output if item.type == "function_call"]
    for asked in (
        {"input": "Rain?"},
        {"input": [{"role": "user", "content": "Rain?"}], "instructions": "Be brief."},
        {"input": "Rain?", "tools": [WEATHER], "tool_choice": "required", "reasoning": {"effort": "none"}},
        {"input": "Rain?", "tools": [WEATHER], "tool_choice": "none", "text": {"format": {"type": "json_object"}}},
        {"input": outputs, "previous_response_id": first.id},
        {"input": outputs, "previous_response_id": first.id, "instructions": "Be brief.", "tools": [WEATHER]},
    ):
        counted = client.responses.input_tokens.count(model=MODEL, **asked)
        answered = client.responses.create(model=MODEL, **asked, max_output_tokens=2, store=False)
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", answered.usage.input_tokens)
    assert [card["id"] for card in v1.get("/sessions").json()["data"]] == [first.id]


def test_input_tokens_are_counted_beyond_the_context(client):
    short, long = (client.responses.input_tokens.count(input="Hi " * times).input_tokens for times in (1, 5000))
    assert long >= short + 4999
    with pytest.raises(openai.BadRequestError, match=r"the conversation has \d+ characters; give at most 1048576"):
        client.responses.input_tokens.count(input="Hi " * 400_000)


@pytest.mark.parametrize(
    ("asked", "status", "param", "said"),
    [
        ({"input": "x", "max_output_tokens": 5}, 400, "max_output_tokens", "this endpoint has no argument"),
        ({"input": [output_of("c")]}, 400, "input", "no tool call found"),
        ({"input": "x", "previous_response_id": "resp_x"}, 404, "previous_response_id", "there is no response"),
        ({"input": "x", "tools": [WEATHER]}, 400, "tools", "has no place for them"),
        ({"input": "x", "model": "other"}, 404, "model", "not served"),
    ],
)
def test_what_could_not_be_answered_is_not_counted(v1, asked, status, param, said):
    answer = v1.post("/responses/input_tokens", json=asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], said in error["message"]) == (status, param, True), error


def item(**fields):
    return {"input": [fields]}


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "one item"),
        (item(type="item_reference", id="x"), "input", "'item_reference'; send the item itself"),
        (item(type="computer_call", id="x"), "input", "'computer_call'; leave it out"),
        (item(role="user", content=[{"type": "input_image", "image_url": "x"}]), "input", "text only"),
        (item(role="user", content="x", other=1), "input", "'other'"),
        (item(type="reasoning", encrypted_content="x"), "input", "'encrypted_content'"),
        (item(type="function_call", call_id="c", name="f", arguments="no"), "input", "no JSON object"),
        (item(type="function_call_output", output="x"), "input", "call_id"),
        ({"input": "x", "background": True}, "background", "set stream to true"),
        ({"input": "x", "conversation": "c"}, "conversation", "previous_response_id"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs", "message.output_text.logprobs"),
        ({"input": "x", "top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "to 20"),
        ({"input": "x", "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "'allowed_tools'"),
        ({"input": "x", "truncation": "auto"}, "truncation", "disabled"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include", "encrypted_content"),
        ({"input": "x", "max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens 5000"),
        ({"input": "x", "max_tokens": 5}, "max_tokens", "'max_output_tokens'"),
        ({"input": "x", "temperature": -1}, "temperature", "-1"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"input": "x", "tools": [WEATHER] * 2}, "tools", "twice"),
        ({"input": "x", "tools": [WEATHER]}, "tools", "has no place for them"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g'"),
        ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning", "does not read it"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "no schema"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "text", "type"),
        ({"input": "x", "metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
        ({"input": "x", "n": 2}, "n", "does not serve"),
    ],
)
def test_what_is_not_served_is_refused_in_words(client, asked, param, said):
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/responses", body={"model": MODEL, **asked}, cast_to=object)
    error = refused.value.body
    assert (error["param"], said in error["message"]) == (param, True), error


def test_a_client_that_goes_leaves_nothing(served, v1):
    body = {"model": MODEL, "input": "Once", "max_output_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/responses", json=body, timeout=30) as response:
        assert next(response.iter_lines()) == "event: response.created"
    served.wait_until_idle()
    assert v1.get("/sessions").json()["data"] == []
