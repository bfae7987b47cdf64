"""OpenAI's own client against a real server: answers and streams."""

import json

import openai
import pytest

from pagemill.frontend import request_state
from pagemill.frontend.outputs import Logprob
from pagemill.frontend.request_stream import RequestStream
from pagemill.text.tokenizer import Tokenizer
from server.questions import CHAT, GREEDY, MODEL


def test_chat(client):
    answer = client.chat.completions.create(**CHAT, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert "Paris" in choice.message.content
    assert choice.finish_reason in ("length", "stop")
    assert answer.object == "chat.completion"
    usage = answer.usage
    assert usage.completion_tokens <= 6
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details is None, "no draft was verified"
    again = client.chat.completions.create(**CHAT, **GREEDY)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= 16


def test_a_chat_stream_is_the_same_answer_in_pieces(client):
    whole = client.chat.completions.create(**CHAT, **GREEDY)
    chunks = list(client.chat.completions.create(**CHAT, **GREEDY, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert sum(c.choices[0].finish_reason is not None for c in chunks if c.choices) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_every_event_may_say_how_many_tokens_there_have_been(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    how = {**GREEDY, "stream": True, "stream_options": options}
    for chunks in (
        list(client.chat.completions.create(**CHAT, **how)),
        list(client.completions.create(model=MODEL, prompt="Once upon", **how)),
    ):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert len(set(counts)) > 2
        assert counts[-1] == counts[-2]
        assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}


def test_token_ids_come_with_the_answer_and_in_its_pieces(client):
    how = {**GREEDY, "n": 2, "temperature": 1.0, "seed": 3, "extra_body": {"return_token_ids": True}}
    tokenizer = Tokenizer.from_path(MODEL)
    whole = client.chat.completions.create(**CHAT, **how)
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens
    for choice in whole.choices:
        assert tokenizer.decode(choice.token_ids, skip_special_tokens=True) == choice.message.content
    chunks = list(client.chat.completions.create(**CHAT, **how, stream=True))
    assert {tuple(chunk.prompt_token_ids) for chunk in chunks[:1]} == {tuple(whole.prompt_token_ids)}
    for index in (0, 1):
        pieces = [each.token_ids or [] for chunk in chunks for each in chunk.choices if each.index == index]
        assert [token for piece in pieces for token in piece] == whole.choices[index].token_ids
    asked = {"model": MODEL, "prompt": ["Once upon", "A"], **how}
    completions = client.completions.create(**asked)
    prompts = [choice.prompt_token_ids for choice in completions.choices[::2]]
    assert prompts == [tokenizer.encode(prompt) for prompt in asked["prompt"]]
    chunks = list(client.completions.create(**asked, stream=True))
    for choice in completions.choices:
        mine = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert mine[0].prompt_token_ids == choice.prompt_token_ids
        assert [token for each in mine for token in each.token_ids] == choice.token_ids
    assert client.completions.create(model=MODEL, prompt="A", max_tokens=1).choices[0].token_ids is None


def test_the_tier_that_serves_is_said(client):
    answer = client.chat.completions.create(**CHAT, max_tokens=1, service_tier="priority")
    assert answer.service_tier == "default"
    assert client.chat.completions.create(**CHAT, max_tokens=1).service_tier is None


def test_n_choices_stream_side_by_side(client):
    common = {**CHAT, "n": 3, "seed": 5, "max_tokens": 5, "temperature": 1.0}
    whole = client.chat.completions.create(**common)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**common, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1


def test_chat_logprobs(client):
    answer = client.chat.completions.create(**CHAT, **GREEDY, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].token == token.token  # greedy: the most likely token was taken
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert bytes(token.bytes).decode() == token.token
    bare = client.chat.completions.create(**CHAT, **GREEDY, logprobs=True)
    assert all(token.top_logprobs == [] for token in bare.choices[0].logprobs.content)


def test_equally_likely_tokens_are_no_more_than_asked_for(client, monkeypatch):
    equal = {28: Logprob(-1.0, 1, "<"), 29: Logprob(-1.0, 1, "="), 30: Logprob(-2.0, 2, ">")}
    monkeypatch.setattr(request_state, "decode_logprobs", lambda *_: equal)
    for most, tokens in enumerate((["<"], ["<", "="]), 1):
        answer = client.chat.completions.create(**CHAT, max_tokens=2, logprobs=True, top_logprobs=most)
        for token in answer.choices[0].logprobs.content:
            assert [likely.token for likely in token.top_logprobs] == tokens


def test_content_parts_a_developer_and_answers_given_back(client):
    answer = client.chat.completions.create(**CHAT, **GREEDY).choices[0].message
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}],
        },
        {**answer.model_dump(), "provider_specific_fields": {"refusal": None}},  # as litellm does
        {"role": "user", "content": "And of Japan?"},
    ]
    assert client.chat.completions.create(model=MODEL, messages=messages, **GREEDY).choices[0].message.content


def test_completions_of_several_prompts(client):
    answer = client.completions.create(model=MODEL, prompt=["The capital of France is", "1, 2, 3, 4,"], **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith(" Paris")
    assert "5" in answer.choices[1].text
    assert answer.usage.completion_tokens == 12
    as_tokens = client.completions.create(model=MODEL, prompt=[504, 3575], **GREEDY)
    assert as_tokens.usage.prompt_tokens == 2


def test_completions_default_to_sixteen_tokens(client):
    answer = client.completions.create(model=MODEL, prompt="Once", extra_body={"ignore_eos": True}, temperature=0)
    assert answer.usage.completion_tokens == 16


def test_a_completion_stream_with_a_stop_string(client):
    prompt = "The capital of France is"
    whole = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12)
    stop = whole.choices[0].text[5:10]
    chunks = list(
        client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12, stop=stop, stream=True)
    )
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == whole.choices[0].text.split(stop)[0]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].stop_reason == stop


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_prompt_and_answer(client, stream):
    asked = {"model": MODEL, "prompt": "The capital of France", "echo": True, "logprobs": 1, "temperature": 0}
    answers = client.completions.create(**asked, max_tokens=3, stream=stream)
    choices = [chunk.choices[0] for chunk in answers] if stream else answers.choices
    text = "".join(choice.text for choice in choices)
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    values = [value for choice in choices for value in choice.logprobs.token_logprobs]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert "".join(tokens) == text
    assert text.startswith("The capital of France")
    assert values[0] is None
    assert all(value <= 0 for value in values[1:])
    assert [text[offset : offset + len(token)] for offset, token in zip(offsets, tokens, strict=True)] == tokens


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_of_the_text_behind_characters_of_several_tokens_too(client, stream):
    asked = {"model": MODEL, "prompt": "Emoji: 🤦🏽 漢 and", "echo": True, "logprobs": 0, "max_tokens": 0}
    answers = client.completions.create(**asked, stream=stream)
    choices = [chunk.choices[0] for chunk in answers] if stream else answers.choices
    text = "".join(choice.text for choice in choices)
    found = [
        (token, text[offset : offset + len(token)])
        for choice in choices
        for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
    ]
    assert len([token for token, _ in found if token.startswith("bytes:")]) > 4
    assert [token for token, at in found if token != at and not token.startswith("bytes:")] == []


def test_an_echo_begins_with_part_of_a_character_or_a_special_token(client):
    asked = {"model": MODEL, "echo": True, "logprobs": 0, "max_tokens": 1}
    lists = client.completions.create(**asked, prompt="日本の首都").choices[0].logprobs
    assert lists.tokens[:3] == ["bytes:\\xe6\\x97", "bytes:\\xa5", "本"]
    assert lists.text_offset[:4] == [0, 0, 1, 2]
    choice = client.completions.create(**asked, prompt=[1, 19556, 2]).choices[0]
    assert choice.text.startswith("<|im_start|>Hello<|im_end|>")
    assert choice.logprobs.text_offset == [0, 12, 17, 27]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_an_answer(client, stream):
    """As lm-eval-harness does."""
    asked = {"model": MODEL, "prompt": ["The capital of France", "Once upon"], "echo": True, "logprobs": 2}
    answers = client.completions.create(**asked, max_tokens=0, stream=stream)
    choices = [chunk.choices[0] for chunk in answers] if stream else answers.choices
    longer = client.completions.create(**asked, max_tokens=1, temperature=0).choices
    for choice, other in zip(sorted(choices, key=lambda choice: choice.index), longer, strict=True):
        count = len(choice.logprobs.tokens)
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.finish_reason == "length"
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert getattr(choice.logprobs, name) == getattr(other.logprobs, name)[:count]
    if not stream:
        assert (answers.usage.prompt_tokens, answers.usage.completion_tokens) == (6, 0)
    plain = client.completions.create(model=MODEL, prompt="The capital", echo=True, max_tokens=0).choices[0]
    assert (plain.text, plain.logprobs) == ("The capital", None)


def test_parts_of_characters_have_names_of_their_own(client):
    asked = {"model": MODEL, "prompt": "naïve 😀é", "echo": True, "logprobs": 3, "max_tokens": 0}
    found = client.completions.create(**asked).choices[0].logprobs
    assert any(token.startswith("bytes:\\x") for token in found.tokens)
    assert not any("\ufffd" in token for token in found.tokens)
    for token, value, likely in zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert likely[token] == value
        assert len(likely) >= 3


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "set stream to false"),
        ({"prompt_logprobs": 1, "echo": True, "logprobs": 2}, "prompt_logprobs", "leave it out"),
        ({"prompt_logprobs": 1, "use_beam_search": True}, "prompt_logprobs", "no meaning"),
        ({"prompt_logprobs": 1, "max_tokens": 0, "session_id": "s"}, "max_tokens", "goes on from an answer"),
    ],
)
def test_prompt_logprobs_that_cannot_be_are_refused(http, body, param, words):
    response = http.post("/v1/completions", json={"prompt": "Hello", **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert words in response.json()["error"]["message"]


def test_prompt_logprobs_have_vllms_shape(client):
    ask = {"model": MODEL, "max_tokens": 0, "extra_body": {"prompt_logprobs": 1}}
    scored = client.completions.create(prompt="The capital of France", **ask).choices[0]
    echoed = client.completions.create(
        model=MODEL, prompt="The capital of France", max_tokens=0, echo=True, logprobs=1
    ).choices[0]
    first, *positions = scored.prompt_logprobs
    assert (first, scored.text) == (None, "")
    for position, value, token in zip(
        positions, echoed.logprobs.token_logprobs[1:], echoed.logprobs.tokens[1:], strict=True
    ):
        entry = next(iter(position.values()))
        assert entry["logprob"] == value
        assert entry["decoded_token"] == token
        assert 1 <= len(position) <= 2
        assert [entry["rank"] for entry in position.values()][-1] == 1
    chat = client.chat.completions.create(messages=CHAT["messages"], **ask)
    assert chat.prompt_logprobs[0] is None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    assert chat.choices[0].message.content == ""


def test_an_echoed_prompt_is_made_out_once_for_all_choices(client, monkeypatch):
    made, whole = [], RequestStream.whole
    monkeypatch.setattr(RequestStream, "whole", lambda stream: made.append(stream) or whole(stream))
    asked = {"model": MODEL, "prompt": "The capital", "echo": True, "n": 4, "max_tokens": 2, "stream": True}
    texts = [""] * 4
    for chunk in client.completions.create(**asked):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert all(text.startswith("The capital") for text in texts)
    assert len(made) == 1


def test_vllms_extra_fields(client):
    def ask(**extra):
        return client.completions.create(
            model=MODEL, prompt="The capital of France is", max_tokens=3, temperature=0, extra_body=extra
        ).choices[0]

    plain = ask()
    assert ask(allowed_token_ids=[504]).text == "The" * 3
    assert ask(bad_words=["Paris"]).text != plain.text
    assert ask(top_k=1, min_p=0.1, repetition_penalty=1.1, cache_salt="x", priority=2, skip_special_tokens=False).text
    stopped = ask(stop_token_ids=[7042])
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", 7042)
    assert ask(stop_token_ids=[7042], min_tokens=2).text != ""


def test_best_of_chooses_and_can_not_be_streamed(client):
    common = {"model": MODEL, "prompt": ["My favourite", "Once"], "max_tokens": 4, "seed": 7}
    sampled = client.completions.create(**common, n=4, logprobs=0)
    chosen = client.completions.create(**common, best_of=4)
    every, best = sampled.choices, chosen.choices
    assert chosen.usage.completion_tokens == sampled.usage.completion_tokens == 2 * 4 * 4
    likelihoods = [sum(choice.logprobs.token_logprobs) for choice in every]
    likeliest = [max(range(first, first + 4), key=likelihoods.__getitem__) for first in (0, 4)]
    assert likeliest != [0, 4]
    assert [choice.text for choice in best] == [every[i].text for i in likeliest]
    assert [choice.index for choice in best] == [0, 1]
    assert best[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match=r"best_of is 4 with n 1: .* cannot be streamed") as caught:
        client.completions.create(**common, best_of=4, stream=True)
    assert caught.value.param == "stream"
    usage = {"stream_options": {"include_usage": True}}
    *_, last = client.completions.create(**common, n=2, best_of=2, stream=True, **usage)
    assert last.usage.completion_tokens == 2 * 2 * 4


def test_beam_search_as_vllm_has_it(client):
    common = {"model": MODEL, "prompt": ["Once upon a time", "My favourite"], "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**common, n=3, extra_body={"use_beam_search": True, "length_penalty": 0.5})
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert len({choice.text for choice in whole.choices}) == 6
    best = client.completions.create(**common, best_of=3, extra_body={"use_beam_search": True, "length_penalty": 0.5})
    assert [choice.text for choice in best.choices] == [whole.choices[0].text, whole.choices[3].text]
    assert best.usage.completion_tokens <= 2 * 6
    tokens = client.completions.create(**common, extra_body={"use_beam_search": True, "ignore_eos": True}).usage
    assert tokens.completion_tokens == 2 * 6
    answer = client.chat.completions.create(**CHAT, **GREEDY, extra_body={"use_beam_search": True}, n=2)
    assert len({choice.message.content for choice in answer.choices}) == 2


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"stop": "x"}, "stop"),
        ({"top_p": 0.5}, "top_p"),
        ({"logprobs": 1}, "logprobs"),
        ({"n": 3, "best_of": 2}, "n"),
        ({"temperature": 0.5}, "temperature"),
        ({"n": 33}, "n"),
        ({"best_of": 33}, "best_of"),
        ({"session_id": "s"}, "session_id"),
        ({"stream": True}, "stream"),
    ],
)
def test_what_a_search_has_no_use_for_is_refused(http, extra, param):
    response = http.post("/v1/completions", json={"prompt": "x", "use_beam_search": True, **extra})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_habits_of_clients_change_nothing(client):
    plain = client.chat.completions.create(**CHAT, **GREEDY).choices[0].message.content
    habits = client.chat.completions.create(
        **CHAT,
        temperature=0,
        max_completion_tokens=6,
        user="me",
        metadata={"a": "b"},
        store=False,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        service_tier="auto",
        logit_bias=None,
        parallel_tool_calls=False,
        extra_body={"spaces_between_special_tokens": True, "return_token_ids": False, "truncate_prompt_tokens": None},
    )
    assert habits.choices[0].message.content == plain


def test_events_are_framed_as_openai_does(http):
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line[6:])["object"] == "text_completion" for line in lines[:-1])
