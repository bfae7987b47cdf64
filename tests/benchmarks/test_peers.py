"""The side-by-side benchmark: its workloads are what they are said to be, and it measures a real engine end to end."""

import json
import sys
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import gguf
import pytest
from benchmarks.loading import Shape
from benchmarks.peers import child, run
from benchmarks.peers.engines import ENGINES, model_paths
from benchmarks.peers.goals import GOALS
from benchmarks.peers.process import EngineFailed, check_tokens
from benchmarks.peers.report import figures, ratio, write_report
from benchmarks.peers.run import run_engine
from benchmarks.peers.workloads import SHAPES, STANDARD, fit, make, make_poisson, tokenize
from benchmarks.random_gguf import write
from hypothesis import given, settings
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
    with pytest.raises(ValueError, match="6003 tokens: too few for pieces 0 and on of long"):
        make("long", text[:6003])


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=40), st.data())
def test_fit_sums_to_the_total_within_bounds(draws, data):
    low, high = 4, 60
    total = data.draw(st.integers(low * (len(draws) - 1) + high, high * len(draws)))
    lengths = fit(draws, total, low, high)
    assert sum(lengths) == total
    assert (min(lengths) >= low, max(lengths)) == (True, high)


def test_arrivals_are_poisson_and_a_higher_rate_has_the_same_requests_sooner(text):
    slow, fast = (make_poisson(text, rate, 400, first_piece=0) for rate in (1.0, 4.0))
    assert slow == make_poisson(text, 1.0, 400, first_piece=0)
    assert len(fast.prompts) == pytest.approx(1600, rel=0.1)
    gaps = [later - earlier for earlier, later in pairwise([0.0, *fast.arrivals_s])]
    assert (min(gaps) > 0, max(fast.arrivals_s) < 400) == (True, True)
    # Exponential gaps: mean and standard deviation are equal, and 1 - 1/e of them are shorter than the mean.
    assert mean(gap**2 for gap in gaps) == pytest.approx(2 / 16, rel=0.2)
    assert mean(gap < 0.25 for gap in gaps) == pytest.approx(0.632, abs=0.05)
    requests = len(slow.prompts)
    assert fast.arrivals_s[:requests] == pytest.approx([at / 4 for at in slow.arrivals_s])
    assert fast.max_tokens[:requests] == slow.max_tokens
    mixed = make("mixed", text)
    assert sorted(slow.max_tokens[:64]) == sorted(mixed.max_tokens)
    assert sorted(map(len, slow.prompts[64:128])) == sorted(map(len, mixed.prompts))


def test_later_pieces_share_no_beginning_with_earlier_ones(text):
    first = make_poisson(text, 2.0, 50, first_piece=0)
    later = make_poisson(text, 2.0, 50, first_piece=len(first.prompts))
    assert not {tuple(prompt[:16]) for prompt in first.prompts} & {tuple(prompt[:16]) for prompt in later.prompts}


class TwoTokensAStep:
    """An engine whose steps take a second and give every request it holds up to two tokens; and its clock."""

    def __init__(self):
        self.left, self.steps, self.now = {}, [], 100.0

    def add(self, key, prompt, max_tokens):
        self.left[key] = max_tokens

    def has_work(self):
        return any(self.left.values())

    def step(self):
        self.now += 1.0
        self.steps.append(sum(left > 0 for left in self.left.values()))
        for key in [key for key, left in self.left.items() if left]:
            new = min(2, self.left[key])
            self.left[key] -= new
            yield key, new

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_requests_are_added_when_they_arrive(monkeypatch):
    engine = TwoTokensAStep()
    monkeypatch.setattr(child, "time", engine)
    workload = {"prompts": [[1]] * 3, "max_tokens": [5, 2, 2], "arrivals_s": [10.5, 0.0, 11.0]}
    requests = child.measure(engine, workload)
    assert requests == [
        {"tokens": 5, "arrival_s": 10.5, "first_s": 11.5, "last_s": 13.5},
        {"tokens": 2, "arrival_s": 0.0, "first_s": 1.0, "last_s": 1.0},
        {"tokens": 2, "arrival_s": 11.0, "first_s": 12.5, "last_s": 12.5},
    ]
    assert engine.steps == [1, 1, 2, 1]
    latency = figures({"requests": requests, "wall_s": 13.5, "peak_bytes": 1})
    assert latency["ttft_p99_s"] == 1.5
    assert latency["tpot_p99_s"] == 0.5
    assert latency["tokens_per_s"] == 9 / 13.5


def measured_run(engine, measured, precision="float32"):
    run = {"precision": precision, "round": 0, "load_average": 0.5, "description": "", "first_token_s": 1.0}
    return {"engine": engine, **run, "workloads": measured}


MACHINE = {"cpu": "a CPU", "features": [], "cores": 2, "memory_gib": 1, "load_average": [0.5, 0, 0], "date": "now"}


def test_pagemill_is_measured_and_reported(text, tmp_path):
    tiny = make("tiny", text)
    setup = replace(ENGINES["pagemill"], settings={"dtype": "float32", "kv_memory": "64MiB"})
    found = run_engine(setup, model_paths(), [tiny], tmp_path / "log", limit_s=120)
    measured = found["workloads"]["tiny"]
    assert [request["tokens"] for request in measured["requests"]] == tiny.max_tokens
    assert all(0 < request["first_s"] < request["last_s"] <= measured["wall_s"] for request in measured["requests"])
    assert 0 < found["first_token_s"] < 120
    assert measured["peak_bytes"] > 400 << 20  # the weights alone, in float32
    runs = [measured_run(engine, {"two": measured}) for engine in ("pagemill", "vllm")]
    write_report({"machine": MACHINE, "model": "smollm2-135m", "runs": runs}, tmp_path / "out")
    report = (tmp_path / "out.md").read_text()
    speed = 32 / measured["wall_s"]
    assert f"| two | **pagemill** | {speed:.1f} |" in report
    assert f"| two | vllm | {speed:.1f} | 1.00x |" in report
    assert f"| two | pagemill | {speed:.1f} | vllm | {speed:.1f} | 1.00x | 1.6x | 62% of it |" in report
    assert "a CPU" in report
    assert json.loads((tmp_path / "out.json").read_text())["summary"][0]["tokens_per_s"] == pytest.approx(speed)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_an_engine_that_is_too_slow_is_stopped_and_reported_as_a_bound(text, tmp_path):
    setup = replace(ENGINES["pagemill"], settings={"dtype": "float32", "kv_memory": "256MiB"})
    found = run_engine(setup, model_paths(), [make("mixed", text), make("tiny", text)], tmp_path / "log", limit_s=0.5)
    assert found["workloads"] == {"mixed": {"stopped_s": 0.5, "output_tokens": 7032}}
    fast = {"requests": [{"tokens": 7032, "arrival_s": 0.0, "first_s": 1.0, "last_s": 2.0}], "wall_s": 2.0}
    runs = [
        measured_run("pagemill", {"mixed": {**fast, "peak_bytes": 1}}),
        measured_run("transformers-static", {"mixed": {"stopped_s": 100.0, "output_tokens": 7032}}),
    ]
    write_report({"machine": MACHINE, "model": "smollm2-135m", "runs": runs}, tmp_path / "out")
    report = (tmp_path / "out.md").read_text()
    assert "| under 70.3 (stopped after 100 s) | over 50.00x | 24x | reached |" in report


def test_ratio_is_ours_over_the_fastest_of_theirs():
    speeds = (("pagemill", 30), ("x", 20), ("y", 10))
    rows = [{"engine": engine, "workload": "two", "tokens_per_s": speed} for engine, speed in speeds]
    assert ratio(rows, "two", "pagemill", ("y", "x", "not measured")) == (1.5, rows[1])
    assert ratio(rows, "two", "pagemill", ("not measured",)) is None
    assert ratio(rows, "mixed", "pagemill", ("x",)) is None


def test_goals_name_workloads_that_there_are_and_engines_of_other_makers():
    for goal in GOALS:
        assert goal.workload in SHAPES
        assert goal.engine.startswith("pagemill")
        assert goal.engine not in goal.against


def test_missing_tokens_are_a_failure(text):
    tiny = make("tiny", text)
    check_tokens(tiny, [{"tokens": 8}] * 4)
    with pytest.raises(EngineFailed, match=r"tiny.*\(2, 7, 8\)"):
        check_tokens(tiny, [{"tokens": 8}, {"tokens": 8}, {"tokens": 7}, {"tokens": 8}])


def test_an_engine_that_does_not_start_is_a_failure(text, tmp_path):
    setup = replace(ENGINES["pagemill"], settings={"dtype": "float7"})
    with pytest.raises(EngineFailed, match=f"exit status 1; see {tmp_path}"):
        run_engine(setup, model_paths(), [make("tiny", text)], tmp_path / "log", limit_s=120)
    assert "float7" in (tmp_path / "log").read_text()


def test_a_gguf_of_random_weights_runs_and_only_where_any_gguf_does(text, tmp_path, monkeypatch):
    shape = Shape(256, 512, 8, 4, 2, 64, 49_160)  # tokens of no use behind those of the tokenizer
    write(tmp_path / "random.gguf", shape, "Q4_K_M")
    forms = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "random.gguf").tensors}
    assert [forms[f"blk.{layer}.ffn_down.weight"] for layer in range(8)] == [
        "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"
    ]  # fmt: skip
    tiny, setup = make("tiny", text), replace(ENGINES["pagemill-gguf"], settings={"kv_memory": "64MiB"})
    found = run_engine(setup, model_paths(tmp_path / "random.gguf"), [tiny], tmp_path / "log", limit_s=120)
    assert [request["tokens"] for request in found["workloads"]["tiny"]["requests"]] == tiny.max_tokens
    monkeypatch.setattr(run, "require_installed", lambda engines: None)
    monkeypatch.setattr(sys, "argv", ["run", "--engines", "pagemill,vllm", "--model", str(tmp_path / "random.gguf")])
    with pytest.raises(SystemExit, match=r"vllm: only pagemill and llama\.cpp run another model"):
        run.main()
