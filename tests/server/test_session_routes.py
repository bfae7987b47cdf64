"""Sessions over HTTP, with OpenAI's own client where it can."""

import httpx
import openai
import pytest

MODEL = "smollm2-135m"
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client, text, session="talk", **more):
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], **GREEDY, extra_body={"session_id": session, **more}
    )


def test_a_chat_goes_on_by_its_id(client, v1):
    first = ask(client, "My name is Ada, and I live in a small house by the sea. Say hello.")
    second = ask(client, "What is my name?")
    details = second.usage.prompt_tokens_details
    assert details.cached_tokens >= (first.usage.total_tokens - 1) // 16 * 16
    card = v1.get("/sessions/talk").json()
    assert card["num_tokens"] == second.usage.total_tokens
    assert card["num_turns"] == 2
    assert [message["role"] for message in card["messages"]] == ["user", "assistant"] * 2
    assert card["messages"][3]["content"] == second.choices[0].message.content
    (listed,) = v1.get("/sessions").json()["data"]
    assert card["kv_blocks"] == {"device": (card["num_tokens"] - 1) // 16}
    assert listed == {
        name: value for name, value in card.items() if name not in ("messages", "instructions", "kv_blocks")
    }
    assert (listed["object"], listed["model"].startswith("SmolLM2")) == ("session", True)


def test_a_stream_goes_on_too_and_its_end_is_the_sessions(client, v1):
    for turn in (1, 2):
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], **GREEDY, stream=True,
            extra_body={"session_id": "talk"},
        )  # fmt: skip
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        card = v1.get("/sessions/talk").json()
        assert (card["num_turns"], card["messages"][-1]["content"]) == (turn, text)


def test_completions_go_on(client, v1):
    for turn in (1, 2):
        answer = client.completions.create(model=MODEL, prompt="Once", **GREEDY, extra_body={"session_id": "text"})
        assert v1.get("/sessions/text").json()["num_tokens"] == answer.usage.total_tokens
        assert v1.get("/sessions/text").json()["num_turns"] == turn
    assert v1.get("/sessions/text").json()["num_messages"] is None


def test_fork_and_delete(client, v1):
    ask(client, "My name is Ada.")
    fork = v1.post("/sessions/talk/fork", json={"session_id": "other"}).json()
    assert (fork["id"], fork["num_turns"]) == ("other", 1)
    ask(client, "What is my name?", "other")
    assert v1.get("/sessions/talk").json()["num_turns"] == 1
    assert v1.delete("/sessions/talk").json() == {"id": "talk", "object": "session.deleted", "deleted": True}
    assert [session["id"] for session in v1.get("/sessions").json()["data"]] == ["other"]


def test_namespaces(client, v1):
    ask(client, "My name is Ada.", cache_salt="mine")
    assert v1.get("/sessions").json()["data"] == []
    assert v1.get("/sessions/talk").status_code == 404
    assert v1.get("/sessions/talk", params={"cache_salt": "mine"}).json()["num_turns"] == 1


def test_one_turn_at_a_time(client, served, v1):
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "session_id": "text"}
    url = f"{served.url}/v1/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=30) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        with pytest.raises(openai.ConflictError, match="'text' is in use by another request"):
            client.completions.create(model=MODEL, prompt="x", extra_body={"session_id": "text"})
    served.wait_until_idle()
    assert v1.get("/sessions/text").status_code == 404, "its client left before the end"
    assert client.completions.create(model=MODEL, prompt="x", extra_body={"session_id": "text"}).choices


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ["a", "b"]}, "not 2 prompts"),
        ({"prompt": "a", "echo": True}, "no echo"),
        ({"prompt": "a", "n": 2}, "n is 2"),
        ({"prompt": "a", "session_id": "a/b"}, "session name 'a/b'"),
    ],
)
def test_refusals(served, v1, body, words):
    response = httpx.post(f"{served.url}/v1/completions", json={"session_id": "text", **body}, timeout=30)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert v1.get("/sessions").json()["data"] == []


def test_errors_have_openais_shape(v1):
    fork = v1.post("/sessions/none/fork", json={"session_id": "x"})
    for response in (v1.get("/sessions/none"), v1.delete("/sessions/none"), fork):
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found_error"
        assert "no session 'none'" in response.json()["error"]["message"]
    assert v1.post("/sessions/none/fork", json={}).json()["error"]["param"] == "session_id"
