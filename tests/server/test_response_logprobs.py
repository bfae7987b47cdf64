"""The log probabilities of a response's text are those of the tokens that wrote it, and of no others."""

from random import Random

import pytest

from pagemill.frontend.outputs import CompletionOutput
from pagemill.server.routes.response_logprobs import ReadLogprobs
from pagemill.text.answer.formats import REASONING, TOOL_CALLS
from pagemill.text.answer.reader import AnswerReader

MODEL = "smollm2-135m"
ASKED = {
    "model": MODEL,
    "input": "Write a line with é and 日本.",
    "temperature": 0,
    "max_output_tokens": 12,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "Yes."}}\n</tool_call>'


class Spelled:
    """Detokenizes tokens that are places in a list of texts."""

    def __init__(self, texts):
        self.texts = texts

    def add(self, token_ids):
        return "".join(self.texts[token_id] for token_id in token_ids)


def claimed(texts, whole, batches):
    """Reads an answer of tokens that write `texts`, so many at a time. Returns its content, and the tokens of that."""
    reader = AnswerReader(
        TOOL_CALLS["hermes"],
        {"f": None},
        REASONING["qwen3"],
        reasons_from_start=False,
        call_id=str,
    )
    reading = ReadLogprobs(reader, Spelled(texts))
    output = CompletionOutput(0, "", [], logprobs=[])
    parts = []
    for size in batches:
        at = len(output.token_ids)
        output.token_ids += range(at, min(at + size, len(texts)))
        output.logprobs[at:] = output.token_ids[at:]
        output.text = "".join(texts[: len(output.token_ids)])[: len(whole)]
        parts += reading.read(output)
    parts += reading.finish(output)
    return "".join(part.content for part, _ in parts), [token for _, tokens in parts for token in tokens]


def cut(text, random):
    """Returns a text in pieces of up to twelve characters, some of them empty."""
    pieces = []
    while text:
        size = random.randint(0, 12)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize(
    ("before", "content", "behind"),
    [
        ("", "Hello, world.", ""),
        ("<think>\nYes.\n</think>\n\n", "think", ""),
        ("", "Let me look < there.", CALL),
        ("<think>\nA <tool_cal\n</think>", "B <tool_cal", "\n" + CALL + CALL + "\n"),
    ],
)
def test_tokens_of_content_are_told_whatever_the_cut(before, content, behind):
    whole = before + content + behind
    for seed in range(40):
        random = Random(seed)
        texts = cut(whole, random)
        read, tokens = claimed(texts, whole, [*random.choices(range(1, 9), k=20), len(texts)])
        assert read == content
        assert claimed(texts, whole, [1] * len(texts)) == (read, tokens)
        ends = [sum(map(len, texts[: at + 1])) for at in range(len(texts))]
        inside = [
            at
            for at, text in enumerate(texts)
            if text and ends[at] > len(before) and ends[at] - len(text) < len(before) + len(content)
        ]
        assert [token for token in tokens if texts[token]] == inside
        assert tokens == sorted(set(tokens))


def test_tokens_behind_a_stop_string_wrote_nothing():
    assert claimed(["ab", "", "c", "STOP", "x"], "ab", [5]) == ("ab", [0])
    assert claimed(["a", "", "", "bST"], "ab", [1, 3]) == ("ab", [0, 1, 2, 3])


def test_logprobs_are_those_of_chat(client, v1):
    response = client.responses.create(**ASKED)
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": ASKED["input"]}],
        temperature=0,
        max_tokens=12,
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = chat.choices
    (message,) = response.output
    told = [entry.to_dict() for entry in message.content[0].logprobs]
    assert told == [entry.to_dict() for entry in choice.logprobs.content][: len(told)]
    assert len(told) >= 12 - (choice.finish_reason == "stop")
    assert all(len(entry["top_logprobs"]) == 2 for entry in told)
    assert response.top_logprobs == 2
    assert client.responses.retrieve(response.id).output[0].content[0].logprobs == []  # nothing of them is kept
    again = client.responses.create(**ASKED | {"input": [*response.output, {"role": "user", "content": "Go on."}]})
    assert again.output[0].content[0].logprobs


def test_streams_tell_them_with_the_text(client):
    with client.responses.stream(**ASKED, store=False) as stream:
        events = list(stream)
    (done,) = (event for event in events if event.type == "response.output_text.done")
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    final = events[-1].response.output[0].content[0]
    for told in (done.logprobs, [entry for event in deltas for entry in event.logprobs]):
        assert [entry.to_dict() for entry in told] == [entry.to_dict() for entry in final.logprobs]
    assert "".join(event.delta for event in deltas) == final.text
    alone = client.responses.create(**ASKED | {"include": [], "top_logprobs": 0}, store=False)
    assert alone.output[0].content[0].to_dict() == {**final.to_dict(), "logprobs": []}
