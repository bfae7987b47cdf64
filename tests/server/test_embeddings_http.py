"""Embeddings over HTTP, with OpenAI's own client."""

import httpx
import numpy as np
import pytest

MODEL = "smollm2-135m"
TEXTS = ["The cat sat on the mat.", "A cat was sitting on a mat.", "Interest rates rose by half a point."]


def vectors(answer) -> np.ndarray:
    return np.array([entry.embedding for entry in answer.data])


def test_texts_and_token_ids_become_vectors(client, served):
    answer = client.embeddings.create(model=MODEL, input=TEXTS, extra_body={"pooling_type": "MEAN"})
    found = vectors(answer)
    assert found.shape == (3, 576)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-6)
    assert found[0] @ found[1] > found[0] @ found[2]
    tokenizer = served.run(served.llm.tokenizer())
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    for given, wanted in ((ids, found), (ids[1], found[1:2]), (TEXTS[1], found[1:2])):
        again = client.embeddings.create(model=MODEL, input=given, extra_body={"pooling_type": "MEAN"})
        assert np.array_equal(vectors(again), wanted)
    served.wait_until_idle()


def test_numbers_and_base64_are_the_same(client):
    numbers, packed = (
        client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format=encoding, dimensions=576)
        for encoding in ("float", "base64")
    )
    assert isinstance(packed.data[0].embedding, str)
    by_default = client.embeddings.create(model=MODEL, input=TEXTS[0])  # base64, which the client decodes
    assert np.array_equal(vectors(numbers), vectors(by_default))
    longer = client.embeddings.create(model=MODEL, input=TEXTS[0], extra_body={"normalize": False})
    length = np.linalg.norm(vectors(longer))
    assert length > 2
    assert vectors(longer) / length == pytest.approx(vectors(numbers), abs=1e-5)


def test_many_inputs_are_one_request(client, served):
    many = [f"{number} and {number + 1}" for number in range(150)]
    found = vectors(client.embeddings.create(model=MODEL, input=many))
    assert np.array_equal(vectors(client.embeddings.create(model=MODEL, input=many[149:])), found[149:])
    served.wait_until_idle()


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "missing or empty"),
        ({"input": []}, "input", "missing or empty"),
        ({"input": ""}, "input", "no tokens"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "messages", "give their text as input"),
        ({"input": ["fine", ""]}, "input", "input.1: the prompt has no tokens"),
        ({"input": ["fine", "many words " * 3000]}, "input", "input.1: the prompt has"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": [1, 99999]}, "input", "99999"),
        ({"input": "many words " * 3000}, "input", "max_model_len"),
        ({"input": {"text": "a"}}, "input", "input"),
        ({"input": "a", "dimensions": 64}, "dimensions", "576 numbers"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"input": "a", "pooling_type": "CLS"}, "pooling_type", "one of LAST, MEAN"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "truncate_prompt_tokens"),
        ({"input": "a", "cache_salt": "x" * 2000}, "cache_salt", "cache_salt"),
    ],
)
def test_what_is_refused(served, body, param, words):
    response = httpx.post(f"{served.url}/v1/embeddings", json=body, timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    served.wait_until_idle()


def test_another_model_is_not_found(served):
    response = httpx.post(f"{served.url}/v1/embeddings", json={"input": "a", "model": "ada"}, timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
