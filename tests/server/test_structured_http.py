"""Structured outputs over HTTP: OpenAI's response_format and vLLM's structured_outputs, with the official client."""

from __future__ import annotations

import json
import re
import threading
import time

import jsonschema
import openai
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from random_schemas import SCHEMAS

MODEL = "smollm2-135m"
MESSAGES = [{"role": "user", "content": "Name a person as JSON."}]


class Person(BaseModel):
    name: str = Field(max_length=15)
    age: int = Field(ge=0, le=120)
    tags: list[str] = Field(max_length=0)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client


def test_the_official_client_parses_models(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Person, max_tokens=150, n=3, temperature=1.0, seed=3
    )
    finished = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert finished
    assert all(isinstance(choice.message.parsed, Person) for choice in finished)


def test_streams_follow_a_schema(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=SCHEMA, max_tokens=150, n=2, seed=5, stream=True
    )
    texts, ends = ["", ""], ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert "stop" in ends
    for text, end in zip(texts, ends, strict=True):
        if end == "stop":
            Person.model_validate_json(text)


@pytest.mark.parametrize("n", [1, 2])
def test_streamed_texts_of_any_characters_are_whole(client, n):
    """Events that bring nothing but text are written around it."""
    said = '"quoted", \\back\\ \t\x07\x7f é \u2028 漢字 😀 </script> {"": ""}\nlast'
    how = {"max_tokens": 100, "n": n, "stream": True, "extra_body": {"structured_outputs": {"choice": [said]}}}
    texts, more = {}, 0
    for chunk in client.completions.create(model=MODEL, prompt="Say:", **how):
        for choice in chunk.choices:
            texts["completion", choice.index] = texts.get(("completion", choice.index), "") + choice.text
            more += bool(choice.text)
    for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, **how):
        for choice in chunk.choices:
            texts["chat", choice.index] = texts.get(("chat", choice.index), "") + (choice.delta.content or "")
    assert texts == {(kind, index): said for kind in ("completion", "chat") for index in range(n)}
    assert more > 5 * n


@settings(max_examples=3, phases=[Phase.generate])
@given(schemas=st.lists(SCHEMAS, min_size=4, max_size=4))
def test_random_schemas_over_http(client, schemas):
    def ask(at, schema):
        answers[at] = client.completions.create(
            model=MODEL,
            prompt="JSON:",
            max_tokens=100,
            temperature=1.0,
            extra_body={"structured_outputs": {"json": schema}},
        ).choices[0]

    answers = {}
    threads = [threading.Thread(target=ask, args=each) for each in enumerate(schemas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, schema in enumerate(schemas):
        if answers[at].finish_reason == "stop":
            jsonschema.validate(json.loads(answers[at].text), schema)


@pytest.mark.parametrize(
    ("form", "expression"),
    [
        ({"choice": ["red", "green", "blue"]}, "red|green|blue"),
        ({"regex": r"[A-Z]{3}-\d{4}"}, r"[A-Z]{3}-\d{4}"),
        ({"grammar": 'start: WORD ("," WORD){2}\nWORD: /[a-z]{1,4}/'}, r"[a-z]{1,4}(,[a-z]{1,4}){2}"),
        ({"grammar": 'root ::= "x" [0-9] [0-9] "y"'}, "x[0-9]{2}y"),
    ],
)
def test_choices_expressions_and_grammars(client, form, expression):
    common = {"model": MODEL, "max_tokens": 40, "n": 4, "temperature": 1.0, "extra_body": {"structured_outputs": form}}
    answers = [choice.text for choice in client.completions.create(prompt="Say:", **common).choices]
    answers += [
        choice.message.content for choice in client.chat.completions.create(messages=MESSAGES, **common).choices
    ]
    assert [answer for answer in answers if re.fullmatch(expression, answer) is None] == []


def test_sessions_and_json_objects(v1):
    body = {"model": MODEL, "session_id": "structured", "max_tokens": 60, "response_format": {"type": "json_object"}}
    for text in ("Give me an object.", "And another one."):
        answer = v1.post("/chat/completions", json={**body, "messages": [{"role": "user", "content": text}]}).json()
        choice = answer["choices"][0]
        assert choice["message"]["content"].lstrip().startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert len(v1.get("/sessions/structured").json()["messages"]) == 4


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": SCHEMA["json_schema"]}},
            "response_format",
            "leave",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}},
            "response_format",
            "Invalid type",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"choice": ["\U00040000"]}}, "structured_outputs", "tokens cannot write"),
        ({"structured_outputs": {"regex": "\U00040000"}}, "structured_outputs", "cannot be written with"),
        ({"guided_json": {}}, "guided_json", '{"structured_outputs": {"json": …}}'),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "did you mean 'json'"),
        ({"structured_outputs": 5}, "structured_outputs", "an object"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "grammar"),
        (
            {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}},
            "response_format",
            "one",
        ),
        ({"structured_outputs": {"choice": ["a"]}, "min_tokens": 9}, "structured_outputs", "min_tokens"),
        (
            {"structured_outputs": {"choice": ["a"]}, "use_beam_search": True, "max_tokens": 3},
            "structured_outputs",
            "use_beam_search",
        ),
    ],
)
def test_refusals_name_the_field(v1, path, fields, param, said):
    body = {"model": MODEL, **({"prompt": "Say"} if path == "completions" else {"messages": MESSAGES}), **fields}
    answer = v1.post(f"/{path}", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert said in error["message"]


def test_stop_strings_cut(v1):
    body = {"model": MODEL, "prompt": "Say", "structured_outputs": {"choice": ["red apple"]}, "stop": " app"}
    (choice,) = v1.post("/completions", json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("red", "stop")


def test_text_is_no_demand(v1):
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 3, "response_format": {"type": "text"}}
    assert v1.post("/completions", json=body).status_code == 200


def test_a_costly_schema_holds_up_nobody(v1, served):
    """The server answers while a schema is compiled that takes long: little processor time passes before it does."""
    schema = {"properties": {f"field {i}": {"type": "string"} for i in range(1500)}}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "structured_outputs": {"json": schema}}
    refused = []
    asking = threading.Thread(target=lambda: refused.append(v1.post("/completions", json=body)))
    times, begun = [], time.process_time()
    asking.start()
    while asking.is_alive():
        begin = time.process_time()
        assert v1.get("/models").status_code == 200
        times.append(time.process_time() - begin)
    asking.join()
    assert refused[0].status_code in (200, 400)
    assert max(times) < max(0.3, (time.process_time() - begun) / 3), sorted(times)[-5:]
