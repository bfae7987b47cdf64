"""Answers in the forms of real families: what is read, that no cut changes it, and that reading is linear."""

import json
import time
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.config import ReasoningParser, ToolCallParser
from pagemill.text.answer.formats import REASONING, TOOL_CALLS
from pagemill.text.answer.reader import AnswerReader

FUNCTIONS = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "on": {"type": "boolean"}}},
    "get-weather": {"type": "object"},
}
NESTED = '{"a": "x\\n<y> \\u00e9", "b": [1, -2.5e3, null, {"c": {}}]}'

READ = [
    # format, text, content, calls
    (
        "hermes",
        '<tool_call>{"index": [0, {}], "id": 7, "name": "f", "why": "<tool_call>", "arguments": {"a": 1}, "index": 0, '
        '"arguments": {}}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name":"f"}\n</tool_c', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f"}\n</tool_kit', "</tool_kit", [("f", "{}")]),
    ("hermes", f'Hm.\n<tool_call>\n{{"name": "f", "arguments": {NESTED}}}\n</tool_call>\n', "Hm.", [("f", NESTED)]),
    (
        "hermes",
        '<tool_call>[{"name": "f"}, {"arguments": {"a": ""}, "name": "f"}]</tool_call>',
        "",
        [("f", "{}"), ("f", '{"a": ""}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> Done. ',
        " Done.",
        [("f", '{"a": 1}')],
    ),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":null}</tool_call>\n<tool_call>{"name":"get-weather"}</tool_call>',
        "",
        [("f", "{}"), ("get-weather", "{}")],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n12\n\n</parameter>\n<parameter=b>\n[1, 2]\n</parameter>\n"
        "<parameter=on>\nTrue\n</parameter>\n<parameter=c>\nas it is\n</parameter>\n</function>\n</tool_call>",
        "",
        [("f", '{"a": "12\\n", "b": [1, 2], "on": true, "c": "as it is"}')],
    ),
    ("qwen3_coder", "<tool_call><function=f></function></tool_call>", "", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "1"}, "id": "abcdefghi"}]', "", [("f", '{"a": "1"}')]),
    (
        "mistral",
        'Hi [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get-weather[ARGS]{}',
        "Hi",
        [("f", '{"a": 1}'), ("get-weather", "{}")],
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        + NESTED
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "",
        [("f", NESTED), ("f", "{}")],
    ),
    (
        "deepseek_v31",
        "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Yes.",
        [("f", "{}")],
    ),
    (
        "phi4_mini_json",
        '<|tool_call|>[{"type": "function", "function": {"name": "f", "arguments": {}}}]<|/tool_call|>',
        "",
        [("f", "{}")],
    ),
    ("phi4_mini_json", 'functools[{"name": "f", "arguments": {"a": "x"}}]', "", [("f", '{"a": "x"}')]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]', "", [("f", "{}")] * 2),
    (
        "gemma",
        'Sure.\n```tool_code\nf(a="x)", b=[1, {"k": true}])\nget-weather()\n```',
        "Sure.",
        [("f", '{"a": "x)", "b": [1, {"k": true}]}'), ("get-weather", "{}")],
    ),
    ("pythonic", '[f(a="\\"", b=-1.5), f(b=None)]', "", [("f", '{"a": "\\"", "b": -1.5}'), ("f", '{"b": null}')]),
    (
        "llama3_json",
        f'\n{{"name": "f", "parameters": {NESTED}}}; {{"name": "f", "parameters": {{}}}}',
        "",
        [("f", NESTED), ("f", "{}")],
    ),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
]

NO_CALLS = [
    ("hermes", ""),
    ("hermes", " \n "),
    ("hermes", "a < b, <tool, <tool_cal"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argume'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call> '),
    ("hermes", '<tool_call>{"name": "f", "arguments": "\\ud800{}"}</tool_call>'),
    ("hermes", '<tool_call>{"function": {"function": {"name": "f"}}}</tool_call>'),
    ("hermes", "<tool_call>" * 9),
    ("hermes", '<tool_call>{"name": "f", "name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "other": oops}</tool_call>'),
    ("qwen3_coder", "<tool_call><function=unknown>"),
    ("mistral", "[TOOL_CALLS]f(1)"),
    ("gemma", "```tool_code\nprint(1)\n```\n"),
    ("gemma", "```tool_code\nf(1)\n```"),
    ("gemma", "```tool_code\nf(a=b)\n```"),
    ("gemma", "```tool_code\nf(a='\\ud800')\n```"),
    ("gemma", "```tool_code\nf(a=1e999)\n```"),
    ("gemma", "```tool_code\nf(**{'a': 1})\n```"),
    ("gemma", f"```tool_code\nf(a={'9' * 5000})\n```"),
    ("gemma", f"```tool_code\nf(a={'-' * 5000}1)\n```"),
    ("gemma", f"```tool_code\nf(a={'[' * 100}{']' * 100})\n```"),
    ("pythonic", "[1, 2, 3] is a list"),
    ("llama3_json", ' {"answer": 5} '),
    ("llama3_json", 'No: {"name": "f", "parameters": {}}'),
]


def reader(tool_calls=None, reasoning=None, opened=False, max_calls=None):
    return AnswerReader(
        TOOL_CALLS.get(tool_calls), FUNCTIONS, REASONING.get(reasoning), reasons_from_start=opened,
        call_id=lambda number: f"call-{number}", max_calls=max_calls,
    )  # fmt: skip


def read(reading, pieces):
    """Returns content, reasoning and calls, put together as clients put them together from a stream."""
    parts = [*map(reading.add, pieces), reading.finish()]
    calls = []
    for call in (call for part in parts for call in part.calls):
        if call.id is not None:
            assert (call.index, call.id) == (len(calls), f"call-{len(calls)}")
            calls.append((call.name, call.arguments))
        else:
            assert call.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), calls


@pytest.mark.parametrize(("form", "text", "content", "calls"), READ)
def test_calls_are_read_whatever_the_cut(form, text, content, calls):
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(reader(form), pieces) == (content, "", calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


TEXT = {"type": "string"}
NULL = {"type": "null"}
TYPED = [
    # schema, text, JSON
    (TEXT, "12345", '"12345"'),
    ({"type": ["string", "null"]}, "12345", '"12345"'),
    ({"type": ["string", "null"]}, "null", "null"),
    ({"type": ["string", "null"]}, '{"name": "x"}', '"{\\"name\\": \\"x\\"}"'),
    ({"anyOf": [TEXT, NULL]}, " true ", '" true "'),
    ({"oneOf": [{"type": "integer"}, TEXT]}, "12", "12"),
    ({"oneOf": [{"type": "integer"}, TEXT]}, "1.5", '"1.5"'),
    ({"oneOf": [{"type": "number"}, TEXT]}, "-12", "-12"),
    ({"anyOf": [TEXT, {"type": "object"}]}, '{"name": "x"}', '{"name": "x"}'),
    ({"anyOf": [TEXT, {"type": "boolean"}]}, "True", "true"),
    ({"enum": ["1", "2"]}, "1", '"1"'),
    ({"enum": ["1", 2, None]}, "2", "2"),
    ({"enum": ["1", 2, None]}, "null", "null"),
    ({"const": "7"}, "7", '"7"'),
    ({"$ref": "#/$defs/text"}, "7", '"7"'),
    ({"allOf": [{"$ref": "#/$defs/a~1b%20c"}]}, "7", '"7"'),
    ({"$ref": "#/$defs/loop"}, "7", '"7"'),
    ({"$ref": "#/$defs/missing/x"}, "7", "7"),
    ({"$ref": "other.json#/text"}, "7", "7"),
    ({"type": "array"}, '["x"]', '["x"]'),
    ({"type": "integer"}, "many", '"many"'),
    ({"type": 1, "enum": 2, "anyOf": 3, "oneOf": [4]}, "7", "7"),
    (True, "7", "7"),
]


@pytest.mark.parametrize(("schema", "text", "written"), TYPED)
def test_a_tagged_value_is_of_a_type_that_its_schema_allows(schema, text, written):
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/text"}]}
    definitions = {"text": TEXT, "a/b c": TEXT, "loop": loop}
    functions = {"f": {"type": "object", "properties": {"a": schema}, "$defs": definitions}}
    reading = AnswerReader(TOOL_CALLS["qwen3_coder"], functions, None, reasons_from_start=False, call_id=str)
    answer = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = reading.read(answer).calls
    assert call.arguments == f'{{"a": {written}}}'


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_is_content_as_it_stands(form, text):
    for pieces in ([text], list(text)):
        assert read(reader(form), pieces) == (text, "", [])


def test_arguments_that_go_wrong_stay_as_far_as_they_came_and_nothing_is_lost():
    text = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'
    for pieces in ([text], list(text)):
        assert read(reader("hermes"), pieces) == ("oops}}", "", [("f", '{"a": ')])
    text = '<tool_call>{"name": "f", "arguments": {}, "x": "<tool_call></tool_call>", oops</tool_call> </tool_call>'
    for pieces in ([text], list(text)):
        assert read(reader("hermes"), pieces) == (', "x": "", oops </tool_call>', "", [("f", "{}")])
    assert read(reader("hermes"), [text[:60]]) == ("", "", [("f", "{}")])
    text = "```tool_code\nf()\nprint(1)\n```\n```tool_code\nf()\n```\n```text"
    for pieces in ([text], list(text)):
        assert read(reader("gemma"), pieces) == ("\nprint(1)\n```text", "", [("f", "{}"), ("f", "{}")])
    text = '<tool_call>{"name": "f", "arguments": {"a": "cut'
    assert read(reader("hermes"), [text]) == ("", "", [("f", '{"a": "cut')])
    text = '<tool_call>{"name": "f", "arguments": {}</tool_call>'  # the call's own bracket is missing
    assert read(reader("hermes"), [text]) == ("", "", [("f", "{}")])
    deep = '{"a": ' + "[" * 100
    (_, _, ((_, arguments),)) = read(reader("hermes"), ['<tool_call>{"name": "f", "arguments": ' + deep])
    assert deep.startswith(arguments)


def test_arguments_stream_as_they_come_and_half_a_mark_never():
    reading = reader("hermes")
    assert reading.add("Well. <tool_").content == "Well."
    assert not reading.add('call>{"name": "f", "argum')
    assert [(call.name, call.arguments) for call in reading.add('ents": {"a": "x').calls] == [("f", '{"a": "x')]
    assert [(call.name, call.arguments) for call in reading.add('y"').calls] == [(None, 'y"')]
    assert [call.arguments for call in reading.add("}}</tool").calls] == ["}"]
    assert not reading.add("_call>\n")
    assert not reading.finish()


def test_calls_over_the_most_are_left_out():
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 3
    for pieces in ([text], list(text)):
        assert read(reader("hermes", max_calls=1), pieces) == ("", "", [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("form", "opened", "text", "content", "reasoning"),
    [
        ("qwen3", False, "<think>\nHm,\n\nyes. \n</think>\n\nYes. ", "Yes. ", "Hm,\n\nyes."),
        ("qwen3", True, "Hm.</think>Yes.", "Yes.", "Hm."),
        ("qwen3", False, " No </think>", " No </think>", ""),
        ("qwen3", False, "<think>\ncut </thi", "", "cut"),
        ("qwen3", False, "<think>\ncut </thin air", "", "cut </thin air"),
        ("qwen3", False, "<think></think>", "", ""),
        ("deepseek_r1", False, "Hm.\n</think>\nYes.", "Yes.", "Hm."),
        ("deepseek_r1", False, "<think>Hm.\n</think>\nYes.", "Yes.", "Hm."),
        ("mistral", False, "[THINK]Hm.[/THINK]Yes.", "Yes.", "Hm."),
        ("granite", False, "Here is my thought process: Hm.\nHere is my response: Yes.", "Yes.", "Hm."),
    ],
)
def test_reasoning_is_split_off(form, opened, text, content, reasoning):
    for pieces in ([text], list(text)):
        assert read(reader(reasoning=form, opened=opened), pieces) == (content, reasoning, [])


def test_calls_come_behind_reasoning_only():
    call = '<tool_call>{"name": "f"}</tool_call>'
    text = f"<think>{call}</think>{call}"
    assert read(reader("hermes", "qwen3"), list(text)) == ("", call, [("f", "{}")])


PIECES = st.sampled_from(
    [piece for _, text, *_ in READ for piece in (text, text[:-3], text[5:])]
    + [text for _, text in NO_CALLS if len(text) < 100]
    + [*"{}[]\"'\\,:()<>| \n\t", "<think>", "</think>", "f", "name", "arguments", "</parameter>", "é", "x" * 9]
)


@given(
    st.sampled_from([*TOOL_CALLS, None]),
    st.sampled_from([*REASONING, None]),
    st.booleans(),
    st.lists(PIECES, max_size=6).map("".join),
    st.data(),
)
def test_no_cut_changes_what_is_read(form, reasoning, opened, text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(reader(form, reasoning, opened), [text])
    assert read(reader(form, reasoning, opened), pieces) == whole
    assert read(reader(form, reasoning, opened), list(text)) == whole


@pytest.mark.parametrize(
    ("form", "unit"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>{"),
        ("hermes", " "),
        ("hermes", "<"),
        ("hermes", "\\"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call> '),
        ("llama3_json", "{"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>"),
        ("qwen3_coder", "<parameter=a>1</parameter>"),
        ("gemma", "```tool_code\nf("),
        ("gemma", "```tool_code\nf(a='x"),
        ("pythonic", "[f(),"),
        ("mistral", "[TOOL_CALLS]f{"),
    ],
)
def test_reading_is_linear(form, unit):
    def seconds(count, size):
        text = unit * (count // len(unit))
        times = []
        for _ in range(2):
            start = time.process_time()
            read(reader(form, "qwen3"), [text[at : at + size] for at in range(0, len(text), size)])
            times.append(time.process_time() - start)
        return min(times)

    for size in (4, 1 << 20):
        assert seconds(32_000, size) < 60 * max(seconds(2_000, size), 0.001)  # 16 times as long; 256 times if quadratic


def test_settings_name_all_formats():
    assert get_args(ToolCallParser) == ("auto", *TOOL_CALLS)
    assert get_args(ReasoningParser) == ("auto", "off", *REASONING)
