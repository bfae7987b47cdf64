"""Tools over HTTP, with OpenAI's own client. What the model says is given, but for constrained answers: the small one
calls no tools of its own accord."""

import functools
import json
import runpy
import sys
from pathlib import Path

import httpx
import jsonschema
import openai
import pytest

from pagemill.frontend.input_processor import InputProcessor
from pagemill.text.answer.formats import TOOL_CALLS
from pagemill.text.answer.of_model import AnswerFormats
from scripted import END, say

MODEL = "smollm2-135m"
TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "What is the weather in Paris?"}], "tools": [WEATHER]}


@pytest.fixture(scope="module")
def server(serving):
    with serving(chat_template=TEMPLATES / "hermes.jinja", reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def says(monkeypatch):
    """Makes all answers this text, five characters a token."""
    return functools.partial(say, monkeypatch)


def answers(client, stream, **asked):
    """Returns the choices' messages and finish reasons; those of a stream put together."""
    asked = {
        **ASKED,
        "stop": END,
        "max_tokens": 100,
        **asked,
        "extra_body": {"ignore_eos": True, **asked.get("extra_body", {})},
    }
    if not stream:
        choices = client.chat.completions.create(**asked).choices
        return [(choice.message.model_dump(exclude_none=True), choice.finish_reason) for choice in choices]
    messages, reasons = {}, {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            message = messages.setdefault(choice.index, {"role": "assistant"})
            delta = choice.delta.model_dump(exclude_none=True)
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({key: value for key, value in call.items() if key != "index"})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            assert choice.index not in reasons
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return [(messages[index], reasons[index]) for index in sorted(messages)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_given_apart_from_content(client, says, stream):
    says(f"Let me look.\n{CALL}\n{CALL}")
    ((message, reason),) = answers(client, stream)
    assert (message["content"], reason) == ("Let me look.", "tool_calls")
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    for call in message["tool_calls"]:
        assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    ((message, reason),) = answers(client, stream, parallel_tool_calls=False)
    assert (len(message["tool_calls"]), reason) == (1, "tool_calls")
    says(CALL)
    ((message, _),) = answers(client, stream)
    assert "content" not in message


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_has_calls_of_its_own(client, says, stream):
    says(CALL)
    given = answers(client, stream, n=3)
    assert len({message["tool_calls"][0]["id"] for message, _ in given}) == 3
    assert [reason for _, reason in given] == ["tool_calls"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_content_stays_where_no_tool_may_be_called(client, says, stream):
    says(CALL)
    for asked in ({"tools": openai.omit}, {"tool_choice": "none"}):
        assert answers(client, stream, **asked) == [({"role": "assistant", "content": CALL}, "stop")]
    other = {"type": "function", "function": {"name": "other"}}
    assert answers(client, stream, tools=[other]) == [({"role": "assistant", "content": CALL}, "stop")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_call_says_that_it_was_cut(client, says, stream):
    says(CALL)
    ((message, reason),) = answers(client, stream, max_tokens=13)
    assert reason == "length"
    assert '{"city": "Paris"}'.startswith(message["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_given_apart_from_content(client, says, stream):
    says(f"<think>\nRain?\n</think>\n\nLet me look.{CALL}")
    ((message, reason),) = answers(client, stream)
    assert (message["reasoning_content"], message["content"], reason) == ("Rain?", "Let me look.", "tool_calls")
    ((message, _),) = answers(client, stream, extra_body={"include_reasoning": False})
    assert "reasoning_content" not in message
    assert message["content"] == "Let me look."


def test_what_the_tool_said_goes_into_the_prompt(client, server, says):
    says(CALL)
    asked = {**ASKED, "stop": END, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    (message,) = (choice.message for choice in client.chat.completions.create(**asked).choices)
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    messages = [*ASKED["messages"], message, result]
    says("It rains.")
    answer = client.chat.completions.create(**{**ASKED, "messages": messages}, stop=END, max_tokens=60)
    assert answer.choices[0].message.content == "It rains."
    tokenizer = server.run(server.llm.tokenizer())
    said = [*ASKED["messages"], message.model_dump(), result]
    prompt = tokenizer.apply_chat_template(said, tools=[WEATHER])
    assert CALL in prompt
    assert "<tool_response>\nRain.\n</tool_response>" in prompt
    assert answer.usage.prompt_tokens == len(tokenizer.encode(prompt, add_special_tokens=False))


def test_an_agent_goes_on_in_a_session(client, server, says):
    says(f"Hm.\n{CALL}")
    name = {"extra_body": {"session_id": "agent", "ignore_eos": True}}
    asked = {**ASKED, "stop": END, "max_tokens": 60, **name}
    first = client.chat.completions.create(**asked)
    (call,) = first.choices[0].message.tool_calls
    kept = httpx.get(f"{server.url}/v1/sessions/agent").json()
    assert kept["messages"][1]["tool_calls"] == [call.model_dump()]
    assert kept["messages"][1]["content"] == "Hm."
    says("It rains.")
    result = [{"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    second = client.chat.completions.create(**{**asked, "messages": result, "tools": openai.omit})
    assert second.choices[0].message.content == "It rains."
    assert second.usage.prompt_tokens_details.cached_tokens >= (first.usage.total_tokens - 1) // 16 * 16
    says(CALL)  # the session's tools are still there
    question = [{"role": "user", "content": "And tomorrow?"}]
    third = client.chat.completions.create(**{**asked, "messages": question, "tools": openai.omit})
    assert third.choices[0].message.tool_calls[0].id != call.id
    assert third.usage.prompt_tokens_details.cached_tokens >= (second.usage.total_tokens - 1) // 16 * 16
    other = {"type": "function", "function": {"name": "other"}}
    fourth = client.chat.completions.create(**{**asked, "messages": question, "tools": [other]})
    assert fourth.usage.prompt_tokens_details.cached_tokens < 160  # all is written anew, with the new tools


BOUNDED = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": BOUNDED}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_is_wanted_always_comes_and_is_valid(client, stream, choice):
    asked = {"tools": TOOLS, "tool_choice": choice, "stop": None, "extra_body": {"ignore_eos": False}}
    for message, reason in answers(client, stream, **asked, n=4, temperature=1.5, seed=1):
        (call,) = message["tool_calls"]
        assert (message.get("content"), reason) == (None, "tool_calls")
        if call["function"]["name"] == "get_weather":
            jsonschema.validate(json.loads(call["function"]["arguments"]), BOUNDED)
        else:
            assert (choice, call["function"]) == ("required", {"name": "now", "arguments": "{}"})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_openais_own_accumulator_puts_a_streamed_call_together(client, choice):
    asked = {**ASKED, "tools": TOOLS, "tool_choice": choice, "max_tokens": 100}
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.type == "function"
    assert isinstance(json.loads(call.function.arguments), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_a_call_that_is_cut_before_its_name_is_no_content(client, stream, tokens):
    asked = {"tools": TOOLS, "tool_choice": "required", "stop": None, "max_tokens": tokens}
    ((message, reason),) = answers(client, stream, **asked)
    assert (message.get("content") or None, message.get("tool_calls"), reason) == (None, None, "length")


def test_no_session_keeps_a_call_that_is_cut_before_its_name_as_text(client, server):
    asked = {"tools": TOOLS, "tool_choice": "required", "stop": None, "max_tokens": 4}
    answers(client, False, **asked, extra_body={"session_id": "cut", "ignore_eos": False})
    kept = httpx.get(f"{server.url}/v1/sessions/cut").json()["messages"]
    assert kept[-1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_string_cuts_is_no_whole_one(client, stream):
    asked = {"tools": TOOLS, "tool_choice": "required", "extra_body": {"ignore_eos": False}}
    ((message, reason),) = answers(client, stream, **asked, stop=["}"])
    (call,) = message["tool_calls"]
    assert (call["function"]["arguments"].startswith("{"), reason) == (True, "stop")
    ((_, reason),) = answers(client, stream, **asked, stop=["</tool_call>"])
    assert reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_left_out_may_be_cut(client, says, stream):
    says(CALL + CALL[:-30])
    ((message, reason),) = answers(client, stream, parallel_tool_calls=False)
    assert (len(message["tool_calls"]), reason) == (1, "tool_calls")
    ((message, reason),) = answers(client, stream)
    assert (len(message["tool_calls"]), reason) == (2, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_with_whole_arguments_is_one_though_its_end_is_wrong(client, says, stream):
    says(CALL.replace("}}", "}"))
    ((message, reason),) = answers(client, stream)
    (call,) = message["tool_calls"]
    assert (call["function"]["arguments"], reason) == ('{"city": "Paris"}', "tool_calls")


def test_a_turn_keeps_the_marks_of_calls_of_an_earlier_ones_tools(client, monkeypatch):
    monkeypatch.setattr(AnswerFormats, "needs_special_tokens", lambda self, with_tools: with_tools)
    process, skipped = InputProcessor.process, []

    def recorded(self, prompt, params, *args, **kwargs):
        skipped.append(params.skip_special_tokens)
        return process(self, prompt, params, *args, **kwargs)

    monkeypatch.setattr(InputProcessor, "process", recorded)
    asked = {"max_tokens": 4, "extra_body": {"session_id": "marks", "ignore_eos": False}}
    for tools in (TOOLS, None):
        answers(client, False, **asked, tools=tools or openai.omit)
    answers(client, False, max_tokens=4, tools=openai.omit)
    assert skipped == [False, False, True]


def test_tools_that_only_the_session_keeps_are_not_called_beside_a_form_if_calls_have_no_mark(client, monkeypatch):
    form = {"response_format": {"type": "json_object"}, "max_tokens": 60, "temperature": 0}
    session = {"session_id": "unmarked", "ignore_eos": False}
    answers(client, False, tools=TOOLS, max_tokens=4, temperature=0, extra_body=session)
    monkeypatch.setattr(AnswerFormats, "reasoning", property(lambda self: None))
    monkeypatch.setattr(AnswerFormats, "tool_calls", property(lambda self: TOOL_CALLS["llama3_json"]))
    ((message, _),) = answers(client, False, tools=openai.omit, extra_body=session, **form)
    assert message["content"].startswith("{")
    with pytest.raises(openai.BadRequestError, match="leave one of them out, or set tool_choice to 'none'"):
        answers(client, False, tools=TOOLS, **form)


def test_the_example_calls_a_tool_and_answers(server, monkeypatch, capsys):
    example = Path(__file__).parents[2] / "examples" / "agent.py"
    monkeypatch.setattr(sys, "argv", ["agent.py", "--url", f"{server.url}/v1", "What is 17 times 23?"])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.startswith("calculate({")


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_makes_two_tool_turns_in_a_session(client, server, stream):
    def ask(message, choice):
        extra = {"session_id": f"two-turns-{stream}", "ignore_eos": False}
        asked = {"tools": TOOLS, "tool_choice": choice, "messages": [message], "stop": None, "extra_body": extra}
        ((answer, _),) = answers(client, stream, **asked, temperature=0)
        return answer

    def result_of(answer):
        (call,) = answer["tool_calls"]
        return {"role": "tool", "tool_call_id": call["id"], "content": "Rain."}

    first = ask({"role": "user", "content": "What time is it, and what is the weather in Paris?"}, "required")
    second = ask(result_of(first), {"type": "function", "function": {"name": "get_weather"}})
    jsonschema.validate(json.loads(second["tool_calls"][0]["function"]["arguments"]), BOUNDED)
    last = ask(result_of(second), "none")
    kept = httpx.get(f"{server.url}/v1/sessions/two-turns-{stream}").json()["messages"]
    assert [message["role"] for message in kept] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert kept[-1]["content"].strip() == last["content"].strip()


def test_a_strict_tool_is_called_by_its_schema_against_what_the_model_likes(client):
    messages = []
    for city in ("Paris", "Rome", "Oslo", "Bern"):
        call = {"name": "get_weather", "arguments": json.dumps({"town": city})}
        messages.append({"role": "user", "content": f"Weather in {city}?"})
        messages.append({"role": "assistant", "tool_calls": [{"id": city, "type": "function", "function": call}]})
    messages.append({"role": "user", "content": "Weather in Lima?"})
    keys = {}
    for strict in (False, True):
        tool = {"type": "function", "function": {"name": "get_weather", "parameters": BOUNDED, "strict": strict}}
        asked = {"messages": messages, "tools": [tool], "stop": None, "temperature": 0}
        ((message, _),) = answers(client, False, **asked, extra_body={"ignore_eos": False})
        keys[strict] = set(json.loads(message["tool_calls"][0]["function"]["arguments"]))
    assert keys[False] == {"town"}
    assert {"city", "unit"} <= keys[True] <= BOUNDED["properties"].keys()


def refused(client, **asked):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{**ASKED, "max_tokens": 1, **asked})
    return error.value.param, error.value.message


def function(name="f", **more):
    return {"type": "function", "function": {"name": name, **more}}


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def called(arguments, **more):
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"tools": [function()] * 129}, "tools", "at most 128"),
        ({"tools": [function()] * 2}, "tools", "'f' twice"),
        ({"tools": [function("a b")]}, "tools", "pattern"),
        ({"tools": [function("x" * 129)]}, "tools", "pattern"),
        ({"tools": [function(description="x" * 270_000)]}, "tools", "262144 characters"),
        ({"tools": [function(parameters=nested(100))]}, "tools", "nested deeper"),
        ({"tools": [{"type": "code"}]}, "tools", "function"),
        ({"tools": [function(other=1)]}, "tools", "other"),
        ({"tools": [function(parameters={"type": "array"})], "tool_choice": "required"}, "tools", "'array'"),
        ({"tools": [function(parameters={"type": 1})], "tool_choice": "required"}, "tools", "1"),
        (
            {"tools": [function(parameters={"properties": {"a": {"$ref": "#/no"}}})], "tool_choice": "required"},
            "tools",
            "tools cannot be compiled",
        ),
        (
            {"tools": [function(description="x", parameters={"description": "x" * 70_000}, strict=True)]},
            "tools",
            "65536",
        ),
        (
            {"tools": [function(parameters={"properties": {"a": {"enum": []}}, "required": ["a"]}, strict=True)]},
            "tools",
            "'a' is unsatisfiable",
        ),
        (
            {"tools": [function(strict=True)], "extra_body": {"use_beam_search": True, "n": 2}},
            "use_beam_search",
            "leave one of",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}},
            "response_format",
            "response_format cannot be compiled",
        ),
        (
            {
                "tools": [function(parameters={"properties": {"a": {"$ref": "#/no"}}}, strict=True)],
                "response_format": {"type": "json_object"},
            },
            "response_format",
            "response_format or tools cannot be compiled",
        ),
        (
            {
                "tools": [function(parameters={"description": "x" * 70_000}, strict=True)],
                "response_format": {"type": "json_object"},
            },
            "response_format",
            "response_format, with the tools' schemas, make a grammar",
        ),
        ({"tools": openai.omit, "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g', which is not among"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "no tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "x"}]}, "messages", "only one of role tool"),
        ({"messages": [{**called("{}"), "role": "user"}]}, "messages", "only one of role assistant"),
        ({"messages": [{"role": "assistant"}]}, "messages", "has no content"),
        ({"messages": [called("no")]}, "messages", "no JSON object"),
        ({"messages": [called("[" * 60_000)]}, "messages", "no JSON object"),
        ({"messages": [called(json.dumps(nested(100)))]}, "messages", "nested deeper"),
        ({"messages": [called("{}", other=1)]}, "messages", "other"),
        (
            {"messages": [{**called("{}"), "tool_calls": called("{}")["tool_calls"] * 17_000}]},
            "messages",
            "at most 16384",
        ),
    ],
)
def test_wrong_tools_are_refused_in_words(client, asked, param, said):
    found, message = refused(client, **asked)
    assert (found, said in message) == (param, True), message


def test_a_template_without_tools_says_so(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        param, message = refused(client)
        assert (param, "has no place for them" in message) == ("tools", True)
        param, message = refused(client, tool_choice="required")
        assert (param, "has no place for them" in message) == ("tools", True)
        param, message = refused(client, tools=openai.omit, messages=[called("{}")])
        assert (param, "tool_calls, but this model's chat template has no place" in message) == ("messages", True)
        assert client.chat.completions.create(**ASKED, max_tokens=1, tool_choice="none").choices
