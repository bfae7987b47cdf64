"""LangChain (langchain-openai) over the endpoints that it uses: chat, completions, embeddings, whole and streamed."""

import asyncio

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@pytest.fixture
def chat(url, model):
    def made(**settings):
        settings = {"temperature": 0, "max_tokens": 24, "max_retries": 0, **settings}
        return ChatOpenAI(model=model, base_url=url, api_key="none", **settings)

    return made


def test_chat_whole_streamed_and_beside_others(chat):
    messages = [SystemMessage("Be brief."), HumanMessage("What is the capital of France?")]
    whole = chat().invoke(messages)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat().stream(messages)) == whole.content
    chunks = list(chat(stream_usage=True).stream(messages))
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0
    assert [answer.content for answer in chat().batch([messages] * 3)] == [whole.content] * 3
    assert asyncio.run(chat().ainvoke(messages)).content == whole.content


def test_responses_whole_streamed_and_gone_on_from(chat):
    question = HumanMessage("What is the capital of France?")
    ask = chat(use_responses_api=True)
    whole = ask.invoke([question])
    assert whole.text
    assert whole.response_metadata["id"].startswith("resp_")
    assert whole.usage_metadata["output_tokens"] > 0
    streamed = joined(ask, [question])
    assert streamed.text == whole.text
    assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    # Only what came last is sent; the server has the rest.
    again = chat(use_responses_api=True, use_previous_response_id=True).invoke([question, whole, HumanMessage("Why?")])
    assert again.usage_metadata["input_tokens"] > whole.usage_metadata["input_tokens"]
    assert again.usage_metadata["input_token_details"]["cache_read"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_makes_two_tool_turns_in_responses(chat, tools, calculate, stream):
    def ask(messages, choice):
        kept = {"use_responses_api": True, "use_previous_response_id": True}
        bound = chat(max_tokens=100, **kept).bind_tools(tools, tool_choice=choice)
        return joined(bound, messages) if stream else bound.invoke(messages)

    messages = [HumanMessage("What is 17 times 23, and 5 more?")]
    for choice in ("required", "calculate"):
        answer = ask(messages, choice)
        assert len(answer.tool_calls) == 1
        messages += [answer, result_of(answer, calculate)]
    answer = ask(messages, "none")
    assert answer.text
    assert not answer.tool_calls


def test_log_probabilities_and_stop(chat):
    answer = chat(logprobs=True, top_logprobs=2).invoke("Count from one to nine.", stop=["\n"])
    (first, *_) = answer.response_metadata["logprobs"]["content"]
    assert len(first["top_logprobs"]) == 2
    assert "\n" not in answer.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method):
    asks = chat(max_tokens=200, temperature=1, seed=1).with_structured_output(Person, method=method, strict=True)
    assert isinstance(asks.invoke("Name a person."), Person)


def test_completions(url, model):
    complete = OpenAI(model=model, base_url=url, api_key="none", temperature=0, max_tokens=8)
    whole = complete.invoke("Once upon a time")
    assert whole
    assert "".join(complete.stream("Once upon a time")) == whole


def test_embeddings(url, model):
    # Without this, token ids of another model's tokenizer are sent.
    embeddings = OpenAIEmbeddings(model=model, base_url=url, api_key="none", check_embedding_ctx_length=False)
    first, second = embeddings.embed_documents(["A cat.", "A dog."])
    assert len(first) == len(second) == len(embeddings.embed_query("A cat."))
    assert first != second


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_makes_two_tool_turns_in_a_session(chat, url, session, tools, calculate, stream):
    def ask(messages, choice):
        bound = chat(max_tokens=100, extra_body={"session_id": session}).bind_tools(tools, tool_choice=choice)
        return joined(bound, messages) if stream else bound.invoke(messages)

    answer = ask([HumanMessage("What is 17 times 23, and 5 more?")], "required")
    assert len(answer.tool_calls) == 1
    answer = ask([result_of(answer, calculate)], "calculate")
    answer = ask([result_of(answer, calculate)], "none")
    assert isinstance(answer, AIMessage)
    assert answer.content
    assert not answer.tool_calls
    kept = httpx.get(f"{url}/sessions/{session}").json()
    assert [message["role"] for message in kept["messages"]] == ["user", *["assistant", "tool"] * 2, "assistant"]


def joined(model, messages):
    """Streams an answer, and returns its chunks as one."""
    first, *others = model.stream(messages)
    return sum(others, first)


def result_of(answer, calculate):
    (call,) = answer.tool_calls
    said = calculate(call["args"]) if call["name"] == "calculate" else "Done."
    return ToolMessage(said, tool_call_id=call["id"])


def test_errors_are_the_clients_own(chat):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(temperature=-1).invoke("Hi")
    with pytest.raises(openai.NotFoundError, match="nobody"):
        chat().bind(model="nobody").invoke("Hi")
