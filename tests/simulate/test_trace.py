"""Traces are read as they are published, and what cannot be read says so and where to find one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from pagemill.errors import TraceError
from pagemill.simulate.trace import TracedRequest, read_trace, slice_of

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:51.2224670,879,55
"""


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def mooncake(*rows):
    return "".join(
        json.dumps({"timestamp": at, "input_length": length, "output_length": 2, "hash_ids": ids}) + "\n"
        for at, length, ids in rows
    )


def test_azure(tmp_path):
    trace = read_trace(write(tmp_path, "a.csv", AZURE))
    assert [(request.prompt_len, request.output_len) for request in trace] == [(374, 44), (396, 109), (879, 55)]
    assert [request.arrival_s for request in trace] == pytest.approx([0, 4.314579, 64.541877])
    prompts = [request.prompt() for request in trace]
    assert [len(prompt) for prompt in prompts] == [374, 396, 879]
    assert len({prompt[0] for prompt in prompts}) == 3


def test_mooncake(tmp_path):
    trace = read_trace(write(tmp_path, "m.jsonl", mooncake((2000, 700, [0, 5]), (1000, 1024, [0, 6]))))
    assert [(request.arrival_s, request.number) for request in trace] == [(0.0, 1), (1.0, 0)], "in order of arrival"
    second, first = (request.prompt() for request in trace)
    assert (len(first), len(second)) == (700, 1024)
    assert first[:512] == second[:512]
    assert first[512] != second[512]


def test_slice(tmp_path):
    trace = read_trace(write(tmp_path, "a.csv", AZURE))
    assert [request.prompt_len for request in slice_of(trace, 1, 64)] == [396, 879]
    half_as_fast = slice_of(trace, 0, 100, rate=0.5)
    assert [request.arrival_s for request in half_as_fast] == pytest.approx([0, 8.629158, 129.083754])
    for arguments, name in (((100, 10), "ends at 65 s"), ((0, 10, 0.0), "rate is 0")):
        with pytest.raises(TraceError, match=name):
            slice_of(trace, *arguments)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "TIME,ContextTokens\n1,2\n", "KeyError: 'TIMESTAMP'"),
        ("a.csv", AZURE.replace(",44", ",0"), "a length is 0"),
        ("a.csv", "", "no requests"),
        ("m.jsonl", "{", "cannot be read"),
        ("m.jsonl", mooncake((0, 700, [0])), "700 prompt tokens and 1 hash ids"),
        ("a.parquet", "", "neither .csv"),
    ],
)
def test_what_can_not_be_read(tmp_path, name, text, says):
    with pytest.raises(TraceError, match=says) as raised:
        read_trace(write(tmp_path, name, text))
    assert "github.com" in raised.value.message


def test_missing():
    with pytest.raises(TraceError, match=r"there is no trace nowhere\.csv.*AzurePublicDataset.*Mooncake"):
        read_trace(Path("nowhere.csv"))


def test_a_prompt_without_hash_ids_is_its_own():
    assert set(TracedRequest(3, 0.0, 5, 1).prompt()).isdisjoint(TracedRequest(4, 0.0, 5, 1, (3,)).prompt())


def test_a_request_of_a_trace_may_ask_for_samples_beams_and_a_time(tmp_path):
    lines = mooncake(*((1000 * at, 700, [0, 5]) for at in range(4))).splitlines()
    asked = [{"n": 2}, {"n": 2, "best_of": 4, "timeout": 2.5}, {"beam_width": 3}, {}]
    rows = [json.dumps(json.loads(line) | more) for line, more in zip(lines, asked, strict=True)]
    trace = read_trace(write(tmp_path, "m.jsonl", "\n".join(rows)))
    assert [one.num_sequences for one in trace] == [2, 4, 3, 1]
    assert [one.streams for one in trace] == [True, False, False, True]
    assert [one.deadline_s for one in trace] == [math.inf, 3.5, math.inf, math.inf]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"n": 0}, "n is 0; it must be a whole number from 1"),
        ({"n": 2.5}, "n is 2.5"),
        ({"n": 3, "best_of": 2}, "n is 3; of 2 sequences no more can be returned"),
        ({"best_of": 2, "beam_width": 2}, "best_of is 2 beside beam_width 2"),
        ({"timeout": 0}, "timeout is 0; it must be a number of seconds above 0"),
    ],
)
def test_what_no_request_can_ask_for_is_refused(tmp_path, asked, says):
    line = json.dumps(json.loads(mooncake((0, 700, [0, 5]))) | asked)
    with pytest.raises(TraceError, match=says):
        read_trace(write(tmp_path, "m.jsonl", line))
