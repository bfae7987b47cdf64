"""Completions with a suffix over HTTP, as editors ask for them."""

import openai
import pytest
import tokenizers

from pagemill.text.fill_in_the_middle import FillInTheMiddle, Form

MODEL = "smollm2-135m"
PREFIX, SUFFIX = "The capital of France is", " It is a large city."
ASKED = {"model": MODEL, "prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8, "temperature": 0, "seed": 1}
MARKS = ("<repo_name>", "<file_sep>", "<filename>")


@pytest.fixture
def learn(served, monkeypatch):
    """Gives the model a form, with tokens that its vocabulary has."""
    tokenizer = served.run(served.llm.tokenizer())
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())

    def learn(*ends):
        form = FillInTheMiddle(backend, Form(*MARKS, ends=tuple(tokenizer.names_of(ends))))
        monkeypatch.setattr(tokenizer, "fill_in_the_middle", form)
        before, behind, asks = (backend.token_to_id(mark) for mark in MARKS)
        return [before, *tokenizer.encode(PREFIX), behind, *tokenizer.encode(SUFFIX), asks]

    return learn


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_the_answer_is_the_one_to_the_models_own_form(client, learn):
    written = learn()
    (plain,) = client.completions.create(**{**ASKED, "prompt": written, "suffix": None}).choices
    whole = client.completions.create(**ASKED)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (plain.text, "length")
    assert whole.usage.prompt_tokens == len(written)
    chunks = client.completions.create(**ASKED, stream=True)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == plain.text


def test_the_answer_ends_where_the_middle_does(client, served, learn):
    learn()
    (whole,) = client.completions.create(**ASKED).choices
    tokens = served.run(served.llm.tokenizer()).encode(whole.text)
    end = next(at for at, token in enumerate(tokens) if at >= 2 and token not in tokens[:at])
    learn(tokens[end])
    (cut,) = client.completions.create(**ASKED).choices
    assert (cut.finish_reason, cut.stop_reason) == ("stop", tokens[end])
    assert whole.text.startswith(cut.text)
    assert len(cut.text) < len(whole.text)
    (on,) = client.completions.create(**ASKED, extra_body={"ignore_eos": True}).choices
    assert on.text == whole.text
