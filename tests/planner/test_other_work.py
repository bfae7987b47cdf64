"""Other work on the processors is seen, and what was measured beside it is told apart, and measured again."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from pagemill.config import EngineConfig
from pagemill.planner import calibration, real_engine
from pagemill.planner.calibration import Point, StepFile, measure
from pagemill.planner.other_work import OtherWork
from pagemill.planner.real_engine import RealEngine
from pagemill.simulate.device_fit import MeasuredStep
from pagemill.simulate.step_time import StepWork

STEP = MeasuredStep(StepWork(1, 1, 1, 30, 30), 0.01, 0.001)


def counts(busy, idle=0, cpu="cpu0"):
    return f"{cpu} {busy} 0 0 {idle} 0 0 0 0 0 0\n"


@pytest.fixture
def one_processor(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)


def test_other_work_is_what_the_processors_did_beside_this_process(one_processor, tmp_path):
    stat, tick = tmp_path / "stat", 1 / os.sysconf("SC_CLK_TCK")
    stat.write_text(counts(100))
    others = OtherWork(stat)
    begin = time.perf_counter()
    time.sleep(0.05)
    stat.write_text(counts(100, idle=5) + counts(99_999, cpu="cpu1"))  # which this process may not use
    assert others.look() == 0.0
    stat.write_text(counts(1_000_100))
    assert others.look() > 1_000_000 * tick / (time.perf_counter() - begin) - 1


def test_nothing_is_said_where_the_system_does_not_count(tmp_path):
    assert OtherWork(tmp_path / "none").look() is None


@pytest.mark.parametrize(("alone_in", "tries"), [({0}, 1), ({2}, 3), (set(), 3)])
def test_a_point_is_measured_again_until_nothing_else_ran(alone_in, tries, monkeypatch, tmp_path):
    made = []

    def steps(engine, point):
        made.append(point)
        return [replace(STEP, alone=len(made) - 2 in alone_in)] * 4

    monkeypatch.setattr(calibration, "_measure_point", steps)
    file = StepFile(tmp_path / "steps", {})
    measure(None, [Point(1, 32, 0)], file, lambda done: None)
    assert len(made) == 1 + tries  # the first warms up
    assert file.points[Point(1, 32, 0)] == [replace(STEP, alone=bool(alone_in))] * 4
    assert StepFile(tmp_path / "steps", {}).points == file.points


def test_steps_say_whether_something_else_ran(monkeypatch):
    shares = iter([0.0, 0.5])

    class Others:
        def look(self):
            return next(shares, 0.0)

    monkeypatch.setattr(real_engine, "OtherWork", Others)
    monkeypatch.setattr(real_engine, "LOOK_S", 0.0)
    engine = RealEngine(EngineConfig("smollm2-135m", dtype="bfloat16", kv_memory="128MiB", max_num_seqs=4))
    engine.add(engine.prompt(8), 3)
    for _ in range(3):
        engine.step()
    assert [step.alone for step in engine.steps] == [True, False, True]
    assert len(engine.disturbed) == 1
