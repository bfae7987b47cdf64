"""Answers that have a form, of models that reason and call tools: real ones, of the small model, which goes on as the
turns before do."""

import json
from pathlib import Path

import httpx
import openai
import pytest

MODEL = "smollm2-135m"
TEMPLATE = Path(__file__).parents[1] / "data" / "templates" / "hermes.jinja"
OPENED, CLOSED = "<think>\\n", "<think>\\n\\n</think>\\n\\n"
SWITCH = (
    "{%- if add_generation_prompt and enable_thinking is defined %}"
    f"{{{{ '{OPENED}' if enable_thinking else '{CLOSED}' }}}}{{% endif %}}"
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(serving, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(TEMPLATE.read_text().rstrip() + SWITCH)
    with serving(chat_template=template, reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def turns(answer):
    """Returns a conversation whose answers are all like this one, and a last question."""
    numbers = ("one", "two", "three", "four")
    messages = []
    for at, name in enumerate(numbers, 1):
        messages.append({"role": "user", "content": f"Number {name}?"})
        messages.append({"role": "assistant", "content": answer.format(at)})
    return [*messages, {"role": "user", "content": "Number five?"}]


def answer(client, stream, messages, thinking, **asked):
    """Returns the answer's message and finish reason; those of a stream put together."""
    template = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    asked = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 120, **asked}
    asked["extra_body"] = {**template, **asked.get("extra_body", {})}
    if not stream:
        (choice,) = client.chat.completions.create(**asked).choices
        return choice.message.model_dump(exclude_none=True), choice.finish_reason
    message, reason = {"content": "", "reasoning_content": "", "tool_calls": []}, None
    for chunk in client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        delta = choice.delta.model_dump(exclude_none=True)
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reason = choice.finish_reason or reason
    return {name: value for name, value in message.items() if value}, reason


THOUGHT = '<think>\nIt is {0}.\n</think>\n\n{{"b": {0}}}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [True, None])
def test_a_form_stands_behind_the_reasoning(client, stream, thinking):
    """The prompt begins it, or the model itself."""
    message, reason = answer(client, stream, turns(THOUGHT), thinking, response_format=FORM)
    assert message["reasoning_content"].startswith("It is")
    assert (set(json.loads(message["content"])), reason) == ({"a"}, "stop")


@pytest.mark.parametrize(
    ("form", "right"),
    [
        ({"choice": ["red", "blue"]}, ["red", "blue"]),
        ({"regex": "[xy]"}, ["x", "y"]),
        ({"grammar": 'start: "x" | "y}"'}, ["x", "y}"]),
        ({"grammar": 'root ::= "x" "y"'}, ["xy"]),
        ({"json": {"const": 7}}, ["7"]),
    ],
)
def test_every_form_stands_behind_reasoning(client, form, right):
    message, _ = answer(client, False, turns(THOUGHT), True, extra_body={"structured_outputs": form})
    assert message["reasoning_content"].startswith("It is")
    assert message["content"] in right


def test_a_form_is_all_where_the_prompt_has_ended_the_reasoning(client):
    message, reason = answer(client, False, turns(THOUGHT), False, response_format=FORM)
    assert "reasoning_content" not in message
    assert (set(json.loads(message["content"])), reason) == ({"a"}, "stop")


@pytest.mark.parametrize("keep", [False, True])
def test_responses_and_their_next_turns_have_forms_behind_reasoning(client, keep):
    form = {"format": {"type": "json_schema", "name": "number", "schema": SCHEMA}}
    asked = {"model": MODEL, "text": form, "temperature": 0, "extra_body": {"chat_template_kwargs": {}}}
    asked["extra_body"]["chat_template_kwargs"]["enable_thinking"] = True
    first = client.responses.create(**asked, input=turns(THOUGHT), store=keep)
    second = [client.responses.create(**asked, input="Number six?", previous_response_id=first.id)] if keep else []
    for response in (first, *second):
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert set(json.loads(response.output_text)) == {"a"}


@pytest.mark.parametrize("continued", [None, "<think>"])
def test_messages_have_forms_behind_reasoning(server, continued):
    """The template begins it, or the turn that the answer goes on with."""
    asked = {"model": MODEL, "max_tokens": 120, "temperature": 0, "messages": turns(THOUGHT)}
    asked["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    if continued is None:
        asked["thinking"] = {"type": "adaptive"}
    else:
        asked["messages"].append({"role": "assistant", "content": continued})
    blocks = httpx.post(f"{server.url}/v1/messages", json=asked, timeout=60).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert set(json.loads(blocks[1]["text"])) == {"a"}


def test_sessions_have_forms_behind_reasoning(client):
    asked = {"response_format": FORM, "extra_body": {"session_id": "reasons"}}
    for messages in (turns(THOUGHT), [{"role": "user", "content": "Number six?"}]):
        message, _ = answer(client, False, messages, True, **asked)
        assert message["reasoning_content"]
        assert set(json.loads(message["content"])) == {"a"}


def test_a_form_that_tokens_cannot_write_is_refused_behind_reasoning_too(client):
    for form in ({"choice": ["\U00040000"]}, {"json": {"const": "\U00040000"}}):
        with pytest.raises(openai.BadRequestError, match="tokens cannot write") as error:
            answer(client, False, turns(THOUGHT), True, extra_body={"structured_outputs": form})
        assert error.value.param == "structured_outputs"


@pytest.mark.parametrize("schema", ["{not json", "[" * 2000])
def test_a_schema_that_is_not_json_is_refused_behind_reasoning_too(client, schema):
    for tools in ({}, {"tools": [tool(strict=False)]}):
        with pytest.raises(openai.BadRequestError, match="the schema is not JSON"):
            answer(client, False, turns(THOUGHT), True, **tools, extra_body={"structured_outputs": {"json": schema}})


def tool(strict):
    parameters = {"properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    function = {"name": "get_weather", "parameters": {"type": "object", **parameters, "additionalProperties": False}}
    return {"type": "function", "function": {**function, "strict": strict}}


def weather(*, thinks=False):
    """Returns a conversation in which each question after the weather was answered by a call, and a last question."""
    messages = []
    for city in ("Paris", "Rome", "Oslo", "Bern"):
        call = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        messages.append({"role": "user", "content": f"What is the weather in {city}?"})
        said = {"content": "<think>\nI look.\n</think>\n"} if thinks else {}
        messages.append(
            {"role": "assistant", **said, "tool_calls": [{"id": city, "type": "function", "function": call}]}
        )
    return [*messages, {"role": "user", "content": "What is the weather in Berlin?"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [{}, {"response_format": FORM}, {"response_format": {"type": "json_object"}}])
@pytest.mark.parametrize("strict", [False, True])
def test_tools_are_called_beside_a_form(client, stream, form, strict):
    message, reason = answer(client, stream, weather(), None, tools=[tool(strict)], **form)
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Berlin"}
    assert (message.get("content"), reason) == (None, "tool_calls")
    message, reason = answer(client, stream, turns('{{"b": {0}}}'), None, tools=[tool(strict)], response_format=FORM)
    assert "tool_calls" not in message
    assert (set(json.loads(message["content"])), reason) == ({"a"}, "stop")


def test_reasoning_goes_before_calls_beside_a_form(client):
    asked = {"tools": [tool(strict=False)], "response_format": FORM}
    message, reason = answer(client, False, weather(thinks=True), True, **asked)
    assert (message["reasoning_content"], len(message["tool_calls"]), reason) == ("I look.", 1, "tool_calls")


def test_what_is_said_of_tools_holds_beside_a_form(client):
    asked = {"tools": [tool(strict=False)], "response_format": FORM}
    message, _ = answer(client, False, weather(), False, **asked, tool_choice="none")
    assert set(json.loads(message["content"])) == {"a"}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        message, reason = answer(client, False, turns('{{"b": {0}}}'), None, **asked, tool_choice=choice)
        (call,) = message["tool_calls"]
        assert (set(json.loads(call["function"]["arguments"])), reason) == ({"city"}, "tool_calls")
    twice = weather()
    for message in twice[1::2]:
        message["tool_calls"] *= 2
    message, _ = answer(client, False, twice, None, **asked)
    assert len(message["tool_calls"]) > 1
    message, _ = answer(client, False, twice, None, **asked, parallel_tool_calls=False)
    assert len(message["tool_calls"]) == 1


def test_a_session_calls_the_tools_that_it_keeps_beside_a_form(client):
    asked = {"response_format": FORM, "extra_body": {"session_id": "weather"}}
    for messages, tools in ((weather(), {"tools": [tool(strict=False)]}), (weather()[-1:], {})):
        message, _ = answer(client, False, messages, None, **asked, **tools)
        assert message["tool_calls"][0]["function"]["name"] == "get_weather"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_response_that_a_stop_string_cuts_is_incomplete(client, stream):
    function = {"type": "function", **tool(strict=True)["function"]}
    asked = {"model": MODEL, "input": "Weather?", "tools": [function], "tool_choice": "required", "stream": stream}
    for stop, status in (("}", "incomplete"), ("</tool_call>", "completed")):
        response = client.responses.create(**asked, extra_body={"stop": stop})
        if stream:
            *_, item, last = response
            assert (item.type, item.item.status) == ("response.output_item.done", status)
            response = last.response
        assert (response.status, response.output[0].status) == ("completed", status)


def test_responses_and_messages_call_tools_beside_a_form(client, server):
    (*before, question), function = weather(), tool(strict=True)["function"]
    given = [{"role": message["role"], "content": message.get("content") or ""} for message in before]
    for message, turn in zip(given, before, strict=True):
        for call in turn.get("tool_calls", ()):
            message["content"] = (
                f'<tool_call>\n{{"name": "get_weather", "arguments": {call["function"]["arguments"]}}}\n</tool_call>'
            )
    form = {"format": {"type": "json_schema", "name": "number", "schema": SCHEMA}}
    response = client.responses.create(
        model=MODEL, input=[*given, question], tools=[{"type": "function", **function}], text=form, temperature=0
    )
    assert [item.type for item in response.output] == ["function_call"]
    del function["strict"]
    function["input_schema"] = function.pop("parameters")
    asked = {"model": MODEL, "max_tokens": 120, "temperature": 0, "messages": [*given, question], "tools": [function]}
    asked["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answered = httpx.post(f"{server.url}/v1/messages", json=asked, timeout=60).json()
    assert ([block["type"] for block in answered["content"]], answered["stop_reason"]) == (["tool_use"], "tool_use")
