"""What a chat may give its template beside messages and tools, over HTTP."""

import openai
import pytest

from pagemill.config import EngineConfig
from pagemill.errors import ConfigError
from pagemill.text.tokenizer import Tokenizer

MODEL = "smollm2-135m"
TEMPLATE = """{%- for document in documents or [] %}<doc>{{ document.text }}</doc>{% endfor -%}
{%- if reasoning_effort %}<effort>{{ reasoning_effort }}</effort>{% endif -%}
{%- if mood %}<mood>{{ mood }}</mood>{% endif -%}
{%- if priority or request_id or params or max_tool_calls or size %}<odd/>{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
USER = "<|im_start|>user\nHi<|im_end|>\n"
ASSISTANT = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def server(serving):
    with serving(chat_template=TEMPLATE) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def prompts(monkeypatch):
    """The texts that the template has written."""
    texts, apply = [], Tokenizer.apply_chat_template

    def remember(*args, **how):
        texts.append(apply(*args, **how))
        return texts[-1]

    monkeypatch.setattr(Tokenizer, "apply_chat_template", remember)
    return texts


@pytest.mark.parametrize(
    ("asked", "prompt"),
    [
        ({}, USER + ASSISTANT),
        ({"documents": [{"text": "A"}, {"text": "B"}]}, "<doc>A</doc><doc>B</doc>" + USER + ASSISTANT),
        ({"chat_template_kwargs": {"mood": "glad"}}, "<mood>glad</mood>" + USER + ASSISTANT),
        ({"reasoning_effort": "low"}, "<effort>low</effort>" + USER + ASSISTANT),
        ({"reasoning_effort": "none"}, "<effort>none</effort>" + USER + ASSISTANT),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "<effort>low</effort>" + USER + ASSISTANT),
        ({"add_generation_prompt": False}, USER),
        (
            {
                "messages": [*ASKED["messages"], {"role": "assistant", "content": "Once upon"}],
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
            USER + ASSISTANT + "Once upon",
        ),
    ],
)
def test_the_template_gets_what_it_reads(client, prompts, asked, prompt):
    messages = asked.get("messages", ASKED["messages"])
    more = {name: value for name, value in asked.items() if name != "messages"}
    client.chat.completions.create(**{**ASKED, "messages": messages}, extra_body=more)
    assert prompts == [prompt]


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"chat_template_kwargs": {"mod": 1}}, "chat_template_kwargs", "mood, params, priority, reasoning_effort"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "'tools'; give it as a field"),
        ({"chat_template_kwargs": {str(i): 1 for i in range(65)}}, "chat_template_kwargs", "at most 64"),
        ({"chat_template_kwargs": {"mood": "x" * 270_000}}, "chat_template_kwargs", "262144 characters"),
        (
            {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "low"},
            "chat_template_kwargs",
            "as a field",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "huge"),
        ({"documents": [{"text": "x"}] * 1025}, "documents", "at most 1024"),
        ({"documents": ["x"]}, "documents", "an object"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        (
            {"continue_final_message": True, "add_generation_prompt": False, "session_id": "s"},
            "continue_final_message",
            "a session",
        ),
        ({"messages": [], "fork_of": "x", "documents": [{"text": "x"}]}, "documents", "fork_of"),
    ],
)
def test_what_the_template_cannot_use_is_refused(client, asked, param, said):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            **{**ASKED, "messages": asked.pop("messages", ASKED["messages"])}, extra_body=asked
        )
    assert (error.value.param, said in error.value.message) == (param, True), error.value.message


@pytest.mark.parametrize("name", ["priority", "request_id", "params", "max_tool_calls", "size"])
def test_a_variable_may_be_named_as_something_else_of_the_request(client, prompts, name):
    for session in ({}, {"session_id": f"has-{name}"}):
        client.chat.completions.create(**ASKED, extra_body={"chat_template_kwargs": {name: "x"}, **session})
    assert prompts == ["<odd/>" + USER + ASSISTANT] * 2


def test_defaults_of_the_server_hold_where_a_request_says_nothing():
    def written(**given):
        return tokenizer.apply_chat_template(ASKED["messages"], **given)

    how = {"chat_template": TEMPLATE, "default_chat_template_kwargs": {"mood": "glad", "enable_thinking": False}}
    tokenizer = Tokenizer.load(EngineConfig(MODEL, **how))
    assert written() == "<mood>glad</mood>" + USER + ASSISTANT
    assert written(chat_template_kwargs={"mood": "sad"}) == "<mood>sad</mood>" + USER + ASSISTANT
    assert written(mood="sad") == "<mood>sad</mood>" + USER + ASSISTANT
    for wrong, said in (("mod", "default_chat_template_kwargs has 'mod'"), ("tools", "an argument of its own")):
        with pytest.raises(ConfigError, match=said) as error:
            Tokenizer.load(EngineConfig(MODEL, chat_template=TEMPLATE, default_chat_template_kwargs={wrong: 1}))
        assert error.value.param == "default_chat_template_kwargs"


def test_a_template_without_a_place_for_it_takes_no_effort(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        assert client.chat.completions.create(**ASKED, reasoning_effort="none").choices
        off = {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}
        assert client.chat.completions.create(**ASKED, extra_body=off).choices
        with pytest.raises(openai.BadRequestError, match="does not read"):
            client.chat.completions.create(**ASKED, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
        with pytest.raises(openai.BadRequestError, match="does not read it") as error:
            client.chat.completions.create(**ASKED, reasoning_effort="low")
        assert error.value.param == "reasoning_effort"
