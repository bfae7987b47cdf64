"""litellm over the endpoints that it uses: chat, completions, embeddings, whole and streamed, by both its names."""

import asyncio
import json

import httpx
import litellm
import pytest
from pydantic import BaseModel, Field

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@pytest.fixture(params=["openai", "hosted_vllm"])
def common(request, url, model):
    return {"model": f"{request.param}/{model}", "api_base": url, "api_key": "none", "num_retries": 0}


def test_chat_whole_and_streamed(common):
    asked = {**common, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = litellm.completion(**asked)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens > 0
    pieces = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.content == text


def test_responses_whole_streamed_and_gone_on_from(common):
    asked = {**common, "input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 24}
    whole = litellm.responses(**asked)
    text = text_of(whole)
    assert text
    events = list(litellm.responses(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    again = litellm.responses(**{**asked, "input": "Why?"}, previous_response_id=whole.id)
    assert again.usage.input_tokens > whole.usage.input_tokens
    assert again.usage.input_tokens_details.cached_tokens > 0


def text_of(response):
    return "".join(part.text for item in response.output if item.type == "message" for part in item.content)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_makes_two_tool_turns_in_responses(common, tools, calculate, stream):
    def ask(items, choice, **kept):
        asked = {"input": items, "tools": [{"type": "function", **tool["function"]} for tool in tools], **kept}
        answer = litellm.responses(**common, **asked, tool_choice=choice, max_output_tokens=100, stream=stream)
        return list(answer)[-1].response if stream else answer

    items = [{"role": "user", "content": "What is 17 times 23, and 5 more?"}]
    answer = ask(items, "required")
    for choice in ({"type": "function", "name": "calculate"}, "none"):
        (call,) = (item for item in answer.output if item.type == "function_call")
        arguments = json.loads(call.arguments)
        said = calculate(arguments) if call.name == "calculate" else "Done."
        items = [{"type": "function_call_output", "call_id": call.call_id, "output": said}]
        answer = ask(items, choice, previous_response_id=answer.id)
    assert text_of(answer)


def test_structured_output(common):
    answer = litellm.completion(**common, messages=QUESTION, response_format=Person, max_tokens=200, seed=1)
    Person.model_validate_json(answer.choices[0].message.content)


def test_completions(common):
    asked = {**common, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
    whole = litellm.text_completion(**asked).choices[0].text
    assert whole
    assert "".join(piece.choices[0].text or "" for piece in litellm.text_completion(**asked, stream=True)) == whole


def test_embeddings(common):
    first, second = litellm.embedding(**common, input=["A cat.", "A dog."], encoding_format="float").data
    assert len(first["embedding"]) == len(second["embedding"])
    assert first["embedding"] != second["embedding"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_makes_two_tool_turns_in_a_session(common, url, session, tools, calculate, stream):
    def ask(messages, choice):
        asked = {**common, "messages": messages, "tools": tools, "tool_choice": choice, "max_tokens": 100}
        answer = litellm.completion(**asked, stream=stream, temperature=0, extra_body={"session_id": session})
        return (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0].message

    named = {"type": "function", "function": {"name": "calculate"}}
    message = ask([{"role": "user", "content": "What is 17 times 23, and 5 more?"}], "required")
    message = ask([result_of(message, calculate)], named)
    message = ask([result_of(message, calculate)], "none")
    assert message.content
    assert not message.tool_calls
    kept = httpx.get(f"{url}/sessions/{session}").json()
    assert [message["role"] for message in kept["messages"]] == ["user", *["assistant", "tool"] * 2, "assistant"]


def result_of(message, calculate):
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    said = calculate(arguments) if call.function.name == "calculate" else "Done."
    return {"role": "tool", "tool_call_id": call.id, "content": said}


def test_errors_are_the_clients_own(common):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**common, messages=QUESTION, temperature=-1)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**common, messages=[{"role": "user", "content": "word " * 9000}])
