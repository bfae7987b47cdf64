"""The side-by-side benchmark: its workloads are what they are said to be, and it measures a real engine end to end."""

import json
from dataclasses import replace

import pytest
from benchmarks.peers.engines import ENGINES
from benchmarks.peers.report import ratios, write_report
from benchmarks.peers.run import EngineFailed, check_tokens, run_engine
from benchmarks.peers.workloads import SHAPES, STANDARD, fit, make, tokenize
from hypothesis import given
from hypothesis import strategies as st

TOTALS = {
    "one": (1, 128, 128),
    "two": (2, 256, 256),
    "mixed": (64, 13739, 7032),
    "prefix": (64, 64 * (1024 + 32), 3958),
    "decode": (64, 64 * 512, 64 * 128),
    "long": (4, 4 * 6000, 128),
    "crowd": (256, 256 * 64, 256 * 64),
}


@pytest.fixture(scope="module")
def text():
    return tokenize("smollm2-135m")


@pytest.mark.parametrize("name", STANDARD)
def test_workload_has_the_stated_totals(name, text):
    workload = make(name, text)
    assert (len(workload.prompts), workload.prompt_tokens, workload.output_tokens) == TOTALS[name]


def test_longest_of_mixed_and_range_of_prefix(text):
    mixed, prefix = make("mixed", text), make("prefix", text)
    assert max(map(len, mixed.prompts)) == 1500
    assert max(mixed.max_tokens) == 400
    assert (min(prefix.max_tokens) >= 16, max(prefix.max_tokens)) == (True, 128)
    assert len({tuple(prompt[:1024]) for prompt in prefix.prompts}) == 1
    assert len({tuple(prompt[1024:]) for prompt in prefix.prompts}) == 64


@pytest.mark.parametrize("name", SHAPES)
def test_same_round_is_the_same_and_another_shares_no_beginning(name, text):
    first, again, other = make(name, text), make(name, text), make(name, text, round=1)
    assert first == again
    assert first.max_tokens == other.max_tokens
    assert not {tuple(prompt[:16]) for prompt in first.prompts} & {tuple(prompt[:16]) for prompt in other.prompts}


def test_a_text_that_is_too_short_is_refused(text):
    with pytest.raises(ValueError, match="6003 tokens: too few for round 0 of long"):
        make("long", text[:6003])


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=40), st.data())
def test_fit_sums_to_the_total_within_bounds(draws, data):
    low, high = 4, 60
    total = data.draw(st.integers(low * (len(draws) - 1) + high, high * len(draws)))
    lengths = fit(draws, total, low, high)
    assert sum(lengths) == total
    assert (min(lengths) >= low, max(lengths)) == (True, high)


def test_pagemill_is_measured_and_reported(text, tmp_path):
    tiny = make("tiny", text)
    setup = replace(ENGINES["pagemill"], settings={"dtype": "float32", "kv_memory": "64MiB"})
    found = run_engine(setup, [tiny], tmp_path / "log", timeout_s=120)
    measured = found["workloads"]["tiny"]
    assert [request["tokens"] for request in measured["requests"]] == tiny.max_tokens
    assert all(0 < request["first_s"] < request["last_s"] <= measured["wall_s"] for request in measured["requests"])
    assert 0 < found["first_token_s"] < 120
    assert measured["peak_bytes"] > 400 << 20  # the weights alone, in float32
    machine = {"cpu": "a CPU", "features": [], "cores": 2, "memory_gib": 1, "load_average": [0.5, 0, 0], "date": "now"}
    run = {"precision": "float32", "round": 0, "load_average": 0.5, **found}
    runs = [{"engine": "pagemill", **run}, {"engine": "peer", **run}]
    write_report({"machine": machine, "model": "smollm2-135m", "runs": runs}, tmp_path / "out")
    table = (tmp_path / "out.md").read_text()
    speed = 32 / measured["wall_s"]
    assert f"| tiny | pagemill | float32 | {speed:.1f} |" in table
    assert "| pagemill / peer | 1.00x |" in table
    assert "a CPU" in table
    assert json.loads((tmp_path / "out.json").read_text())["summary"][0]["tokens_per_s"] == pytest.approx(speed)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_ratio_is_ours_over_theirs():
    rows = [
        {"engine": engine, "workload": "two", "tokens_per_s": speed} for engine, speed in (("pagemill", 30), ("x", 20))
    ]
    assert ratios(rows) == {("pagemill", "x"): {"two": 1.5}}


def test_missing_tokens_are_a_failure(text):
    tiny = make("tiny", text)
    check_tokens(tiny, [{"tokens": 8}] * 4)
    with pytest.raises(EngineFailed, match=r"tiny.*\(2, 7, 8\)"):
        check_tokens(tiny, [{"tokens": 8}, {"tokens": 8}, {"tokens": 7}, {"tokens": 8}])


def test_an_engine_that_does_not_start_is_a_failure(text, tmp_path):
    setup = replace(ENGINES["pagemill"], settings={"dtype": "float7"})
    with pytest.raises(EngineFailed, match=f"exit status 1; see {tmp_path}"):
        run_engine(setup, [make("tiny", text)], tmp_path / "log", timeout_s=120)
    assert "float7" in (tmp_path / "log").read_text()
