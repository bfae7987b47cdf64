"""Items of responses and blocks of messages: the same whatever pieces an answer comes in."""

from __future__ import annotations

import itertools
import json

import pytest

from pagemill.server.routes.message_output import MessageOutput
from pagemill.server.routes.response_output import ResponseOutput
from pagemill.text.answer.formats import REASONING, TOOL_CALLS
from pagemill.text.answer.reader import AnswerReader

CALL = '<tool_call>\n{"name": "rm", "arguments": {"path": "/tmp", "deep": true}}\n</tool_call>'
ANSWERS = [f"<think>Hm.</think>Wait. {CALL}\nDone.", f"{CALL}Done.{CALL}"]


def reader() -> AnswerReader:
    return AnswerReader(
        TOOL_CALLS["hermes"],
        {"rm": {}},
        REASONING["qwen3"],
        reasons_from_start=False,
        call_id=lambda number: f"call_{number}",
    )


def pieces_of(text: str) -> list[tuple[str, ...]]:
    """In one piece, in two of every length, in three of many, and letter by letter."""
    some = range(1, len(text), max(3, len(text) // 100))
    cuts = [(), *itertools.combinations(some, 2), *((at,) for at in range(1, len(text)))]
    parts = [tuple(text[a:b] for a, b in itertools.pairwise((0, *cut, len(text)))) for cut in cuts]
    return [*parts, tuple(text)]


def fed(output, pieces):
    one = reader()
    for piece in pieces:
        output.add(one.add(piece))
    output.add(one.finish())
    output.close()
    return output


@pytest.mark.parametrize("text", ANSWERS, ids=["text behind a call", "text between calls"])
def test_blocks_and_items_are_in_the_order_in_which_they_were_written(text):
    calls = ["tool_use", "text", "tool_use"] if text.startswith(CALL) else ["thinking", "text", "tool_use", "text"]
    others = {"thinking": "reasoning", "text": "message", "tool_use": "function_call"}
    for pieces in pieces_of(text):
        blocks = fed(MessageOutput(streaming=False), pieces).blocks
        assert [block.type for block in blocks] == calls, pieces
        items = fed(ResponseOutput("resp_1", streaming=False), pieces).items
        assert [item.type for item in items] == [others[kind] for kind in calls], pieces
        texts = [item.content[0].text for item in items if item.type == "message"]
        assert texts == [block.text for block in blocks if block.type == "text"], pieces
        assert texts == (["Done."] if text.startswith(CALL) else ["Wait.", "\nDone."])


@pytest.mark.parametrize("text", ANSWERS, ids=["text behind a call", "text between calls"])
def test_calls_have_their_arguments_and_texts_their_words(text):
    for pieces in pieces_of(text):
        blocks = fed(MessageOutput(streaming=False), pieces).blocks
        calls = [block.input for block in blocks if block.type == "tool_use"]
        assert calls == [{"path": "/tmp", "deep": True}] * text.count("tool_call>\n{"), pieces
        words = "".join(block.text for block in blocks if block.type == "text").split()
        assert "".join(words) == ("Wait.Done." if "Wait" in text else "Done."), pieces
        items = fed(ResponseOutput("resp_1", streaming=False), pieces).items
        given = [json.loads(item.arguments) for item in items if item.type == "function_call"]
        assert given == calls, pieces


@pytest.mark.parametrize("text", ANSWERS)
def test_events_say_what_the_blocks_are(text):
    for pieces in pieces_of(text)[::7]:
        output = fed(MessageOutput(streaming=True), pieces)
        told = [json.loads(event.partition("data: ")[2]) for event in output.take_events()]
        blocks, opened = [], None
        for event in told:
            if event["type"] == "content_block_start":
                assert opened is None
                opened = event["index"]
                assert opened == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
                continue
            assert event["index"] == opened
            if event["type"] == "content_block_stop":
                opened = None
                continue
            delta = event["delta"]
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta["type"]]
            blocks[-1][name] += delta.get("partial_json", delta.get(name))
        assert opened is None
        for block in blocks:
            block |= {"input": json.loads(block.pop("json"))} if block["type"] == "tool_use" else {}
            block.pop("json", None)
        assert blocks == [block.model_dump() for block in output.blocks]


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ('{"a": 1, "b": True}', {"a": 1}),
        ('{"a": 1, "b": None, "c": 2}', {"a": 1}),
        ('{"a": 01}', {}),
        ('{"a": "x" "y"}', {"a": "x"}),
        ('{"a": "\\ud83d"}', {}),
        ('{"a": ' + "9" * 5000 + "}", {}),
        ('{"a": [1, 2', {"a": [1, 2]}),
    ],
)
def test_calls_that_go_wrong_break_nothing(arguments, kept):
    """Text that was read as a call's arguments stays the beginning of JSON, so that clients can read it."""
    text = f'<tool_call>\n{{"name": "rm", "arguments": {arguments}}}\n</tool_call>'
    found = set()
    for pieces in (*pieces_of(text)[::11], tuple(text)):
        output = fed(MessageOutput(streaming=True), pieces)
        (call,) = [block for block in output.blocks if block.type == "tool_use"]
        assert output.has_broken_call
        found.add(json.dumps(call.input))
    assert found == {json.dumps(kept)}
