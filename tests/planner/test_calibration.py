"""A calibration finds the device that made its steps, goes on where it was cut off, and measures the real model."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from pagemill.config import EngineConfig
from pagemill.errors import CalibrationError
from pagemill.planner import calibration, real_engine
from pagemill.planner.calibration import MOST_TOKENS, OUTPUT_LEN, Point, StepFile, grid
from pagemill.simulate.device_fit import MeasuredStep, fit_device, fit_errors
from pagemill.simulate.roofline import Roofline, read_device, read_shape
from pagemill.simulate.step_time import StepWork

MODEL = read_shape("smollm2-135m")
TRUTH = replace(
    read_device("server-64"),
    bytes_per_s=40e9,
    flop_per_s={"bfloat16": 8e11},
    efficiency={"memory": 1.0, "kv": 0.6, "products": 1.0, "attention": 0.4, "link": 0.8, "peers": 0.8},
    overlap=2.5,
    step_s=3e-4,
    row_s=2e-5,
    new_row_s=4e-4,
)


def steps_of(device, noise=0.0, count=400):
    draw, roofline, steps = random.Random(1), Roofline(device, MODEL, "bfloat16"), []
    for _ in range(count):
        rows = draw.choice([1, 2, 4, 8, 16, 32, 64])
        prompt = draw.choice([0, 0, 16, 64, 192, 448])
        keys = MODEL.layers * rows * draw.choice([32, 128, 512, 2048])
        pairs, new_rows = keys + MODEL.layers * prompt**2 // 2, int(prompt > 0)
        work = StepWork(rows, rows + prompt, rows, pairs, keys + MODEL.layers * prompt, new_rows)
        own_s = device.step_s + device.row_s * rows + device.new_row_s * new_rows
        steps.append(MeasuredStep(work, roofline.seconds(work) * draw.lognormvariate(0.0, noise), own_s))
    return steps


def test_a_device_is_found_again_from_its_steps():
    found = fit_device(steps_of(TRUTH), read_device("server-64"), MODEL, "bfloat16")
    assert found.step_s == pytest.approx(TRUTH.step_s, rel=1e-3)
    assert found.row_s == pytest.approx(TRUTH.row_s, rel=1e-3)
    assert found.new_row_s == pytest.approx(TRUTH.new_row_s, rel=1e-3)
    assert found.bytes_per_s == pytest.approx(TRUTH.bytes_per_s, rel=0.02)
    assert found.flop_per_s["bfloat16"] == pytest.approx(TRUTH.flop_per_s["bfloat16"], rel=0.02)
    assert found.overlap == pytest.approx(TRUTH.overlap, rel=0.05)
    for name in ("kv", "attention"):
        assert found.efficiency[name] == pytest.approx(TRUTH.efficiency[name], rel=0.05)


def test_a_few_steps_in_which_something_else_ran_do_not_change_the_engines_own_costs():
    steps = steps_of(TRUTH)
    for index in range(0, len(steps), 10):
        steps[index] = replace(steps[index], own_s=20 * steps[index].own_s)
    found = fit_device(steps, read_device("server-64"), MODEL, "bfloat16")
    for name in ("step_s", "row_s", "new_row_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.02)


def test_sums_of_steps_are_right_where_times_scatter_to_one_side():
    steps = steps_of(TRUTH, noise=0.3, count=1500)
    found = fit_device(steps, read_device("server-64"), MODEL, "bfloat16")
    everything = fit_errors(steps, Roofline(found, MODEL, "bfloat16"))[-1]
    assert everything.tokens == "all"
    assert everything.steps == 1500
    assert abs(everything.total) < 0.03
    # Half of the steps are shorter than their mean, by the distribution's skew.
    assert 0.02 < everything.median < 0.08


def test_too_few_steps_are_refused():
    with pytest.raises(CalibrationError, match="3 steps cannot fix a device; measure 20 or more"):
        fit_device(steps_of(TRUTH)[:3], read_device("server-64"), MODEL, "bfloat16")


def test_the_grid_keeps_to_what_an_engine_can_do():
    points = grid(2, longest=800, most_rows=16, most_tokens=512)
    assert len(points) == 2 * len({point[:2] for point in points})
    assert [point[:2] for point in points[: len(points) // 2]] != [point[:2] for point in points[len(points) // 2 :]]
    assert max(point.rows for point in points) == 8
    assert max(point.context for point in points) == 512
    assert all(point.rows * point.context <= MOST_TOKENS and point.context + OUTPUT_LEN < 800 for point in points)


def test_a_calibration_goes_on_where_it_was_cut_off(tmp_path):
    path, settings = tmp_path / "steps", {"model": "m"}
    step = steps_of(TRUTH)[0]
    StepFile(path, settings).add(Point(1, 32, 0), [step])
    with path.open("a") as file:
        file.write('{"point": [2, 32, 0], "ste')
    assert StepFile(path, settings).points == {Point(1, 32, 0): [step]}
    StepFile(path, settings).add(Point(2, 32, 0), [step])
    assert StepFile(path, settings).points == {Point(1, 32, 0): [step], Point(2, 32, 0): [step]}
    assert StepFile(path, {"model": "another"}).points == {}
    assert StepFile(path, settings).points == {}, "it was begun anew"


class Noting:
    """Stands in for an engine: notes the prompts that come, by their lengths, and steps, as 0."""

    def __init__(self):
        self.noted, self.steps, self.row = [], [], ""
        config = SimpleNamespace(max_num_batched_tokens=512)
        self.core = SimpleNamespace(config=config, abort=lambda live: None, has_work=lambda: False)

    def prompt(self, length):
        return [1] * length

    def add(self, prompt, output_len):
        self.noted.append(len(prompt))
        name = str(len(self.noted))
        self.row = name if output_len > 1 else self.row
        return name

    def step(self):
        self.noted.append(0)
        self.steps.append(MeasuredStep(StepWork(1, 1, 1, 30, 30), 0.01, 0.001))
        return [(self.row, None)]


def test_prompts_come_between_steps_that_only_generate(tmp_path):
    engine = Noting()
    calibration.measure(engine, [Point(1, 32, 0)], StepFile(tmp_path / "steps", {}), lambda done: None)
    point = engine.noted[len(engine.noted) // 2 :]  # the first half warmed up
    at = [place for place, length in enumerate(point) if length]
    assert [point[place] for place in at] == [32, *(length for length in calibration.PROMPTS for _ in range(2))]
    assert min(np.diff(at)) > 2  # its own step, and others
    assert point.count(0) == 1 + calibration.DECODE_STEPS + 2 * len(calibration.PROMPTS)


def test_the_real_model_is_measured_and_what_was_kept_is_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(real_engine, "OtherWork", lambda: SimpleNamespace(look=lambda: 0.0))
    monkeypatch.setattr(calibration, "ROWS", (1, 4))
    monkeypatch.setattr(calibration, "CONTEXTS", (16, 64))
    monkeypatch.setattr(calibration, "PROMPTS", (16,))
    config = EngineConfig("smollm2-135m", dtype="bfloat16", kv_memory="128MiB", max_num_seqs=16)
    done = []
    found = calibration.calibrate(config, 1, tmp_path / "steps", progress=lambda *at: done.append(at))
    assert done == [(number, 4) for number in range(5)]
    assert len(found.steps) > 4 * calibration.DECODE_STEPS
    assert {step.work.rows for step in found.steps} >= {1, 4}
    assert {step.work.new_rows for step in found.steps} >= {0, 1}
    assert all(0 < step.own_s < step.seconds for step in found.steps)
    assert abs(found.errors[-1].total) < 0.2
    again = []
    kept = calibration.calibrate(config, 1, tmp_path / "steps", progress=lambda *at: again.append(at))
    assert again == [(4, 4)]
    assert kept.steps == found.steps
    found.save(tmp_path / "here.json", "here")
    assert read_device(str(tmp_path / "here.json")) == found.device
    assert "fitted to" in json.loads((tmp_path / "here.json").read_text())["here"]["sources"]["bytes_per_s"]
    with pytest.raises(CalibrationError, match=r"max_num_seqs is 2, .* leaves 2 points to measure"):
        calibration.calibrate(replace(config, max_num_seqs=2), 1, tmp_path / "few")
