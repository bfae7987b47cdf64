"""A device that fails while the pool is resized: who asked is told, only what was being moved ends, and all goes on."""

import os
import re

import httpx
import openai
import pytest

MODEL = "smollm2-135m"
FAULT = """
import pathlib
from pagemill.kvcache.frames import HostFrames
copy = HostFrames.copy
def failing(frames, source, target):
    if len(source) and pathlib.Path({flag!r}).exists():
        raise RuntimeError("out of device memory")
    return copy(frames, source, target)
HostFrames.copy = failing
"""


@pytest.fixture
def server(serving, monkeypatch, tmp_path):
    """A server, and the file while which exists its engine cannot copy frames."""
    flag = tmp_path / "broken"
    (tmp_path / "sitecustomize.py").write_text(FAULT.format(flag=str(flag)))  # runs in the engine's process first
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with serving(kv_compaction="off") as server:
        yield server, flag


def test_a_resize_that_fails_is_answered_and_ends_only_what_was_being_moved(server):
    server, flag = server
    http = httpx.Client(base_url=f"{server.url}/v1", timeout=60)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)

    def stream(prompt):
        texts = client.completions.create(model=MODEL, prompt=prompt, stream=True, temperature=0, max_tokens=150)
        return texts, [next(texts).choices[0].text]

    def rest(texts, begun):
        return "".join(begun + [chunk.choices[0].text for chunk in texts])

    def failure(stream):
        try:
            rest(*stream)
        except openai.APIError as error:
            return error.message

    assert http.post("/pins", json={"prompt": "Kept. " * 40, "name": "kept"}).status_code == 200
    size = http.get("/kv_memory").json()
    first, *others = [stream(prompt) for prompt in ("The first", "Then there was another", "And a third")]
    flag.touch()
    answer = http.post("/kv_memory", json={"kv_memory": "used"})
    flag.unlink()
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == ("kv_memory", "internal_server_error")
    ended = int(re.search(r"device memory; it keeps its size. Ended: (\d) requests; pins: none", error["message"])[1])
    assert http.get("/kv_memory").json() == size
    messages = [message for message in map(failure, others) if message]
    assert len(messages) == ended > 0
    assert all("blocks of this request were to be moved and are lost: send it again" in text for text in messages)
    text = rest(*first)
    assert [pin["name"] for pin in http.get("/pins").json()["data"]] == ["kept"]
    assert http.delete("/pins/kept").status_code == 200
    assert http.post("/kv_memory", json={"kv_memory": "used"}).json()["kv_memory"] < size["kv_memory"]
    server.wait_until_idle()
    http.post("/kv_memory", json={"kv_memory": None})
    assert rest(*stream("The first")) == text
