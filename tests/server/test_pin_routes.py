"""Pins over HTTP, and from a file at the start."""

import json

import pytest

from pagemill.errors import ConfigError
from pagemill.server.routes.pins import pin, read_pins

SYSTEM = {"role": "system", "content": "You are a patient teacher of astronomy. " * 8}


def test_a_pin_is_made_used_listed_and_ended(v1):
    card = v1.post("/pins", json={"name": "teacher", "messages": [SYSTEM], "cache_salt": "mine"}).json()
    assert (card["object"], card["name"], card["expires_in_s"]) == ("pin", "teacher", None)
    assert card["num_tokens"] >= 48
    body = {"messages": [SYSTEM, {"role": "user", "content": "What is a comet?"}], "max_tokens": 2}
    usage = v1.post("/chat/completions", json={**body, "cache_salt": "mine"}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == card["num_tokens"]
    assert v1.get("/pins").json()["data"] == []
    assert v1.get("/pins", params={"cache_salt": "mine"}).json()["data"] == [card]
    gone = v1.delete("/pins/teacher", params={"cache_salt": "mine"})
    assert gone.json() == {"name": "teacher", "object": "pin.deleted", "deleted": True}
    assert v1.get("/pins", params={"cache_salt": "mine"}).json()["data"] == []


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"name": "a"}, "prompt", "has neither a prompt nor messages; give one of the two"),
        (
            {"name": "a", "prompt": "x", "messages": [SYSTEM]},
            "prompt",
            "has a prompt and messages; give one of the two",
        ),
        ({"name": "a", "prompt": "x" * 400, "expires_s": -1}, "expires_s", "expires_s is -1"),
        ({"name": "a", "prompt": "x"}, "prompt", "so pin 16 at least"),
        ({"name": "a", "prompt": [5] * 1500}, "prompt", "max_pinned_share"),
        ({"name": "a", "prompt": [5] * 1500, "tokens": 1}, "tokens", "tokens"),
    ],
)
def test_refusals_have_openais_shape(v1, body, param, words):
    response = v1.post("/pins", json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == param
    missing = v1.delete("/pins/none")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


def test_a_file_of_pins(served, v1, tmp_path):
    path = tmp_path / "pins.json"
    path.write_text(json.dumps([{"name": "a", "messages": [SYSTEM]}, {"name": "b", "prompt": "Once upon a time " * 9}]))
    for body in read_pins(path):
        served.run(pin(served.llm, body, body.tenant))
    assert [card["name"] for card in v1.get("/pins").json()["data"]] == ["a", "b"]
    for text, words in [
        ("{", "pins.json cannot be read as pins, .*: Expecting property name"),
        ('{"name": "a"}', "as pins, .*: the file is {'name': 'a'}; it must be a list$"),
        ('[{"prompt": "x"}]', "as pins, .*: entry 0.name is missing; give it$"),
        ('[{"name": "a", "promt": "x"}]', "as pins, .*: entry 0 has no argument 'promt'; did you mean 'prompt'[?]$"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_pins(path)
