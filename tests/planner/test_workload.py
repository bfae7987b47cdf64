"""Generated workloads: the means that they are named for, the same at every rate and every time."""

from __future__ import annotations

import json
import random
from statistics import mean

import pytest

from pagemill.errors import ConfigError
from pagemill.planner.workload import WORKLOADS, Lengths, Workload, workload_named


@pytest.mark.parametrize(("name", "prompt", "output"), [("sharegpt", 161, 338), ("alpaca", 19, 58)])
def test_lengths_have_the_published_means_and_fit_the_context(name, prompt, output):
    workload = workload_named(name)
    requests = workload.requests(10.0, 2000.0)
    assert mean(one.prompt_len for one in requests) == pytest.approx(prompt, rel=0.03)
    assert mean(one.output_len for one in requests) == pytest.approx(output, rel=0.03)
    assert all(1 <= one.prompt_len <= 1024 and 1 <= one.output_len <= 1024 for one in requests)
    assert max(one.length for one in requests) <= workload.context


def test_the_mean_is_right_although_lengths_are_cut():
    lengths = Lengths(mean=300.0, sigma=1.2, longest=400)
    source, mu = random.Random(0), lengths.mu
    assert mean(lengths.draw(source, mu) for _ in range(20_000)) == pytest.approx(300.0, rel=0.01)


def test_rates_share_their_requests_and_arrivals_are_as_often_as_asked():
    workload = WORKLOADS["sharegpt"]
    slow, fast = workload.requests(2.0, 500.0), workload.requests(4.0, 500.0)
    assert workload.requests(2.0, 500.0) == slow
    assert workload.requests(2.0, 500.0, seed=1) != slow
    pairs = list(zip(slow, fast, strict=False))
    assert all(a.prompt_len == b.prompt_len and a.output_len == b.output_len for a, b in pairs)
    assert all(a.arrival_s == pytest.approx(2 * b.arrival_s) for a, b in pairs)
    assert len(slow) == pytest.approx(1000, rel=0.1)
    assert slow[0].arrival_s == 0.0
    assert slow[-1].arrival_s < 500.0
    assert len(workload.requests(0.001, 1.0)) == 1


def test_an_unknown_workload_is_named():
    with pytest.raises(ConfigError, match="there is no workload 'chats'; choose one of sharegpt, alpaca"):
        workload_named("chats")


@pytest.mark.parametrize("given", [("x", 1.0, 9), (5, 1.0, 0), (50, 1.0, 9), (0, 1.0, 9), (5, -1.0, 9)])
def test_lengths_that_cannot_be_are_refused(given):
    with pytest.raises(ConfigError, match=r"a workload's (mean|longest|sigma) is"):
        Lengths(*given)


def test_a_sigma_of_0_makes_all_lengths_alike():
    lengths = Lengths(7, 0, 9)
    assert {lengths.draw(random.Random(0), lengths.mu) for _ in range(5)} == {7}


def test_a_workload_of_a_file_may_ask_for_samples_beams_and_a_time(tmp_path):
    path = tmp_path / "own.json"
    lengths = {"prompt": {"mean": 9, "sigma": 1, "longest": 90}, "output": {"mean": 9, "sigma": 1, "longest": 90}}
    path.write_text(json.dumps({**lengths, "context": 256, "n": 2, "best_of": 3, "timeout": 20}))
    requests = workload_named(str(path)).requests(1.0, 50.0)
    assert {(one.n, one.best_of, one.beam_width, one.timeout) for one in requests} == {(2, 3, 0, 20)}
    path.write_text(json.dumps({**lengths, "context": 256, "n": 2, "beam_width": 1}))
    with pytest.raises(ConfigError, match="a workload's n is 2; of 1 sequences no more can be returned"):
        workload_named(str(path))


def test_requests_come_as_often_as_asked_where_conversations_end_at_the_context():
    workload = Workload(Lengths(161, 1.0, 1024), Lengths(338, 0.9, 1024), 2048, turns=20, think_s=1)
    assert len(workload.requests(5.0, 400.0)) == pytest.approx(2000, rel=0.1)


def test_whole_numbers_may_be_written_as_others_are_and_parts_of_tokens_are_refused(tmp_path):
    path = tmp_path / "own.json"
    lengths = {"prompt": {"mean": 9, "sigma": 1, "longest": 1e2}, "output": {"mean": 9, "sigma": 1, "longest": 90}}
    path.write_text(json.dumps({**lengths, "context": 2.56e2}))
    requests = workload_named(str(path)).requests(50.0, 20.0)
    assert all(isinstance(one.prompt_len, int) and one.prompt() for one in requests)
    for wrong in ({"context": 256.5}, {"context": 4096, "prefixes": 1.5, "prefix_len": 512}):
        path.write_text(json.dumps({**lengths, **wrong}))
        with pytest.raises(ConfigError, match=r"a workload's (context|prefixes) is .*\.5; it must be a whole number"):
            workload_named(str(path))
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"cannot be read as a workload: it is \[1\]; it must be an object$"):
        workload_named(str(path))
