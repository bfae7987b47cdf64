"""Query parameters that a route does not have are refused, but for those that clients of other servers send."""

import pytest

MODEL = "smollm2-135m"
OWN = [
    ("GET", "/sessions"),
    ("GET", "/sessions/talk"),
    ("DELETE", "/sessions/talk"),
    ("POST", "/sessions/talk/fork"),
    ("GET", "/pins"),
    ("POST", "/pins"),
    ("DELETE", "/pins/teacher"),
    ("GET", "/requests"),
    ("GET", "/tenants"),
    ("PUT", "/tenants/default"),
    ("GET", "/kv_memory"),
    ("POST", "/kv_memory"),
    ("GET", "/kv_map"),
    ("GET", "/responses/resp_1"),
    ("DELETE", "/responses/resp_1"),
    ("GET", "/responses/resp_1/input_items"),
]
BODIES = {
    "/sessions/talk/fork": {"session_id": "other"},
    "/pins": {"name": "teacher", "prompt": "once " * 20},
    "/tenants/default": {},
    "/kv_memory": {"kv_memory": "used"},
}


@pytest.mark.parametrize(("method", "path"), OWN)
def test_an_unknown_parameter_is_refused_by_name(v1, method, path):
    refused = v1.request(method, path, params={"cache-salt": "s"}, json=BODIES.get(path))
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "cache-salt")
    assert "the query has no argument 'cache-salt'; " in error["message"]
    assert v1.get("/pins").json()["data"] == []


def test_a_misspelt_salt_deletes_no_session(v1):
    talk = {"prompt": "Once upon a time", "max_tokens": 1, "session_id": "keepme"}
    assert v1.post("/completions", json=talk).status_code == 200
    refused = v1.delete("/sessions/keepme", params={"cache-salt": "s"})
    assert "did you mean 'cache_salt'?" in refused.json()["error"]["message"]
    assert v1.get("/sessions/keepme").status_code == 200
    assert "known arguments: none" in v1.get("/tenants?name=a").json()["error"]["message"]


def test_what_clients_of_other_servers_send_is_taken(client, v1):
    made = client.responses.create(model=MODEL, input="Hello", temperature=0, max_output_tokens=2)
    include = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    again = client.responses.retrieve(made.id, include=include, include_obfuscation=False, starting_after=0)
    assert again.output_text == made.output_text
    items = client.responses.input_items.list(made.id, include=include, limit=1, order="asc")
    assert [item.content[0].text for item in items] == ["Hello"]
    assert v1.get(f"/responses/{made.id}", params={"include": include, "stream": False}).status_code == 200
    asked = {"max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}], "model": MODEL}
    assert v1.post("/messages?beta=true", json=asked).status_code == 200
    assert v1.post("/chat/completions?api-version=1", json=asked).status_code == 200
    assert v1.get("/models?limit=20&before_id=x").status_code == 200
    assert v1.get("/models?after_id=x", headers={"anthropic-version": "2023-06-01"}).status_code == 200
    client.responses.delete(made.id)
