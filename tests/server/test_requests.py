"""Running requests over HTTP: where their KV blocks lie, and answers that go on from them."""

import concurrent.futures
import time

import httpx
import openai
import pytest

from harness import FRAME_BYTES

MODEL = "smollm2-135m"
CHAT = [{"role": "user", "content": "Tell me a long story."}]
LONG = {"temperature": 0, "max_tokens": 1500, "stream": True}
STORY = "Once upon a time, in a village by the sea, there lived an old man who"


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    served.wait_until_idle()


def complete(client, **more):
    return client.completions.create(model=MODEL, **{"prompt": STORY, **more})


def chat(client, **more):
    return client.chat.completions.create(model=MODEL, **{"messages": CHAT, **more})


def content(chunk):
    return chunk.choices[0].delta.content or ""


def blocks(num_tokens):
    """Returns the blocks that a sequence of so many tokens may have, the last one computed already or not."""
    return {-(-computed // 16) for computed in (num_tokens - 1, num_tokens)}


def test_what_runs_is_listed_with_its_blocks(client, v1):
    assert v1.get("/requests").json() == {"object": "list", "data": []}
    with complete(client, **LONG | {"temperature": 1}, n=2, seed=1) as stream:
        chunk = [next(stream) for _ in range(40)][-1]
        (card,) = v1.get("/requests").json()["data"]
        assert (card["id"], card["object"]) == (chunk.id, "request")
        assert [sequence["index"] for sequence in card["sequences"]] == [0, 1]
        for sequence in card["sequences"]:
            assert sequence["status"] == "running"
            assert sequence["num_tokens"] >= card["num_prompt_tokens"] + 10
            assert list(sequence["kv_blocks"]) == ["device"]
            assert sequence["kv_blocks"]["device"] in blocks(sequence["num_tokens"])
        assert v1.get("/requests", params={"cache_salt": "mine"}).json()["data"] == []


def test_blocks_are_told_by_tier_and_who_waits_has_none(serving):
    small = {"kv_memory": 12 * FRAME_BYTES, "kv_host_memory": 70 * FRAME_BYTES, "max_num_batched_tokens": 64}
    body = {"prompt": list(range(1000, 1400)), "max_tokens": 100, "ignore_eos": True, "stream": True}
    with (
        serving(max_model_len=512, max_num_seqs=1, **small) as server,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as api:
            with api.stream("POST", "/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                second = pool.submit(api.post, "/completions", json={"prompt": "Hi", "max_tokens": 2})
                while len(cards := api.get("/requests").json()["data"]) < 2:
                    time.sleep(0.02)
                (streams,), (waits,) = (card["sequences"] for card in cards)
            assert second.result().status_code == 200
        assert streams["status"] == "running"
        assert 0 < streams["kv_blocks"]["device"] <= 12 < streams["kv_blocks"]["host"]
        assert sum(streams["kv_blocks"].values()) in blocks(streams["num_tokens"])
        assert (waits["status"], waits["kv_blocks"]) == ("waiting", {"device": 0, "host": 0})
        server.wait_until_idle()


def read(stream, text_of, text="", least=100):
    """The id of a streamed answer, and its text until it has so many characters."""
    while len(text) < least:
        chunk = next(stream)
        text += text_of(chunk)
    return chunk.id, text


def test_a_fork_begins_as_its_origin_has_come_so_far_and_shares_its_blocks(client):
    with complete(client, **LONG) as stream:
        name, text = read(stream, lambda chunk: chunk.choices[0].text)
        how = {"fork_of": name, "ignore_eos": True}
        fork = complete(client, prompt="", max_tokens=8, temperature=0, logprobs=0, extra_body=how)
        (choice,) = fork.choices
        _, whole = read(stream, lambda chunk: chunk.choices[0].text, text, len(choice.text))
    assert choice.text.startswith(text)
    assert whole.startswith(choice.text)
    assert fork.usage.completion_tokens == len(choice.logprobs.tokens) == 8
    assert fork.usage.prompt_tokens_details.cached_tokens == fork.usage.prompt_tokens - 1
    begun = choice.logprobs.text_offset[0]
    assert begun >= len(text)
    assert "".join(choice.logprobs.tokens) == choice.text[begun:]


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_that_runs_forks_into_several(client, streams):
    with chat(client, **LONG) as stream:
        name, text = read(stream, content)
        asked = {"messages": [], "n": 2, "seed": 7, "max_tokens": 12, "stream": streams}
        fork = chat(client, **asked, extra_body={"fork_of": name})
        if streams:
            answers = ["", ""]
            for chunk in fork:
                answers[chunk.choices[0].index] += content(chunk)
        else:
            answers = [choice.message.content for choice in fork.choices]
        _, whole = read(stream, content, text, 1 + max(map(len, answers)))
    first, second = answers
    assert first.startswith(text)
    assert second.startswith(text)
    assert len({first, second, whole[: len(first)]}) == 3


def test_a_fork_of_one_of_several_and_of_a_sessions_turn(client, v1):
    with complete(client, **LONG | {"temperature": 1}, n=2, seed=1) as stream:
        texts = ["", ""]
        while min(map(len, texts)) < 50:
            chunk = next(stream)
            texts[chunk.choices[0].index] += chunk.choices[0].text
        forks = [complete(client, prompt=[], extra_body={"fork_of": chunk.id, "fork_index": index}) for index in (0, 1)]
    assert [fork.choices[0].text.startswith(text) for fork, text in zip(forks, texts, strict=True)] == [True, True]
    with chat(client, **LONG, extra_body={"session_id": "talk", "cache_salt": "mine"}) as stream:
        name, text = read(stream, content)
        how = {"fork_of": name, "cache_salt": "mine"}
        assert chat(client, messages=[], max_tokens=1, extra_body=how).choices[0].message.content.startswith(text)


def test_what_can_not_be_forked_is_refused(client, v1):
    def refusal(path="/completions", **body):
        response = v1.post(path, json=body)
        error = response.json()["error"]
        return response.status_code, error["type"], error["param"], error["message"]

    with complete(client, **LONG | {"temperature": 1}, n=2, seed=1) as stream:
        name = next(stream).id
        for fork in ({"fork_of": "cmpl-1"}, {"fork_of": name, "cache_salt": "mine"}):
            status, kind, _, message = refusal(**fork)
            assert (status, kind) == (404, "not_found_error")
            assert f"no request '{fork['fork_of']}' is running" in message
        assert refusal(fork_of=name, prompt="x")[::2] == (400, "prompt")
        assert refusal("/chat/completions", fork_of=name, messages=CHAT)[::2] == (400, "messages")
        assert refusal(fork_of=name, session_id="talk")[::2] == (400, "session_id")
        assert refusal(fork_of=name, echo=True)[::2] == (400, "echo")
        assert refusal(prompt="x", fork_index=1)[::2] == (400, "fork_index")
        wrong = refusal(fork_of=name, fork_index=2)
        assert "has 2 sequences, and none with the fork_index 2" in wrong[3]
        assert wrong[2] == "fork_index"
    assert v1.get("/sessions").json()["data"] == []
