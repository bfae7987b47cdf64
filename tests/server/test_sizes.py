"""Sizes: every list and text of a request has a limit, refused by name and number before anybody works through it."""

import json
import time

import pytest
from pydantic import ValidationError

from pagemill.errors import PagemillError
from pagemill.namespace import MAX_LENGTH, Namespace
from pagemill.sampling.params import MAX_BIASES, MAX_CHARACTERS, MAX_TOKEN_IDS, MAX_WORDS
from pagemill.server.protocol.chat import ChatCompletionRequest
from pagemill.server.protocol.completions import CompletionRequest
from pagemill.server.protocol.errors import LONGEST_MESSAGE, error_response
from pagemill.server.protocol.generation import MAX_CHOICES, MAX_MESSAGES, MAX_PARTS, MAX_PROMPTS
from pagemill.server.protocol.responses import ResponsesRequest
from pagemill.server.protocol.tools import MAX_ARGUMENTS, MAX_BRACKETS
from pagemill.server.routes.pins import PinBody
from pagemill.server.routes.tokens import TokenizeRequest
from pagemill.tenant_limits import MAX_NAME, TenantLimits
from pagemill.text.chat_template import check_messages

MESSAGE = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
COMPLETION = {"prompt": "x"}


def calls(arguments, count):
    """Returns a message that has called so often."""
    called = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [called] * count}


def biases(count):
    return {str(token): 0 for token in range(count)}


def refusal(kind, body):
    """Returns what is said to a body that is refused: the parameter and the message."""
    try:
        kind.model_validate(body).params()
    except ValidationError as error:
        finding = error.errors()[0]
        ours = finding.get("ctx", {}).get("error")
        return (ours.param, ours.message) if ours is not None else (finding["loc"][0], finding["msg"])
    except PagemillError as error:
        return error.param, error.message
    raise AssertionError("it was taken")


@pytest.mark.parametrize(
    ("kind", "body", "param", "limit"),
    [
        (CompletionRequest, {**COMPLETION, "stop": ["a"] * (MAX_WORDS + 1)}, "stop", MAX_WORDS),
        (CompletionRequest, {**COMPLETION, "bad_words": ["a"] * (MAX_WORDS + 1)}, "bad_words", MAX_WORDS),
        (CompletionRequest, {**COMPLETION, "stop_token_ids": [1] * (MAX_WORDS + 1)}, "stop_token_ids", MAX_WORDS),
        (CompletionRequest, {**COMPLETION, "stop": ["a" * (MAX_CHARACTERS["stop"] + 1)]}, "stop", 4096),
        (CompletionRequest, {**COMPLETION, "bad_words": ["a" * 65537]}, "bad_words", MAX_CHARACTERS["bad_words"]),
        (CompletionRequest, {**COMPLETION, "allowed_token_ids": [1] * (MAX_TOKEN_IDS + 1)}, "allowed_token_ids", 2**20),
        (CompletionRequest, {**COMPLETION, "logit_bias": biases(MAX_BIASES + 1)}, "logit_bias", MAX_BIASES),
        (CompletionRequest, {"prompt": ["x"] * (MAX_PROMPTS + 1)}, "prompt", MAX_PROMPTS),
        (CompletionRequest, {"prompt": [[1]] * (MAX_PROMPTS + 1)}, "prompt", MAX_PROMPTS),
        (CompletionRequest, {"prompt": [[]] * (MAX_PROMPTS + 1)}, "prompt", MAX_PROMPTS),
        (CompletionRequest, {"prompt": [{}] * (MAX_PROMPTS + 1)}, "prompt", MAX_PROMPTS),
        (CompletionRequest, {"prompt": ["x"] * MAX_PROMPTS, "n": 5}, "n", MAX_CHOICES),
        (CompletionRequest, {**COMPLETION, "model": "x" * 300}, "model", 256),
        (CompletionRequest, {"fork_of": "x" * 300}, "fork_of", 256),
        (ChatCompletionRequest, {"messages": [MESSAGE] * (MAX_MESSAGES + 1)}, "messages", MAX_MESSAGES),
        (ChatCompletionRequest, {"messages": [{**MESSAGE, "content": [PART] * 16385}]}, "messages", MAX_PARTS),
        (TokenizeRequest, {"messages": [{**MESSAGE, "content": [PART] * 16385}]}, "messages", MAX_PARTS),
        (PinBody, {"name": "x", "messages": [{**MESSAGE, "content": [PART] * 16385}]}, "messages", MAX_PARTS),
        (ChatCompletionRequest, {"messages": [MESSAGE, calls("x" * 200_000, 6)]}, "messages", MAX_ARGUMENTS),
        (ChatCompletionRequest, {"messages": [MESSAGE, calls("[]," * 20_000, 4)]}, "messages", MAX_BRACKETS),
        (ChatCompletionRequest, {"messages": [MESSAGE, calls("x" * 262_145, 1)]}, "messages", 262144),
        (ChatCompletionRequest, {"messages": [{**MESSAGE, "content": [PART] * 6000}] * 3}, "messages", MAX_PARTS),
        (ChatCompletionRequest, {"messages": [{**MESSAGE, "name": "x" * 300}]}, "messages", 256),
        (PinBody, {"name": "x", "messages": [MESSAGE] * (MAX_MESSAGES + 1)}, "messages", MAX_MESSAGES),
        (ResponsesRequest, {"input": [MESSAGE] * (MAX_MESSAGES + 1)}, "input", MAX_MESSAGES),
        (ResponsesRequest, {"input": [{"content": [PART] * 6000}] * 3}, "input", MAX_PARTS),
        (ResponsesRequest, {"input": "x", "metadata": {str(at): "" for at in range(17)}}, "metadata", 16),
    ],
)  # fmt: skip
def test_sizes_have_limits(kind, body, param, limit):
    found, message = refusal(kind, body)
    assert (found, str(limit) in message) == (param, True), message
    assert len(message) < 1000


def test_many_prompts_are_to_be_sent_in_several_requests():
    assert MAX_PROMPTS == MAX_CHOICES
    assert "send them in several requests" in refusal(CompletionRequest, {"prompt": ["x"] * (MAX_PROMPTS + 1)})[1]
    assert "send them in several requests" in refusal(CompletionRequest, {"prompt": ["x"] * MAX_PROMPTS, "n": 2})[1]


def test_python_takes_longer_conversations():
    check_messages([MESSAGE] * (4 * MAX_MESSAGES))


def test_the_largest_sizes_are_taken():
    messages = [{**MESSAGE, "content": [PART] * (MAX_PARTS // MAX_MESSAGES)}] * MAX_MESSAGES
    ChatCompletionRequest.model_validate({"messages": messages}).params()
    CompletionRequest.model_validate(
        {
            "prompt": ["x"] * MAX_PROMPTS,
            "n": MAX_CHOICES // MAX_PROMPTS,
            "stop": ["a"] * MAX_WORDS,
            "bad_words": ["a"] * MAX_WORDS,
            "logit_bias": biases(MAX_BIASES),
        }
    ).params()
    CompletionRequest.model_validate({"prompt": [1] * 100_000, "n": 256}).params()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [{}] * 300_000}),
        (CompletionRequest, {"prompt": [1, *[{}] * 300_000]}),
        (CompletionRequest, {"prompt": [[{}] * 300_000]}),
        (CompletionRequest, {**COMPLETION, "stop": [1] * 300_000}),
        (CompletionRequest, {**COMPLETION, "allowed_token_ids": ["x"] * 300_000}),
        (CompletionRequest, {"x" * 3_000_000: 1}),
        (ChatCompletionRequest, {"messages": [{}] * 300_000}),
        (ChatCompletionRequest, {"messages": [{**MESSAGE, "content": [{}] * 300_000}]}),
        (PinBody, {"name": "x", "prompt": [{}] * 300_000}),
        (ResponsesRequest, {"input": [{}] * 300_000}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{}] * 300_000}]}),
    ],
)
def test_many_wrong_entries_are_refused_at_the_first(kind, body):
    """Before, each entry cost its own error: eight megabytes of {} took a minute and a half, and 11 GB."""
    began = time.thread_time()
    refusal(kind, body)
    assert time.thread_time() - began < 1


@pytest.mark.parametrize("what", ["tenant", "cache_salt"])
def test_namespaces_have_short_names(what):
    Namespace(**{what: "x" * MAX_LENGTH})
    with pytest.raises(PagemillError, match=f"{what} has 1025 characters; give at most {MAX_LENGTH}"):
        Namespace(**{what: "x" * (MAX_LENGTH + 1)})


def test_a_tenant_has_a_short_name():
    with pytest.raises(PagemillError, match=f"1 to {MAX_NAME} printable"):
        TenantLimits.read("x" * (MAX_NAME + 1), {})


def test_an_answer_does_not_send_a_long_text_back():
    body = error_response(PagemillError("x" * 10**6, param="y" * 10**6)).model_dump_json()
    assert len(body) < 2 * LONGEST_MESSAGE + 200
    assert json.loads(body)["error"]["message"].endswith("…")
