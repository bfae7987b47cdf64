"""Tokenizing over HTTP, the names of the model, and whether the server is ready."""

import asyncio
import threading
import time
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers

from pagemill.cli.several_values import one_by_one
from pagemill.errors import AuthenticationError, ConfigError
from pagemill.server.access.api_keys import ApiKeys
from pagemill.server.app import create_app
from pagemill.server.routes.models import check_served_names
from pagemill.server.routes.tokens import MAX_CHARACTERS
from pagemill.tenant_limits import TenantLimits, TenantsFile, key_digest
from pagemill.text.tokenizer import Tokenizer

MODEL = "smollm2-135m"
TEXT = "Où est le café? <|im_end|> 東京 🙂"
TOOL = {"type": "function", "function": {"name": "weather"}}
MESSAGES = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served.url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def reference():
    return Tokenizer.from_path(MODEL).hf


def test_text_becomes_transformers_tokens_and_text_again(http, reference):
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": TEXT, "return_token_strs": True}).json()
    ids = reference(TEXT)["input_ids"]
    assert answer == {
        "count": len(ids),
        "max_model_len": 2048,
        "tokens": ids,
        "token_strs": reference.convert_ids_to_tokens(ids),
    }
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": TEXT}
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    longer = http.post("/tokenize", json={"prompt": "word " * 3000}).json()
    assert (longer["count"] > 2048, longer["token_strs"]) == (True, None)


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}])
def test_messages_become_what_the_chat_endpoint_computes(http, reference, options):
    answer = http.post("/tokenize", json={"messages": MESSAGES, **options}).json()
    rendered = reference.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=options.get("add_generation_prompt", True)
    )
    assert answer["tokens"] == reference(rendered, add_special_tokens=False)["input_ids"]
    if not options:
        chat = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}).json()
        assert chat["usage"]["prompt_tokens"] == answer["count"]


def test_texts_of_a_message_are_joined_by_line_breaks_everywhere(http):
    def messages(content):
        return {"messages": [{"role": "user", "content": content}]}

    parts = [{"type": "text", "text": text} for text in ("Hello", "there", "you")]
    joined = http.post("/tokenize", json=messages("Hello\nthere\nyou")).json()
    assert http.post("/tokenize", json=messages(parts)).json() == joined
    items = {"input": [{"role": "user", "content": [{**part, "type": "input_text"} for part in parts]}]}
    for path, body in (
        ("/v1/chat/completions", {**messages(parts), "max_tokens": 1}),
        ("/v1/chat/completions", {**messages(parts), "max_tokens": 1, "session_id": "joined"}),
        ("/v1/messages", {**messages(parts), "max_tokens": 1}),
        ("/v1/messages/count_tokens", messages(parts)),
        ("/v1/responses", {**items, "max_output_tokens": 1, "store": False}),
        ("/v1/responses/input_tokens", items),
    ):
        answer = http.post(path, json=body).json()
        usage = answer.get("usage", answer)
        count = usage.get("prompt_tokens", usage.get("input_tokens"))
        assert count + usage.get("cache_read_input_tokens", 0) == joined["count"], path
    http.delete("/v1/sessions/joined")


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "neither a prompt nor messages"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt", "there is a prompt and messages"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", "for messages"),
        ("/tokenize", {"prompt": "x" * (MAX_CHARACTERS + 1)}, "prompt", f"at most {MAX_CHARACTERS}"),
        ("/tokenize", {"prompt": "x", "chat_template": "y"}, "chat_template", "chat_template"),
        ("/tokenize", {"prompt": ["x"]}, "prompt", "text"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message", "both set"),
        ("/tokenize", {"messages": MESSAGES, "tools": [TOOL]}, "tools", "no place for them"),
        ("/tokenize", {"messages": MESSAGES, "tools": [TOOL] * 2000}, "tools", "at most"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "its own"),
        ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "tools", "for messages"),
        ("/detokenize", {"tokens": [5, 49152]}, "tokens", "this model's are 0 to 49151"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "token id -1"),
        ("/detokenize", {"tokens": [2**80]}, "tokens", "tokens"),
        ("/detokenize", {"tokens": "5"}, "tokens", "list"),
        ("/detokenize", {}, "tokens", "missing"),
    ],
)
def test_what_is_refused(http, path, body, param, words):
    response = http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_half_a_surrogate_pair_and_another_model_are_refused(http):
    headers = {"Content-Type": "application/json"}
    response = http.post("/tokenize", content=rb'{"prompt": "a\ud800"}', headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        response = http.post(path, json={**body, "model": "gpt-4"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": TEXT}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/pins", {"name": "a", "messages": MESSAGES}),
    ],
)
def test_who_hangs_up_takes_its_text_along(http, served, path, body):
    goes_on = threading.Event()

    async def hold():
        return [asyncio.ensure_future(served.llm.in_tokenizer_thread(goes_on.wait, 20, size=1)) for _ in range(2)]

    async def let_go(held):
        goes_on.set()
        await asyncio.gather(*held)

    def limit(most):
        served.run(served.llm.set_tenant("default", TenantLimits(max_waiting=most)))

    held = served.run(hold())
    limit(1)
    try:
        for _ in range(2):  # before, the second got 429: the first still waited
            with pytest.raises(httpx.ReadTimeout):
                http.post(path, json=body, timeout=0.3)
            time.sleep(0.1)
    finally:
        served.run(let_go(held))
        limit(None)


def test_a_key_is_needed_where_there_are_keys():
    keys = ApiKeys(TenantsFile(Path("tenants.json"), {}, {key_digest("secret"): "a"}, []))
    for path in ("/tokenize", "/detokenize", "/v1/models"):
        with pytest.raises(AuthenticationError):
            keys.caller("POST", path, Headers({}))
    assert keys.caller("POST", "/tokenize", Headers({"authorization": "Bearer secret"})).tenant == "a"
    for path in ("/health", "/ready", "/live"):
        keys.caller("GET", path, Headers({}))


def test_models_are_listed_with_a_slash_behind_too(http):
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()


def test_a_model_has_several_names(served):
    app = create_app(served.llm, ["small", "gpt-4o"])

    async def asked():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            cards = (await http.get("/v1/models")).json()["data"]
            named = [await http.post("/v1/completions", json={"prompt": "A", "max_tokens": 1, **name})
                     for name in ({}, {"model": "gpt-4o"}, {"model": "large"})]  # fmt: skip
            return cards, [answer.json() for answer in named]

    cards, (unnamed, named, wrong) = served.run(asked())
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("small", MODEL, None),
        ("gpt-4o", MODEL, None),
    ]
    assert (unnamed["model"], named["model"]) == ("small", "gpt-4o")
    assert "this server has 'small' and 'gpt-4o'" in wrong["error"]["message"]
    for names in (["a", "a"], [""], ["x" * 257]):
        with pytest.raises(ConfigError):
            check_served_names(names)


def test_one_flag_takes_several_values():
    line = ["m", "--served-model-name", "a", "b", "--port", "80", "--served-model-name=c", "d"]
    name = "--served-model-name"
    assert one_by_one(line) == ["m", name, "a", name, "b", "--port", "80", f"{name}=c", name, "d"]
    assert one_by_one([name, "a", "m"]) == [name, "a", "m"]


def test_a_loading_server_is_live_but_not_ready(served):
    class Loading:
        error, is_ready, restarting, load_progress = None, False, None, (1, 4)
        rates, on_request_end = dict, []

    async def asked(llm):
        transport = httpx.ASGITransport(create_app(llm, "m"))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return [(await http.get(path)).status_code for path in ("/ready", "/health", "/live")]

    assert asyncio.run(asked(Loading())) == [503, 503, 200]
    assert served.run(asked(served.llm)) == [200, 200, 200]
