"""LoRA adapters over HTTP: listed beside the model, chosen by its name, in sessions and forks too."""

import httpx
import pytest

from lora_adapters import save_adapter, shapes_of
from pagemill import LoRARequest, errors
from pagemill.server.routes.models import ServedModels


class Sizes:
    """Of SmolLM2-135M."""

    hidden_size, intermediate_size, num_hidden_layers = 576, 1536, 30
    num_attention_heads, num_key_value_heads = 9, 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(save_adapter(folder / name, shapes_of(Sizes), rank=2, seed=i)) for i, name in enumerate("ab")}


@pytest.fixture(scope="module")
def v1(serving, folders):
    with (
        serving(enable_lora=True, lora_modules=folders, max_num_seqs=8, max_model_len=512, kv_memory="64MiB") as server,
        httpx.Client(base_url=f"{server.url}/v1", timeout=60) as client,
    ):
        yield client
        server.wait_until_idle()


def complete(v1, model, **fields):
    body = {"model": model, "prompt": "The tide comes in because", "max_tokens": 6, "temperature": 0, **fields}
    return v1.post("/completions", json=body)


def test_adapters_are_listed_and_answer_under_their_names(v1, folders):
    cards = {card["id"]: card for card in v1.get("/models").json()["data"]}
    assert list(cards) == ["smollm2-135m", "a", "b"]
    assert (cards["a"]["parent"], cards["a"]["root"]) == ("smollm2-135m", folders["a"])
    assert cards["smollm2-135m"]["parent"] is None
    assert v1.get("/models/b").json()["parent"] == "smollm2-135m"
    answers = {name: complete(v1, name).json() for name in cards}
    assert {answer["model"] for answer in answers.values()} == set(cards)
    assert len({answer["choices"][0]["text"] for answer in answers.values()}) == 3
    refused = complete(v1, "c")
    assert refused.status_code == 404
    assert "'smollm2-135m' and 'a' and 'b'" in refused.json()["error"]["message"]
    chat = {"model": "a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
    assert '"model":"a"' in v1.post("/chat/completions", json=chat).text
    vectors = [v1.post("/embeddings", json={"model": name, "input": "Hi"}).json()["data"][0] for name in "ab"]
    assert vectors[0]["embedding"] != vectors[1]["embedding"]


def test_a_session_goes_on_with_its_adapter(v1):
    assert complete(v1, "a", session_id="s").status_code == 200
    assert v1.get("/sessions/s").json()["model"] == "a"
    refused = complete(v1, "b", session_id="s")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "session_id"
    assert complete(v1, "a", session_id="s").json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    v1.delete("/sessions/s")


def test_names_are_checked():
    with pytest.raises(errors.ConfigError, match="'a' twice"):
        ServedModels(None, "a", [LoRARequest("a", 1, "x")])
