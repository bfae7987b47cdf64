"""Executors side by side on the same plans, and steps that are planned while others run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drive import drive, request

from executor.late import Late
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.executor.backend import torch_backend
from pagemill.executor.interface import Executor, ExecutorMemory, GraphFacts, StepHandle
from pagemill.executor.load import open_executor
from pagemill.memory.work import MemoryWork
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.step_plan import StepPlan, StepResult

SETTINGS = {
    "model": "smollm2-135m",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 16,
    "kv_memory": "20MiB",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1)
FOUND = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
"""Without log probabilities of the prompt, for which it is computed anew."""
DRAWN = SamplingParams(temperature=1.0, top_k=20, n=3, seed=3, max_tokens=8, ignore_eos=True, logprobs=2)


class Pair:
    """Two executors as one. The second gets the plans of the first; `results` keeps what both have brought."""

    def __init__(self, first: Executor, second: Executor) -> None:
        self.first = first
        self.second = second
        self.results: list[tuple[StepResult, StepResult]] = []

    @property
    def facts(self):
        return self.first.facts

    @property
    def frames(self):
        return self.first.frames

    def memory(self) -> ExecutorMemory:
        return self.first.memory()

    def allocate(self, num_frames: int, streamed_frames: int = 0, streamed_folder: Path | None = None) -> int:
        self.second.allocate(num_frames, streamed_frames, streamed_folder)
        return self.first.allocate(num_frames, streamed_frames, streamed_folder)

    def warm_up(self) -> str:
        return self.first.warm_up() + self.second.warm_up()

    def graphs(self) -> GraphFacts:
        return self.first.graphs()

    def apply(self, plan: StepPlan) -> list[int]:
        assert self.second.apply(plan) == []
        return self.first.apply(plan)

    def submit(self, plan: StepPlan) -> StepHandle:
        return StepHandle(plan, (self.first.submit(plan), self.second.submit(plan)))

    def collect(self, handle: StepHandle) -> StepResult:
        first, second = handle.pending
        self.results.append((self.first.collect(first), self.second.collect(second)))
        return self.results[-1][0]

    def resize(self, num_frames: int) -> None:
        self.first.resize(num_frames)
        self.second.resize(num_frames)

    def take_loss(self) -> bool:
        return self.first.take_loss() | self.second.take_loss()

    def streamed_frames(self, plan: StepPlan):
        return self.first.streamed_frames(plan)

    def close(self) -> None:
        self.first.close()
        self.second.close()


def run_pair(prompts, second, *params, **settings) -> list[tuple[StepResult, StepResult]]:
    config = EngineConfig(**SETTINGS, **settings, check_invariants=True)
    pair = Pair(open_executor(config), second(config))
    core = EngineCore(config, executor=pair)
    requests = [request(f"r{i}", prompts[i], params[i % len(params)]) for i in range(6)]
    drive(core, requests)
    core.resize("10MiB")
    assert sum(drive(core, requests).cached.values()) > 0
    core.close()
    assert len(pair.results) > 10
    return pair.results


def on_torch(config):
    return open_executor(config, backend=torch_backend(torch.device("cpu")))


@pytest.mark.parametrize("second", [open_executor, on_torch])
def test_a_plan_without_rows_copies_frames_and_brings_nothing(make_engine, second):
    config = EngineConfig(**SETTINGS)
    pair = Pair(open_executor(config), second(config))
    pair.allocate(8)
    record = np.random.default_rng(0).integers(0, 256, pair.facts.frame_bytes, dtype=np.uint8)
    for one in (pair.first, pair.second):
        with one.frames.write([2], one.frames.mark()) as places:
            places[0][:] = record.reshape(places[0].shape)
    none, numbers = np.zeros(0, np.int32), np.array([2, 5], np.int32)
    work = replace(MemoryWork.none(), copy_source=numbers[:1], copy_target=numbers[1:])
    plan = StepPlan(1, work, none, none, none, none.astype(np.bool_), none, none, none, none.astype(np.bool_), none)
    assert pair.apply(plan) == []
    assert pair.collect(pair.submit(plan)) == StepResult()
    assert pair.results == [(StepResult(), StepResult())]
    for one in (pair.first, pair.second):
        assert (one.frames.read([5])[0] == record).all()
        assert all(len(frames) == 0 for frames in one.streamed_frames(plan))
    pair.close()


def test_two_executors_with_the_same_kernels_bring_the_same_bits(make_engine, prompts):
    for first, second in run_pair(prompts, open_executor, GREEDY, DRAWN):
        assert first == second


# An int8 element may be rounded the other way where the operators' sums differ in the last bit.
@pytest.mark.parametrize(
    ("kv_cache_dtype", "error"), [pytest.param("auto", 1e-3, marks=pytest.mark.slow), ("int8", 0.1)]
)
def test_kernels_and_torch_bring_the_same_most_likely_tokens(make_engine, prompts, kv_cache_dtype, error):
    for first, second in run_pair(prompts, on_torch, GREEDY, FOUND, kv_cache_dtype=kv_cache_dtype):
        assert first.tokens == second.tokens
        assert first.prompt_logprobs.keys() == second.prompt_logprobs.keys()
        for ours, theirs in zip(first.logprobs, second.logprobs, strict=True):
            assert ours[0].logprobs == pytest.approx(theirs[0].logprobs, abs=error)


@pytest.mark.parametrize("depth", [2, 3])
def test_steps_planned_while_others_run_bring_the_same_tokens(make_engine, prompts, depth):
    """Prompts in chunks, forks, and more sequences than the pool holds at once."""
    settings = SETTINGS | {"kv_memory": "12MiB"}
    requests = [request(f"r{i}", prompts[i], (GREEDY, DRAWN)[i % 2]) for i in range(6)]
    expected = drive(EngineCore(EngineConfig(**settings)), requests).tokens
    executor = open_executor(EngineConfig(**settings))
    late = Late(EngineConfig(**settings), executor, depth=depth)
    late.add(requests)
    assert late.run() == expected
    assert late.most == depth
    executor.close()
