"""The sharing benchmark asks the same of both sides, and its plot can be drawn."""

from statistics import mean

import pytest
from benchmarks.peers.engines import MODEL
from benchmarks.peers.plots import plot_shares
from benchmarks.sharing import WORKLOADS, draw_requests, forked, independent, row_of, run

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.hub import resolve_model


def test_both_sides_generate_as_many_tokens_from_the_same_prompts():
    text = list(range(5000))
    requests = draw_requests(WORKLOADS["alpaca"], 5, text, seed=1)
    assert requests == draw_requests(WORKLOADS["alpaca"], 5, text, seed=1)
    for mode, width in (("n3", 3), ("beam3", 3)):
        ours, theirs = forked(mode, requests), independent(mode, requests)
        assert (len(ours), len(theirs)) == (5, 15)
        assert {(beam := one.beam) is not None and beam.beam_width == 3 for one in ours} == {mode == "beam3"}
        assert sum(one.params.n * one.params.max_tokens for one in ours) == sum(one.params.max_tokens for one in theirs)
        assert [one.prompt_token_ids for one in theirs[::width]] == [one.prompt_token_ids for one in ours]
        assert len({one.params.seed for one in theirs}) == 15


def test_lengths_have_the_means_of_the_workload():
    requests = draw_requests(WORKLOADS["sharegpt"], 2000, list(range(5000)), seed=2)
    assert 153 < mean(len(prompt) for prompt, _ in requests) < 169
    assert 321 < mean(length for _, length in requests) < 355


@pytest.mark.parametrize("mode", ["n3", "beam2", "beam4"])
def test_all_is_shared_that_is_equal(mode):
    config = EngineConfig(
        model=str(resolve_model(MODEL)),
        dtype="float32",
        kv_memory="64MiB",
        max_model_len=256,
        enable_prefix_caching=False,
    )
    core = EngineCore(config)
    ran = run(core, forked(mode, [(list(range(100, 140)), 40), (list(range(300, 320)), 30)]))
    core.close()
    assert 0.05 < ran["saved"] <= ran["possible"] + 1e-9
    assert ran["possible"] - ran["saved"] < 0.005


def test_table_and_plot(tmp_path):
    row = {"workload": "alpaca", "mode": "beam4", "saved": 0.4321, "possible": 0.45, "published": (37.6, 55.2),
           "tokens_per_s": 300.0, "independent_tokens_per_s": 200.0}  # fmt: skip
    assert row_of(row) == "| alpaca | beam4 | 43.2% | 45.0% | 37.6–55.2 % | 300 | 200 | 1.50 |"
    del row["tokens_per_s"]
    assert row_of(row) == "| alpaca | beam4 | 43.2% | 45.0% | 37.6–55.2 % | | | |"
    plot_shares([row, {**row, "workload": "sharegpt"}], "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
