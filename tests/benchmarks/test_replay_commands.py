"""The replay commands as they are typed, on a few seconds of a made-up trace: what they report, and write."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.replay.real_engine import LEAST_STEPS, RUNNING

from pagemill.simulate.step_time import COSTS, StepTimes

ROOT = Path(__file__).parents[2]


def start(*arguments) -> subprocess.CompletedProcess:
    """Runs the command in a process of its own, as it sets torch's threads."""
    command = [sys.executable, "-m", "benchmarks.replay", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def replay(*arguments) -> str:
    """What the command prints."""
    done = start(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cells(printed: str, width: int) -> list[list[str]]:
    """Rows of the table that has so many columns, without its head."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    return [row for row in rows if len(row) == width and "---" not in row[-1]][1:]


def write_trace(path: Path, requests: int, seconds: float, prompt: int, output: int) -> Path:
    """Lengths are drawn around these."""
    draw, rows = random.Random(0), ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for number in range(requests):
        lengths = [max(2, int(mean * draw.uniform(0.5, 1.5))) for mean in (prompt, output)]
        rows.append(f"2023-11-16 18:15:{number * seconds / requests:010.7f},{lengths[0]},{lengths[1]}")
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """More than can be served as it comes."""
    return write_trace(tmp_path_factory.mktemp("trace") / "trace.csv", 60, 6.0, 300, 40)


def test_waste_grows_with_the_block(trace, tmp_path):
    printed = replay("waste", trace, "--rate", 0.5, "--block-sizes", "8,16,64", "--kv-mib", 256, "--out", tmp_path)
    assert "60 requests in 12 s" in printed
    rows = json.loads((tmp_path / "waste.json").read_text())["rows"]
    assert [row["block_size"] for row in rows] == [8, 16, 64]
    shown = [(f"{row['waste']:.2%}", f"{row['uncommitted']:.2%}", str(row["most_running"])) for row in rows]
    assert [(row[1], row[2], row[5]) for row in cells(printed, 9)] == shown
    for row in rows:
        # Half of a block is left over in each sequence, of 170 to 340 tokens.
        assert 0.25 * row["block_size"] / 340 < row["waste"] < 0.75 * row["block_size"] / 170
        assert row["waste"] < row["uncommitted"]
        assert 1 < row["mean_running"] <= row["most_running"] <= 60
        assert row["preemptions"] == 0
        assert 0.2 < row["busy"] <= 1
    assert (tmp_path / "waste.png").stat().st_size > 5000


def test_the_controller_keeps_the_target_where_a_fixed_setting_does_not(trace, tmp_path):
    fixed = ("--tokens", "512", "--seqs", "4,64")
    printed = replay("control", trace, "--rate", 0.5, "--target-tpot-ms", 80, *fixed, "--out", tmp_path)
    rows = json.loads((tmp_path / "control-trace.json").read_text())["rows"]
    names = ["controller", "512 tokens, 4 sequences", "512 tokens, 64 sequences"]
    assert [row["setting"] for row in rows] == [row[0] for row in cells(printed, 11)] == names
    controller, _, many = rows
    assert all(0 < row["goodput"] <= row["output_tokens_per_s"] or row is many for row in rows)
    assert controller["in_time"] > 0.9 > 0.5 > many["in_time"]
    assert controller["tpot_median_s"] <= 0.08 < many["tpot_median_s"]
    assert all(0 < row["finished"] <= 60 for row in rows)
    best = max(rows[1:], key=lambda row: row["goodput"])
    last = f"controller / best fixed setting ({best['setting']}): {controller['goodput'] / best['goodput']:.2f}"
    assert last in printed
    assert (tmp_path / "control-trace.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--seconds", 0.05), "all 1 requests come at once"),
        (("--target-tpot-ms", 0), "target_tpot_ms is 0; it must be above 0"),
    ],
)
def test_a_replay_that_measures_nothing_is_refused(trace, tmp_path, arguments, words):
    done = start("control", trace, *arguments, "--out", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert words in done.stderr


def test_a_target_that_no_setting_reaches_has_no_ratio(trace, tmp_path):
    fixed = ("--tokens", "64", "--seqs", "4")
    printed = replay("control", trace, "--rate", 0.5, "--target-tpot-ms", 0.01, *fixed, "--out", tmp_path)
    assert "controller / best fixed setting (64 tokens, 4 sequences): –" in printed


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """Step times of this machine, by CPU time, and what `calibrate` printed."""
    path = tmp_path_factory.mktemp("calibration") / "steps.json"
    sizes = ("--seconds", 1, "--max-num-batched-tokens", 128)
    return path, replay("calibrate", "--clock", "cpu", *sizes, "--out", path)


def test_calibrate_fits_the_steps_that_it_has_measured(calibrated):
    path, printed = calibrated
    times = StepTimes.load(path)
    assert [row[0] for row in cells(printed, 2)] == list(COSTS)
    assert all(cost >= 0 for cost in times.seconds_of.values())
    bands = cells(printed, 5)
    assert sum(int(row[1]) for row in bands) == times.about["steps"] >= LEAST_STEPS * len(RUNNING)
    assert [row[0] for row in bands] == [band["tokens"] for band in times.about["errors"]]
    assert (times.about["model"], times.about["dtype"], times.about["clock"]) == ("smollm2-135m", "bfloat16", "cpu")
    measured, modelled = map(float, re.findall(r"all steps: measured (\S+) s, modelled (\S+) s", printed)[0])
    assert 0.5 < modelled / measured < 2


@pytest.mark.slow
def test_confirm_serves_a_slice_for_real_and_simulates_it(calibrated, trace, tmp_path):
    sizes = ("--kv-mib", 512, "--max-num-batched-tokens", 256, "--repeats", 1, "--out", tmp_path)
    printed = replay("confirm", trace, "--seconds", 0.5, "--rate", 0.5, "--calibration", calibrated[0], *sizes)
    assert "5 requests in 1 s" in printed
    real_s = float(re.findall(r"the real steps took (\S+) s; the model gives the same steps", printed)[0])
    found = {name: (float(real), float(simulated)) for name, real, _, simulated, *_ in cells(printed, 6)}
    assert found["busy, s"][0] == pytest.approx(real_s, rel=0.01)
    rows = json.loads((tmp_path / "confirm.json").read_text())["rows"]
    assert sum(row["goal"] is not None for row in rows if not row["figure"].endswith("alone")) == 5
    tokens = [rate * end for rate, end in zip(found["output tokens/s"], found["end, s"], strict=True)]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.01)  # both have served all
    for name in ("steps", "mean rows", "most rows"):
        assert found[name][0] == pytest.approx(found[name][1], rel=0.5), name
    assert found["most rows"][0] <= 5
    assert found["preemptions"] == (0, 0)
    assert all(value > 0 for name in found if name.startswith(("TTFT", "TPOT")) for value in found[name])


A100 = ("--device", "a100-40", "--shape", "opt-13b")


def test_a_replay_on_a_device_is_labelled_modelled_and_has_the_pool_that_its_weights_leave(trace, tmp_path):
    printed = replay("allocators", trace, "--seconds", 3, *A100, "--out", tmp_path)
    assert (
        "step times: *modelled* by a roofline: OPT-13B in bfloat16 on NVIDIA A100 SXM4 40 GB; KV pool 11329 MiB"
        in printed
    )
    found = json.loads((tmp_path / "allocators.json").read_text())
    assert found["about"]["modelled"] is True
    assert found["about"]["sources"]["bytes_per_s"]
    assert found["settings"]["kv_mib"] == "11329"
    assert len(found["rows"]) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "h100"), "give both --device and --shape"),
        (("--device", "h1000", "--shape", "opt-13b"), "there is no device 'h1000'; choose one of a100-40"),
        (("--device", "l4", "--shape", "llama-3-70b"), "Llama 3 70B in bfloat16 has 141.1 GB of weights"),
        (("--device", "l4", "--shape", "llama-3-8b", "--dtype", "int4"), "has no rate for int4"),
    ],
)
def test_a_device_that_cannot_be_modelled_is_refused(trace, arguments, words):
    done = start("waste", trace, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_capacity_needs_both_limits_to_hold(tmp_path):
    """A queue spoils the first token before the gaps."""
    found = []
    for ttft in ((), ("--slo-ttft-p99", 100)):
        limits = ("--slo-tpot-p99", 40, *ttft, "--seconds", 20, "--first-rate", 1.5)
        printed = replay("capacity", *A100, *limits, "--out", tmp_path)
        found.append(float(re.findall(r"capacity: (\S+) requests/s", printed)[0]))
        rows = json.loads((tmp_path / "capacity-sharegpt.json").read_text())["rows"]
        assert max(row["rate"] for row in rows if row["held"]) == pytest.approx(found[-1], abs=0.01)
        assert all(row["ttft_p99_s"] <= (0.1 if ttft else 5.0) for row in rows if row["held"])
        assert all(row["tpot_p99_s"] <= 0.04 for row in rows if row["held"])
        assert not all(row["held"] for row in rows)
    assert 0.1 <= found[1] < found[0]


def test_capacity_counts_what_a_timeout_ends(tmp_path):
    typed = ("capacity", *A100, "--slo-tpot-p99", 1000, "--timeout", 30, "--seconds", 20, "--first-rate", 3)
    found = float(re.findall(r"capacity: (\S+) requests/s", replay(*typed, "--out", tmp_path))[0])
    rows = json.loads((tmp_path / "capacity-sharegpt.json").read_text())["rows"]
    assert any(row["timed_out"] for row in rows if not row["held"])
    assert all(row["timed_out"] <= 0.01 * row["requests"] for row in rows if row["held"])
    assert max(row["rate"] for row in rows if row["held"]) == pytest.approx(found, abs=0.01)


def test_paged_memory_sustains_more_load_than_contiguous_and_whole_batches_least(tmp_path):
    printed = replay("load", "--seconds", 6, "--first-rate", 1, "--limit-ms", 60, "--out", tmp_path)
    rows = cells(printed, 8)
    assert [row[0] for row in rows] == ["whole batches", "maximum", "power of two", "exact", "paged"]
    rates, most = ([float(row[column]) for row in rows] for column in (1, 4))
    assert rates == sorted(rates)
    assert most == sorted(most)
    assert rates[0] * 2 < rates[1] < rates[4] / 1.5
    assert [row[3] for row in rows] == ["up to 22x", "2.7x to 8x", "", "1.7x to 2.7x", ""]
    assert [row[7] for row in rows] == ["", "7.0", "9.8", "13.6", "30.4"]
    assert float(rows[1][6]) <= 7, "runs of 2,048 tokens"
    assert (tmp_path / "load-sharegpt.png").stat().st_size > 5000


def test_swapping_computes_less_again(tmp_path):
    sizes = ("--requests", 40, "--links", "1", "--block-sizes", "8,64", "--kv-mib", 4000, "--out", tmp_path)
    replay("swap", *sizes)
    rows = json.loads((tmp_path / "swap-sharegpt.json").read_text())["rows"]
    assert [row["mode"] for row in rows] == ["none", *("recompute", "swap", "auto") * 4]
    none, recompute, swap, _ = rows[:4]
    assert none["preemptions"] > 0
    assert none["loaded_tokens"] == recompute["loaded_tokens"] == none["saving"] == 0
    assert swap["loaded_tokens"] > 0
    assert swap["recomputed"] < recompute["recomputed"] / 2
    assert rows[5]["saving"] > rows[2]["saving"] > 0, "a slower link"


@pytest.mark.slow
def test_validate_holds_a_roofline_against_real_steps(tmp_path):
    printed = replay("validate", "--seconds", 1, "--max-num-batched-tokens", 128, "--out", tmp_path)
    rows = json.loads((tmp_path / "validate.json").read_text())["rows"]
    assert [row[0] for row in cells(printed, 9)] == [row["tokens"] for row in rows]
    every = rows[-1]
    assert every["steps"] == sum(row["steps"] for row in rows[:-1]) >= LEAST_STEPS * len(RUNNING)
    assert every["errors"]["floor"][0] < every["errors"]["modelled"][0]
    assert every["errors"]["calibrated"][1] < 1


def test_waste_is_counted_of_generated_requests_too(tmp_path):
    printed = replay("waste", "--rate", 2, "--seconds", 20, "--block-sizes", "16,64", *A100, "--out", tmp_path)
    assert "sharegpt: " in printed
    rows = json.loads((tmp_path / "waste.json").read_text())["rows"]
    assert 0.005 < rows[0]["waste"] < rows[1]["waste"] < 0.15


def test_fewer_bits_hold_longer_contexts_and_streaming_holds_any(tmp_path):
    replay("context", "--contexts", "8,256,512,1024", "--out", tmp_path)
    rows = json.loads((tmp_path / "context.json").read_text())["rows"]
    held = {(row["kv"], row["context"] // 1024): row["sequences"] for row in rows}
    assert 0 < held["bf16", 8] < held["int8", 8] < held["int4", 8]
    assert [held[kv, 1024] for kv in ("bf16", "int8", "int4", "bf16, streamed")] == [0, 0, 1, 1]
    by = {(row["kv"], row["context"] // 1024): row for row in rows}
    assert by["bf16, streamed", 256]["step_s"] == by["bf16", 256]["step_s"], "all of it fits"
    streamed = by["bf16, streamed", 1024]
    assert 0.5 < streamed["streamed_share"] < 0.6
    # 131,072 bytes of each token that is away cross the link at 80 % of 63 GB/s in each step.
    assert streamed["step_s"] > streamed["streamed_share"] * 1024 * 1024 * 131_072 / (0.8 * 63e9)
    assert (tmp_path / "context.png").stat().st_size > 5000


def test_paging_gains_most_where_lengths_vary_and_little_over_exact_where_they_do_not(tmp_path):
    replay("lengths", "--requests", 60, "--spreads", "0,1", "--out", tmp_path)
    rows = json.loads((tmp_path / "lengths-sharegpt.json").read_text())["rows"]
    gain = {(row["spread"], row["memory"]): row["paged_has"] for row in rows}
    assert 1.0 <= gain[0.0, "exact"] < 1.5 < gain[1.0, "exact"]
    assert gain[0.0, "maximum"] > 2


def test_sharing_tells_what_could_not_run_or_was_preempted(tmp_path):
    crowded = ("--requests", 12, "--rate", 1000, "--max-num-seqs", 4, "--kv-mib", 700, "--out", tmp_path)
    printed = replay("sharing", "--workloads", "sharegpt", "--widths", "2,6", *crowded)
    rows = json.loads((tmp_path / "sharing.json").read_text())["rows"]
    assert [(row["kind"], row["width"]) for row in rows] == [(kind, k) for kind in ("n", "beam_width") for k in (2, 6)]
    for row, wide in zip(rows, (False, True) * 2, strict=True):
        assert (row["saved"] is None, row["refused"] == 12) == (wide, wide)
    assert any(0 < row["refused"] < 12 or row["preempted"] for row in rows)
    assert "- (12 refused)" in printed
