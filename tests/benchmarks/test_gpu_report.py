"""The GPU report: benchmarks that work, fail or are slow, tests, and both halves on one page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from benchmarks.gpu_page import BUSY_GOAL, GOALS, MOVE_GOAL, MOVES, SLOWER, SLOWER_GOAL, STEP_GOAL, page
from benchmarks.timed_command import Outcome, run_command

from benchmarks import gpu_report, timed_command

ROOT = Path(__file__).parents[2]
FAKES = {
    "works": """
import json, sys, pathlib
print("| a table |")
pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"asked": sys.argv[1:-2]}))
""",
    "fails": "print('half a table')\nraise ValueError('illegal address')",
    "lacks": "import msgspec_that_nobody_has",
    "is_slow": "import time\nprint('the first rows')\ntime.sleep(60)",
    "heeds_nothing": "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)",
}
DECODE = {
    "results": [
        {"rows": 1, "context": 1024, "share": 0.861, "engine": {"ms": 4.0, "busy": {"share": 0.962}}},
        {"rows": 32, "context": 4096, "share": 0.9, "engine": None},
    ],
    "modelled_shares": [0.91, 0.95],
}
SWAP = {
    "results": [
        {"way": "frames", "direction": "out", "share": 0.88},
        {"way": "frames", "direction": "out", "share": 0.91},
        {"way": "host tier", "direction": "back", "share": 0.5},
    ],
    "beside": [{"way": "none", "slower": 0.0}, {"way": "frames", "slower": 0.02}, {"way": "host tier", "slower": 0.3}],
}
ATTENTION = {
    "results": {
        "bfloat16": [
            {"name": "decode", "context": 1024, "share": 0.93},
            {"name": "decode", "context": 16384, "share": 0.95},
            {"name": "decode", "context": 131072, "share": 0.98},
            {"name": "prefill", "context": 2048, "share": 0.61},
        ]
    }
}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, source in FAKES.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_one_that_fails_or_is_slow_leaves_the_others_their_time(fakes, monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu_report, "LEAST_S", 0.0)
    benchmarks = {"a": ["fails"], "b": ["is_slow"], "c": ["lacks"], "d": ["works", "--quick"]}
    begin = time.monotonic()
    found = gpu_report.run_benchmarks(benchmarks, 6.0, fakes)
    assert time.monotonic() - begin < 30
    assert [(name, outcome.status) for name, outcome in found.items()] == [
        ("a", "failed"), ("b", "stopped"), ("c", "skipped"), ("d", "done"),
    ]  # fmt: skip
    assert found["a"].why == "ValueError: illegal address"
    assert found["a"].printed == "half a table\n"
    assert "Traceback" in found["a"].errors
    assert found["b"].printed == "the first rows\n"
    assert re.fullmatch(r"it took more than \d s", found["b"].why)
    assert found["c"].why == "msgspec_that_nobody_has is not installed"
    assert found["d"].data == {"asked": ["--quick"]}
    assert "a: failed in" in capsys.readouterr().out


def test_what_no_time_is_left_for_is_not_run(fakes) -> None:
    found = gpu_report.run_benchmarks({"first": ["works"], "last": ["works"]}, 15.0, fakes)
    assert found["first"].status == "not run", "half of the time is too little"
    assert found["last"].status == "done"


def test_what_heeds_no_interrupt_is_killed(fakes, monkeypatch) -> None:
    monkeypatch.setattr(timed_command, "STOPPING_S", 0.2)
    outcome = run_command([sys.executable, "-m", "heeds_nothing"], 1.0)
    assert outcome.status == "stopped"
    assert outcome.seconds < 10


def test_every_format_is_measured_and_what_the_goals_need_comes_first() -> None:
    asked = [arguments[-1] for arguments in gpu_report.BENCHMARKS.values() if "--caches" in arguments]
    assert sorted(asked) == sorted(gpu_report.FORMATS)
    assert [*gpu_report.BENCHMARKS][:2] == ["decode", "attention"]
    assert not any("--quick" in gpu_report.BENCHMARKS[name] for name in ("decode", "attention"))


def test_both_halves_stand_on_one_page(tmp_path, fakes, monkeypatch, capsys) -> None:
    done = run_command([sys.executable, "-c", "print('| a table |')"], 20.0)
    failed = run_command([sys.executable, "-m", "fails"], 20.0)
    data = {"decode": DECODE, "attention": ATTENTION, "swap": SWAP}
    parts = {name: asdict(done) | {"data": found} for name, found in data.items()}
    gpu_report.put(tmp_path, "benchmarks", parts | {"weights": asdict(failed)})
    gpu_report.put(tmp_path, "tests", {"status": "failed", "why": "exit status 1", "seconds": 3.0, "passed": 2,
                                       "failed": 1, "skipped": 1, "failures": {"a::b": "it\nbroke"},
                                       "reasons": {"no GPU": 1}})  # fmt: skip
    text = (tmp_path / "report.md").read_text()
    assert f"| torch | {torch.__version__} |" in text
    assert f"| 1 | 1024 | {STEP_GOAL} | 91% | 86% | 96% |" in text
    assert f"| 32 | 4096 | {STEP_GOAL} | 95% | 90% | not measured |" in text
    assert f"| {MOVES['frames', 'out']} | {MOVE_GOAL} | 88% to 91% (2 cases) |" in text
    assert f"| {MOVES['host tier', 'back']} | {MOVE_GOAL} | 50% to 50% (1 cases) |" in text
    assert f"| {SLOWER} | {SLOWER_GOAL} | 2% to 2% (1 cases) |" in text
    assert "share of the speed of a copy | ≥ 90 % | 97 % | 93% to 95% (2 cases) |" in text
    assert "| decode, bf16, 128k | ≥ 90 % | 99.6 % | 98% to 98% (1 cases) |" in text
    assert "| decode, int4 cache, 1k to 16k | – | 90 % | not measured |" in text
    assert "2 passed, 1 failed, 1 skipped; failed (exit status 1) after 3 s." in text
    assert "- `a::b`: it broke" in text
    assert "- 1: no GPU" in text
    assert text.count("| a table |") == 3
    assert "failed after" in text
    assert "ValueError: illegal address" in text
    assert json.loads((tmp_path / "report.json").read_text())["benchmarks"]["decode"]["data"] == DECODE
    assert "wrote" in capsys.readouterr().out


def test_a_page_of_nothing_says_so() -> None:
    text = page({"machine": {"GPU": "none"}})
    assert text.count("Not run.") == 2
    assert "not measured" in text


def test_goals_are_those_of_the_docs() -> None:
    documented = (ROOT / "docs/performance-on-gpus.md").read_text()
    for goal in GOALS:
        assert f"| {goal.what} | {goal.goal} | {goal.modelled} |" in documented, goal.what
    assert f"| 1 | 1k | {STEP_GOAL} |" in documented
    for what, goal in [*((what, MOVE_GOAL) for what in MOVES.values()), (SLOWER, SLOWER_GOAL)]:
        assert f"| {what} | {goal} |" in documented, what
    assert f"The GPU is to be busy {BUSY_GOAL} of the time" in documented


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> list[str]:
    """Gives arguments of a run of pytest over a folder of a file that lacks something."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests'}:{ROOT}")
    (tmp_path / "test_lacks.py").write_text("import msgspec_that_nobody_has\n")
    (tmp_path / "report").mkdir()
    marks = "markers=gpu\nslow\nalone_on_gpu"
    return ["-p", "tests.conftest", "--rootdir", str(tmp_path), "-o", marks, str(tmp_path)]


def test_pytest_is_run_and_counted(tmp_path, checkout) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\n"
        "def test_well(): pass\ndef test_ill(): assert 1 == 2\ndef test_not(): pytest.skip('no GPU')\n"
    )
    status, found = gpu_report.run_tests([checkout], 60.0, tmp_path / "report")
    assert status == 1
    assert (found["passed"], found["failed"], found["status"]) == (1, 1, "failed")
    assert found["failures"] == {"test_some::test_ill": "assert 1 == 2"}
    assert sorted(found["reasons"]) == ["msgspec_that_nobody_has is not installed", "no GPU"]


def test_what_measures_the_whole_gpu_runs_alone_behind_the_others(tmp_path, checkout, monkeypatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(gpu_report, "WORKERS", 1)
    (tmp_path / "test_where.py").write_text(
        "import os, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_beside(): assert 'PYTEST_XDIST_WORKER' in os.environ\n"
        "@pytest.mark.alone_on_gpu\ndef test_alone(): assert 'PYTEST_XDIST_WORKER' not in os.environ\n"
    )
    runs = [[*arguments, *checkout] for arguments in gpu_report.on_gpus({})]
    status, found = gpu_report.run_tests(runs, 60.0, tmp_path / "report")
    assert (status, found["failures"]) == (0, {})
    assert (found["passed"], found["reasons"]) == (2, {"msgspec_that_nobody_has is not installed": 1})
    assert not [*(tmp_path / "report").iterdir()]


GOOD, NONE = Outcome("done", "", 20.0), Outcome("failed", "exit status 5", 20.0, exit_code=5)
BAD, LATE = Outcome("failed", "exit status 1", 20.0, exit_code=1), Outcome("stopped", "late", 40.0, exit_code=2)


@pytest.mark.parametrize(
    ("ended", "decides"),
    [
        ([GOOD, GOOD], GOOD), ([GOOD, NONE], GOOD), ([NONE, GOOD], GOOD), ([NONE, NONE], NONE), ([BAD, GOOD], BAD),
        ([GOOD, BAD], BAD), ([BAD, NONE], BAD), ([GOOD, LATE], LATE), ([LATE], LATE),
    ],
)  # fmt: skip
def test_runs_share_their_time_and_the_first_that_fails_decides(tmp_path, monkeypatch, ended, decides) -> None:
    given, left = [], iter(ended)
    monkeypatch.setattr(gpu_report, "run_command", lambda _, seconds, shown: given.append(seconds) or next(left))
    status, found = gpu_report.run_tests([["beside"], ["alone"]], 60.0, tmp_path)
    assert given == [60.0, 40.0][: len(ended)]
    assert status == decides.exit_code
    taken = sum(outcome.seconds for outcome in ended)
    assert found == {"status": decides.status, "why": decides.why, "seconds": taken}


def test_arguments_behind_two_dashes_are_pytests(tmp_path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(gpu_report, "run_tests", lambda runs, *_: seen.extend(runs) or (5, {}))
    monkeypatch.setattr(gpu_report, "put", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["", "tests", "--minutes", "3", "--folder", str(tmp_path), "--", "-k", "a or b"])
    with pytest.raises(SystemExit) as ended:
        gpu_report.main()
    assert ended.value.code == 5
    assert all(arguments[-2:] == ["-k", "a or b"] for arguments in seen)
    assert seen[0][0] == "tests/executor", "whole engines come first"


def test_on_a_gpu_each_process_has_a_core() -> None:
    environment: dict[str, str] = {}
    options = gpu_report.on_gpus(environment)[0]
    assert options[:2] == ["-k", gpu_report.COMPILED]
    assert int(options[-1]) >= 1
    command = [sys.executable, "-c", "import conftest, os; print(len(os.sched_getaffinity(0)))"]
    environment |= {**os.environ, "PYTEST_XDIST_WORKER": "gw5", "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == "1\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(tmp_path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_report", "benchmarks", "--folder", str(tmp_path / "none")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"error: torch finds no NVIDIA GPU on this machine, [^\n]+\n", done.stderr), done.stderr
    assert not (tmp_path / "none").exists()


def test_both_halves_fit_into_a_quarter_of_an_hour_and_pages_say_how_long_they_take() -> None:
    said = [
        (ROOT / name).read_text().count(text)
        for name, text in {
            "Makefile": f"MINUTES ?= {gpu_report.MINUTES:g}\n",
            "CONTRIBUTING.md": f"(`MINUTES={gpu_report.MINUTES:g}`)",
            "benchmarks/README.md": f"`--minutes` ({gpu_report.MINUTES:g})",
            "docs/performance-on-gpus.md": f"all this in {gpu_report.MINUTES:g} minutes",
            "benchmarks/gpu_report.py": f"[--minutes {gpu_report.MINUTES:g}] [--full]",
        }.items()
    ]
    assert said == [1] * len(said)
    assert 2 * gpu_report.MINUTES <= 12, "a machine takes minutes to start"


GPU_ONLY = re.compile(r"from interpreter import .*DEVICE|cuda\.is_available\(\)|from device_tier import")
ELSEWHERE = {
    "tests/attention/test_sdpa.py": "its operator is the CPU's; test_sdpa_operators.py has the GPU's",
    "tests/core/test_offloading.py": "its blocks lie in a tier on the GPU, beside an engine on the CPU",
    "tests/executor/test_gpu_executor.py": "it runs on a device of the CPU's tensors, and is left out on a GPU",
}


def test_every_file_that_asks_for_a_gpu_has_tests_that_are_marked() -> None:
    asking = [file for file in (ROOT / "tests").rglob("test_*.py") if GPU_ONLY.search(file.read_text())]
    assert len(asking) >= 14
    for file in asking:
        name = str(file.relative_to(ROOT))
        if name in ELSEWHERE or file == Path(__file__):
            continue
        assert "pytest.mark.gpu" in file.read_text(), f"{name} has no test that `make test-gpu` runs"
        assert file.parent.name in gpu_report.FOLDERS, f"`make test-gpu` does not look into {file.parent}"


def test_every_file_that_looks_at_the_gpus_free_memory_has_tests_that_run_alone() -> None:
    asking = [file for file in (ROOT / "tests").rglob("test_*.py") if "cuda.mem_get_info()" in file.read_text()]
    files = [file for file in asking if file != Path(__file__)]
    assert len(files) >= 2
    assert all("pytest.mark.alone_on_gpu" in file.read_text() for file in files), files
