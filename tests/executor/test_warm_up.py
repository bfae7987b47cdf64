"""What a device does before the first step: trial steps have kernels compiled, and decode steps are captured."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from late import Late
from static_attention import StaticAttention
from test_gpu_executor import SMALL, greedy, on_cpu
from test_graphs import decoding

from core.drive import drive, request
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.stats import ENGINE_METRICS
from pagemill.errors import DeviceLostError
from pagemill.executor import graphs
from pagemill.executor.backend import torch_backend
from pagemill.executor.graphs import FREE_SHARE, WAYS, batch_sizes
from pagemill.executor.interface import GraphFacts
from pagemill.executor.load import open_executor
from pagemill.executor.trial_steps import SHORT_CONTEXT, LargestStep, compiling_trials, widest_trial
from pagemill.sampling.params import SamplingParams

STATIC = torch_backend(torch.device("cpu"))._replace(attention=StaticAttention())
AHEAD = 2 * len(batch_sizes(SMALL["max_num_seqs"]))
"""Graphs that are captured before the first step: greedy ones, and drawn ones."""


@pytest.fixture(autouse=True)
def short_ladders(monkeypatch):
    monkeypatch.setattr(graphs, "LEAST_CONTEXT", 32)
    monkeypatch.setattr(graphs, "AHEAD_CONTEXT", 64)


def opened(small_model, device, **settings):
    config = EngineConfig(model=small_model, **SMALL | settings)
    return config, Late(config, open_executor(config, backend=STATIC, device=device), depth=2)


def captured(late) -> list[tuple[int, int, bool]]:
    """Returns rows, contexts and whether tokens are drawn, of all graphs in the order in which they were captured."""
    return [(one.tokens, one.longest_context, one.draws) for one in late.executor._steps._graphs._captured]  # noqa: SLF001


@pytest.mark.parametrize(("tokens", "longest"), [(1, 2), (24, 96), (8192, 131072), (2048, 100)])
def test_trial_steps_start_every_kernel(tokens, longest):
    largest = LargestStep(tokens, min(tokens, 64), min(tokens, 64))
    trials = compiling_trials(largest, longest, truncates=True)
    assert {(trial.draws, trial.truncates) for trial in trials} == {*WAYS}
    assert max(trial.query_lens.sum() for trial in trials) == tokens
    for trial in [*trials, widest_trial(largest, longest - 1, truncates=True)]:
        assert trial.query_lens.dtype == trial.context_lens.dtype == np.int32
        assert (trial.query_lens >= 1).all()
        assert (trial.query_lens <= trial.context_lens).all()
        assert trial.context_lens.max() < longest
        assert 1 <= trial.samples <= largest.samples
    contexts = [trial.context_lens.max() for trial in trials if len(trial.query_lens) == 1]
    assert min(contexts) <= SHORT_CONTEXT
    assert max(contexts) == longest - 1
    if longest > 300:
        sizes = [trial.query_lens.sum() for trial in trials]
        for first, last in ((2, 16), (17, 64), (65, 512), (513, 2048), (2049, tokens)):  # rows of a tile, or of experts
            assert any(first <= size <= last for size in sizes)


def test_the_usual_decode_steps_are_captured_before_the_first_step_the_largest_first(small_model, device, caplog):
    config, late = opened(small_model, device)
    device.nbytes, device.graph_bytes = 1 << 30, (3 << 20) // AHEAD
    with caplog.at_level(logging.INFO):
        done = late.executor.warm_up()
    sizes = batch_sizes(config.max_num_seqs)[::-1]
    assert captured(late) == [(size, 64, draws) for size in sizes for draws in (False, True)]
    assert late.executor.graphs() == GraphFacts(AHEAD, 3 << 20)
    compiling, compiled, told = [record.message for record in caplog.records]
    assert compiling.startswith("compiling the kernels of steps")
    assert compiled.startswith("kernels compiled in ")
    assert told.startswith(f"{AHEAD} decode steps captured as graphs in ")
    assert told.endswith(" s, 3 MiB")
    assert done == f"{compiled}, {told}"
    requests = decoding()
    late.add(requests)
    assert late.run() == on_cpu(config, requests)
    assert len(captured(late)) == AHEAD
    assert sum(graph.replays for graph in device.graphs) > AHEAD


def test_work_that_goes_on_tells_how_far_it_is(small_model, device, monkeypatch, caplog):
    monkeypatch.setattr("pagemill.executor.gpu_executor.TELL_S", -1.0)
    _, late = opened(small_model, device)
    with caplog.at_level(logging.INFO):
        late.executor.warm_up()
    assert "2 decode steps are captured; 4 rows come next" in caplog.text


@pytest.mark.parametrize("drafts", [False, True])
def test_none_is_captured_where_that_is_turned_off_or_no_step_runs_ahead(small_model, device, caplog, drafts):
    speculation = {"method": "draft_model", "model": small_model, "num_speculative_tokens": 2}
    setting = {"speculative_config": speculation, "kv_memory": 1 << 19} if drafts else {"enforce_eager": True}
    _, late = opened(small_model, device, **setting)
    with caplog.at_level(logging.INFO):
        late.executor.warm_up()
    assert not device.graphs
    assert late.executor.graphs() == GraphFacts(0, 0)
    assert "kernels compiled in" in caplog.text
    assert "captured" not in caplog.text


def test_capturing_ends_where_memory_does(small_model, device):
    _, late = opened(small_model, device)
    device.graph_bytes = int(FREE_SHARE * device.nbytes) // 2
    late.executor.warm_up()
    assert captured(late) == [(8, 64, False), (8, 64, True), (4, 64, False)]


def test_steps_of_more_rows_than_memory_allows_leave_theirs_to_those_of_fewer(small_model, device):
    _, late = opened(small_model, device)
    device.peak_nbytes = 2 * int(FREE_SHARE * device.nbytes)  # of eight rows
    late.executor.warm_up()
    assert {rows for rows, _, _ in captured(late)} == {1, 2, 4}


def test_a_device_that_cannot_capture_tries_once(small_model, device, caplog):
    _, late = opened(small_model, device)
    device.captures = False
    with caplog.at_level(logging.INFO):
        late.executor.warm_up()
    assert late.executor.graphs().number == 0
    assert caplog.text.count("without CUDA graphs") == 1
    assert "captured" not in caplog.text


def test_a_graph_that_does_more_does_for_a_step_until_its_own_pays(small_model, device, monkeypatch):
    """Contexts of 32 and less use the graph of 64; longer ones have none before the first step."""
    monkeypatch.setattr(graphs, "WORTH_IT", 1)
    monkeypatch.setattr(graphs, "WORTH_MORE", 12)
    config, late = opened(small_model, device)
    late.executor.warm_up()
    requests = [request("short", [5, 9, 3], greedy(max_tokens=12))]
    late.add(requests)
    tokens = late.run()
    assert len(captured(late)) == AHEAD
    more = [request("again", [5, 9, 3], greedy(max_tokens=12)), request("long", [7, 9] * 33, greedy(max_tokens=8))]
    for one in more:
        late.add([one])
        tokens = late.run()
    assert captured(late)[AHEAD:] == [(1, 32, False), (1, 96, False)]
    assert tokens == on_cpu(config, [*requests, *more])


def test_graphs_of_other_ways_to_sample_do_for_a_step():
    decoding = graphs._decoding  # noqa: SLF001
    ladder = graphs.Graphs(None, None, 8, 96)
    ladder._captured = {decoding(8, 64, True, True): None, decoding(8, 96, True, False): None}  # noqa: SLF001
    for (context, *way), expected in {
        (40, False, False): decoding(8, 64, True, True),
        (40, True, True): decoding(8, 64, True, True),
        (80, False, False): decoding(8, 96, True, False),
        (80, True, True): None,
    }.items():
        assert ladder.padded(graphs.Shape(7, 1, context, 7, False, *way)) == expected
    assert ladder.padded(graphs.Shape(2, 1, 40, 2, False, False, False)) is None


def test_graphs_that_gave_memory_up_come_back_as_their_steps_do(small_model, device, monkeypatch, caplog):
    monkeypatch.setattr(graphs, "WORTH_IT", 1)
    config = EngineConfig(model=small_model, **SMALL)
    core = EngineCore(config, executor=open_executor(config, backend=STATIC, device=device))
    forward = core.executor.decoder.forward

    def narrow(token_ids, *rest):
        if len(token_ids) > 6 and core.executor.graphs().number:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(token_ids, *rest)

    assert core.stats().graphs == AHEAD
    monkeypatch.setattr(core.executor.decoder, "forward", narrow)
    requests = decoding(3)
    run = drive(core, [*requests, request("long", [5, 9] * 5, greedy(max_tokens=4))])
    assert f"a step had too little memory: {AHEAD} decode steps give up their graphs" in caplog.text
    assert 0 < core.stats().graphs < AHEAD
    assert run.tokens == on_cpu(config, [*requests, request("long", [5, 9] * 5, greedy(max_tokens=4))])
    core.close()


def refused(late, monkeypatch, tokens: int, error: Exception) -> list[int]:
    """Refuses all steps of so many tokens. Returns a list that gets the tokens of all steps to come."""
    forward, seen = late.executor.decoder.forward, []

    def narrow(token_ids, *rest):
        seen.append(len(token_ids))
        if len(token_ids) == tokens:
            raise error
        return forward(token_ids, *rest)

    monkeypatch.setattr(late.executor.decoder, "forward", narrow)
    return seen


def test_a_start_without_memory_for_many_rows_goes_on(small_model, device, monkeypatch, caplog):
    _, late = opened(small_model, device)
    seen = refused(late, monkeypatch, 8, torch.OutOfMemoryError("CUDA out of memory"))
    late.executor.warm_up()
    assert "the warm-up leaves out decode steps of 8 rows: CUDA out of memory" in caplog.text
    assert captured(late) == [(size, 64, draws) for size in (4, 2, 1) for draws in (False, True)]
    tried = len(seen)
    shape = graphs._decoding(8, 64, False, False)  # noqa: SLF001
    assert [late.executor._steps.padded(shape) for _ in range(9)] == [None] * 9, "it is not tried again"  # noqa: SLF001
    assert len(seen) == tried
    late.executor._steps.clear()  # noqa: SLF001
    assert [late.executor._steps.padded(shape) for _ in range(9)][-1] == shape  # noqa: SLF001


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ValueError("out of resource: shared memory"),
    ],
    ids=["torch", "cublas", "triton"],
)
def test_a_trial_without_memory_is_told_and_the_engine_starts(small_model, device, monkeypatch, caplog, error):
    config, late = opened(small_model, device)
    chosen = []
    refused(late, monkeypatch, config.max_num_batched_tokens, error)
    monkeypatch.setattr(late.executor._steps, "_choose_as_from_host", lambda: chosen.append(1))  # noqa: SLF001
    late.executor.warm_up()
    assert "the warm-up leaves out trial steps of 24 tokens and more: " in caplog.text
    assert str(error) in caplog.text
    if isinstance(error, torch.OutOfMemoryError):
        assert "steps of 24 tokens, with 2 samples, have too little memory left" in caplog.text
    assert late.executor.graphs().number == AHEAD
    assert chosen


def test_trials_larger_than_one_without_memory_are_left_out(small_model, device, monkeypatch, caplog):
    _, late = opened(small_model, device)
    seen = refused(late, monkeypatch, 8, torch.OutOfMemoryError("CUDA out of memory"))
    late.executor.compile()
    assert max(seen) == 8
    assert "steps of 8 tokens, with 2 samples, have too little memory left" in caplog.text


def test_a_device_that_shows_no_rows_what_they_take_captures_nothing(small_model, device, monkeypatch):
    _, late = opened(small_model, device)
    monkeypatch.setattr(device, "peak", None)
    late.executor.warm_up()
    assert late.executor.graphs() == GraphFacts(0, 0)


def test_a_device_that_is_lost_ends_the_start(small_model, device, monkeypatch):
    _, late = opened(small_model, device)
    refused(late, monkeypatch, 8, RuntimeError("CUDA error: an illegal memory access was encountered"))
    device.broken = True
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        late.executor.warm_up()
    device.broken = False


def test_an_engine_warms_up_counts_its_graphs_and_keeps_them_when_its_pool_changes(small_model, device):
    config = EngineConfig(model=small_model, **SMALL)
    device.graph_bytes = 3 << 10
    core = EngineCore(config, executor=open_executor(config, backend=STATIC, device=device))
    core.resize(7 * core.executor.facts.frame_bytes)
    stats = core.stats()
    assert (stats.graphs, stats.graph_bytes) == (AHEAD, AHEAD * 3 << 10)
    assert f"{AHEAD} decode steps captured as graphs in" in core.ready.warm_up
    assert core.ready.description.endswith(f" blocks of 16 tokens in float32; {core.ready.warm_up}")
    shown = {metric.name: metric.samples(stats) for metric in ENGINE_METRICS if metric.name.startswith("cuda_graph")}
    assert {name: [*each] for name, each in shown.items()} == {
        "cuda_graphs": [({}, AHEAD)],
        "cuda_graph_bytes": [({}, AHEAD * 3 << 10)],
    }
    requests = decoding()
    replays = sum(graph.replays for graph in device.graphs)
    assert drive(core, requests).tokens == on_cpu(config, requests)
    assert len(device.graphs) == AHEAD
    assert sum(graph.replays for graph in device.graphs) > replays
    core.close()


def test_a_sample_that_nobody_asked_for_changes_no_row(small_model, device):
    """Steps of nobody's rows write where nobody reads."""
    config, late = opened(small_model, device)
    late.executor.warm_up()
    rows = late.executor._steps.rows  # noqa: SLF001
    assert not rows.tokens[:-1].any()
    assert (rows.tables == -1).all()
    requests = [request("r", [5, 9, 3], SamplingParams(temperature=0.9, seed=4, max_tokens=9, ignore_eos=True))]
    late.add(requests)
    assert late.run() == on_cpu(config, requests)


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize(
    "case",
    [
        "8-bit weights",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("llama", "float32", "int8 cache", "4-bit cache", "windows", "experts", "latents")
        ),
    ],
)
def test_no_kernel_is_compiled_while_requests_are_served(case):
    script = Path(__file__).with_name("kernels_of_serving.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(script.parents[1])
    run = subprocess.run([sys.executable, script, case], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
