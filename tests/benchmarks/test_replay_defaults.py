"""No command of the replays needs a download: without a trace, each serves a generated workload. Two do so here."""

from __future__ import annotations

import argparse
import json
from importlib import import_module

import pytest
from benchmarks.replay.__main__ import COMMANDS
from benchmarks.replay.eviction import sizes_up_to
from benchmarks.replay.setup import chosen_trace

from pagemill.errors import TraceError


def typed(command: str, *arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    import_module(f"benchmarks.replay.{command}").add_arguments(parser)
    return parser.parse_args([str(one) for one in arguments])


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_needs_a_trace(command):
    arguments = typed(command)
    if hasattr(arguments, "trace"):
        assert len(chosen_trace(arguments)) > 10
        assert typed(command, "trace.csv").trace.name == "trace.csv"


def test_a_trace_that_is_replayed_whole_has_no_default_end(tmp_path):
    path = tmp_path / "trace.jsonl"
    requests = [
        {"timestamp": 1e7 * number, "input_length": 600, "output_length": 2, "hash_ids": [number, number]}
        for number in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, requests)))
    assert len(chosen_trace(typed("eviction", path))) == 3
    assert len(chosen_trace(typed("eviction", path, "--seconds", 10_001))) == 2
    assert len(chosen_trace(typed("waste", path))) == 1, "an hour of it"


def test_eviction_tries_sizes_up_to_what_the_workload_fills(tmp_path):
    command = import_module("benchmarks.replay.eviction")
    command.main(typed("eviction", "--rate", 4, "--seconds", 20, "--out", tmp_path))
    rows = json.loads((tmp_path / "eviction.json").read_text())["rows"]
    assert 16 < rows[0]["blocks"] < rows[-1]["blocks"] < 2048
    assert rows[0]["found"]["best"] < rows[-1]["found"]["best"] == rows[-1]["found"]["lru"]
    assert sizes_up_to(170_899) == [2**power for power in range(10, 19)], "Mooncake's conversations"
    with pytest.raises(TraceError, match="sharegpt names no prefixes"):
        command.main(typed("eviction", "--workload", "sharegpt", "--out", tmp_path))


def test_paging_gains_most_where_requests_are_short_beside_the_context(tmp_path):
    command = import_module("benchmarks.replay.gains")
    command.main(typed("gains", "--requests", 20, "--scales", "0.25,1", "--out", tmp_path))
    short, long = (row["gain"] for row in json.loads((tmp_path / "gains-sharegpt.json").read_text())["rows"])
    for gain in (short, long):
        assert gain["whole batches"] > gain["maximum"] > gain["power of two"] >= gain["exact"] > 1
    assert short["maximum"] > long["maximum"] > 1.2
    assert (tmp_path / "gains-sharegpt.png").stat().st_size > 5000
