"""The work of a step is counted as the attention does it, and costs are found again from steps that they made."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pagemill.errors import CalibrationError
from pagemill.kvcache.layer_groups import group_layers
from pagemill.memory.work import MemoryWork
from pagemill.scheduling.step_plan import StepPlan
from pagemill.simulate.step_time import COSTS, KVShape, StepTimes, StepWork, fit, work_of

SHAPE = KVShape((None, 4, None), 2, 64, 2)


def plan(starts, query_lens, sample_from=()):
    def ints(values):
        return np.array(values, dtype=np.int32)

    rows = ints(range(len(starts)))
    return StepPlan(
        step=1,
        work=MemoryWork.none(),
        rows=rows,
        starts=ints(starts),
        query_lens=ints(query_lens),
        generates=np.zeros(len(rows), dtype=np.bool_),
        sample_from=ints(sample_from),
        sample_to=ints([]),
        max_accepted=ints([]),
        branches=np.empty(0, np.bool_),
        prompt_logprobs=ints([]),
    )


@pytest.mark.parametrize("windows", [(None,), (4,), (None, 4, 4), (1, None)])
def test_work_is_what_attention_does(windows):
    draw = random.Random(len(windows))
    for _ in range(50):
        starts = [draw.randrange(12) for _ in range(3)]
        lens = [draw.randrange(1, 9) for _ in range(3)]
        pairs = keys = 0
        for start, length in zip(starts, lens, strict=True):
            for window in windows:
                seen = [range(max(0, p - window + 1) if window else 0, p + 1) for p in range(start, start + length)]
                pairs += sum(map(len, seen))
                keys += len(set().union(*seen))
        found = work_of(plan(starts, lens, sample_from=[0, 0, 2]), group_layers(windows))
        assert found == StepWork(3, sum(lens), 2, pairs, keys)


def random_works(count):
    draw = random.Random(3)
    works = []
    for _ in range(count):
        rows = draw.randint(1, 64)
        tokens = rows + draw.choice([0, draw.randint(1, 400)])
        keys = rows * draw.randint(1, 3000)
        works.append(StepWork(rows, tokens, draw.randint(0, rows), keys * draw.randint(1, 20), keys))
    return works


def test_costs_are_found_again():
    costs = dict(zip(COSTS, [2e-2, 1e-4, 2e-4, 5e-4, 0.0, 4e-4, 1e-4, 2e-8, 5e-8], strict=True))
    truth = StepTimes(costs, SHAPE, {})
    works = random_works(300)
    found = fit(works, [truth.seconds(work) for work in works])
    for name, cost in costs.items():
        assert found[name] == pytest.approx(cost, rel=1e-4, abs=1e-9), name


def test_costs_are_never_negative_and_no_other_ones_fit_better():
    works = random_works(200)
    draw = random.Random(4)
    seconds = [draw.uniform(0.5, 1.5) * (1e-2 + 1e-4 * work.tokens) for work in works]
    found = fit(works, seconds)
    assert min(found.values()) >= 0

    def error(costs):
        model = StepTimes(costs, SHAPE, {})
        return sum((model.seconds(work) / took - 1) ** 2 for work, took in zip(works, seconds, strict=True))

    best = error(found)
    for name in COSTS:
        for factor in (0.99, 1.01):
            assert error({**found, name: found[name] * factor}) >= best * (1 - 1e-9)


def test_saved_and_loaded(tmp_path):
    times = StepTimes(dict.fromkeys(COSTS, 0.5), SHAPE, {"cpu": "a CPU"})
    times.save(tmp_path / "times.json")
    assert StepTimes.load(tmp_path / "times.json") == times


def test_what_is_no_calibration_is_named(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    for name in ("broken.json", "absent.json"):
        with pytest.raises(CalibrationError, match=name):
            StepTimes.load(tmp_path / name)
    with pytest.raises(CalibrationError, match="3 steps"):
        fit(random_works(3), [1.0, 1.0, 1.0])
