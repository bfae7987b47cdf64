"""A request's `timeout`: once it is over, the request fails, and gives back all that it held."""

import json
import re

import httpx
import openai
import pytest

MODEL = "smollm2-135m"
LONG = {"max_tokens": 1500, "temperature": 0, "timeout": 0.3}
ASKED = {
    "/completions": {"prompt": "Once upon a time", "ignore_eos": True, **LONG},
    "/chat/completions": {"messages": [{"role": "user", "content": "Count."}], "ignore_eos": True, **LONG},
    "/responses": {"input": "Count.", "ignore_eos": True, "max_output_tokens": 1500, "timeout": 0.3},
    "/embeddings": {"input": ["a cat " * 300] * 64, "timeout": 0.3},
}


@pytest.mark.parametrize("path", ASKED)
def test_it_ends_an_answer_which_gives_back_everything(served, v1, path):
    for timeout in (0.3, 1e-9):  # while it is computed, and before anything is done for it
        answer = v1.post(path, json={**ASKED[path], "timeout": timeout})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (408, "timeout_error", "timeout")
        assert f"timeout is {timeout:g} s" in error["message"]
        served.wait_until_idle()


@pytest.mark.parametrize("path", ["/completions", "/chat/completions", "/responses"])
def test_it_ends_a_stream_with_an_error(served, v1, path):
    with v1.stream("POST", path, json={**ASKED[path], "stream": True, "timeout": 1}) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert answer.status_code == 200
    assert len(events) > 2
    error = events[-1]["response"]["error"] if path == "/responses" else events[-1]["error"]
    assert "timeout is 1 s" in error["message"]
    if path == "/responses":
        assert events[-2]["type"] == "response.output_item.done"
        assert [item["status"] for item in events[-1]["response"]["output"]] == ["incomplete"]
    served.wait_until_idle()


def test_all_prompts_of_a_request_end(served, v1):
    body = {**ASKED["/completions"], "prompt": ["Once", "Twice", "Thrice"]}
    assert v1.post("/completions", json=body).status_code == 408
    served.wait_until_idle()


def test_a_turn_leaves_no_trace(v1):
    turn = {"messages": [{"role": "user", "content": "Count."}], "session_id": "late", "temperature": 0}
    first = v1.post("/chat/completions", json={**turn, "max_tokens": 4})
    assert first.status_code == 200, first.text
    late = {**turn, "max_tokens": 1500, "ignore_eos": True, "timeout": 0.3}
    assert v1.post("/chat/completions", json=late).status_code == 408
    assert v1.get("/sessions/late").json()["num_tokens"] <= first.json()["usage"]["total_tokens"]
    again = v1.post("/chat/completions", json={**turn, "max_tokens": 4, "timeout": 3600})
    assert again.status_code == 200, again.text


def test_openais_client_does_not_ask_again(served):
    def asked():
        found = re.search(
            r'http_requests_total{.*path="/v1/completions".*status="408"} (\S+)',
            httpx.get(f"{served.url}/metrics").text,
        )
        return 0 if found is None else float(found[1])

    before = asked()
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=2) as client:
        late = {"timeout": 0.2, "ignore_eos": True}
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model=MODEL, prompt="Once", max_tokens=1500, extra_body=late)
        assert caught.value.status_code == 408
    assert asked() == before + 1


@pytest.mark.parametrize("value", ["0", "-1", '"soon"', "1e999"])
@pytest.mark.parametrize("path", ASKED)
def test_it_must_be_a_time(v1, path, value):
    body = json.dumps({**ASKED[path], "timeout": 0.123}).replace("0.123", value)
    answer = v1.post(path, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")
