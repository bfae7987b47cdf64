"""Decode steps as graphs: of which sizes, with which results, and what happens where they cannot be captured."""

from __future__ import annotations

import logging

import pytest
import torch
from checked_device import OrderError
from late import Late
from static_attention import StaticAttention
from test_gpu_executor import SEEDS, SMALL, check_against_host, greedy, on_cpu

from core.drive import request
from pagemill.config import EngineConfig
from pagemill.executor import graphs
from pagemill.executor.backend import torch_backend
from pagemill.executor.graphs import Graphs, Shape, batch_sizes, context_lengths
from pagemill.executor.load import open_executor
from pagemill.executor.staging import Place
from pagemill.models.rope import AngleTable
from pagemill.sampling.params import SamplingParams

STATIC = torch_backend(torch.device("cpu"))._replace(attention=StaticAttention())


@pytest.fixture(autouse=True)
def short_ladders(monkeypatch):
    monkeypatch.setattr(graphs, "LEAST_CONTEXT", 32)
    monkeypatch.setattr(graphs, "WORTH_IT", 1)


def decoding(count: int = 4):
    """Answers of different lengths, of which one is drawn: batches of all sizes."""
    params = [greedy(max_tokens=4 + 4 * i) for i in range(count - 1)]
    params.append(SamplingParams(temperature=0.9, seed=4, max_tokens=14, ignore_eos=True))
    return [request(f"r{i}", [5 + i, 9, 3], each) for i, each in enumerate(params)]


def run(small_model, device, requests, depth: int = 2, **settings):
    config = EngineConfig(model=small_model, **SMALL | settings)
    late = Late(config, open_executor(config, backend=STATIC, device=device), depth=depth)
    late.add(requests)
    tokens = late.run()
    late.executor.close()
    assert not late.errors
    return tokens


def test_rungs_of_the_ladders():
    assert batch_sizes(1) == [1]
    assert batch_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert batch_sizes(300)[-5:] == [248, 256, 272, 288, 300]
    assert context_lengths(32) == [32]
    assert context_lengths(160) == [32, 64, 128, 160]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_schedules_with_graphs_bring_the_tokens_of_the_host(small_model, device, seed):
    check_against_host(small_model, device, seed, STATIC)
    assert device.graphs


def test_graphs_of_several_sizes_bring_the_tokens_of_the_host(small_model, device):
    requests = decoding()
    config = EngineConfig(model=small_model, **SMALL)
    assert run(small_model, device, requests) == on_cpu(config, requests)
    assert len(device.graphs) > 2


def test_no_graph_is_captured_where_that_is_turned_off_or_attention_waits(small_model, device):
    run(small_model, device, decoding(), enforce_eager=True)
    assert not device.graphs


def test_a_device_that_cannot_capture_runs_steps_one_by_one_and_says_so_once(small_model, device, caplog):
    device.captures = False
    requests = decoding()
    expected = on_cpu(EngineConfig(model=small_model, **SMALL), requests)
    with caplog.at_level(logging.WARNING):
        assert run(small_model, device, requests) == expected
    assert [record.message for record in caplog.records if "without CUDA graphs" in record.message] == [
        "decode steps run without CUDA graphs, more slowly: CUDA error: operation not permitted when stream is "
        "capturing"
    ]


@pytest.mark.parametrize(("error", "again"), [(RuntimeError("no"), False), (torch.OutOfMemoryError("no"), True)])
def test_what_could_not_be_captured_is_tried_again_only_where_memory_was_missing(device, monkeypatch, error, again):
    def refuse(run):
        raise error

    monkeypatch.setattr(device, "capture", refuse)
    captured, shape = Graphs(device, lambda *_: torch.zeros(1), 1, 32), Shape(1, 1, 5, 1, False, False, False)
    for found in (True, again):
        wanted = [captured.padded(shape) for _ in range(2)]
        assert [each is not None for each in wanted] == [False, found]
        if found:
            captured.run(torch.zeros(8, dtype=torch.uint8), [Place(0, 8, torch.int64)], wanted[1])
        captured.clear()


def test_a_step_that_waits_cannot_be_captured(small_model, device, monkeypatch, caplog):
    attend = StaticAttention.attend

    def waiting(self, query, cache, batch, group, **options):
        batch.context_lens.tolist()
        return attend(self, query, cache, batch, group, **options)

    monkeypatch.setattr(StaticAttention, "attend", waiting)
    requests = decoding()
    expected = on_cpu(EngineConfig(model=small_model, **SMALL), requests)
    with caplog.at_level(logging.WARNING):
        assert run(small_model, device, requests) == expected
    assert "operation not permitted when stream is capturing (tolist)" in caplog.text
    assert not device.graphs


def test_graphs_end_where_their_memory_does(small_model, device):
    device.graph_bytes = 200 << 10
    requests = decoding()
    assert run(small_model, device, requests) == on_cpu(EngineConfig(model=small_model, **SMALL), requests)
    assert len(device.graphs) == 2


def test_memory_that_a_graph_uses_and_that_is_gone_is_found(small_model, device, monkeypatch):
    reach = AngleTable.reach

    def moving(table, positions):
        reach(table, positions)
        if device.graphs:
            table.cos = table.cos.clone()

    monkeypatch.setattr(AngleTable, "reach", moving)
    with pytest.raises(OrderError, match="a graph uses memory that is gone"):
        run(small_model, device, decoding())


def test_attention_is_told_the_rows_lengths_on_the_host_but_in_steps_for_graphs(small_model, device):
    told = []

    class Told(StaticAttention):
        def attend(self, query, cache, batch, group, **options):
            if batch.host is not None:
                assert batch.host.query.tolist() == batch.query_start.diff().tolist()
                assert batch.host.context.tolist() == batch.context_lens.tolist()
            told.append((batch.max_query_len > 1, batch.host is not None))
            return super().attend(query, cache, batch, group, **options)

    requests = [*decoding(), request("host", [7, 8, 9], greedy(max_tokens=3, logprobs=1))]
    config = EngineConfig(model=small_model, **SMALL)
    late = Late(config, open_executor(config, backend=STATIC._replace(attention=Told()), device=device), depth=2)
    late.add(requests)
    assert late.run() == on_cpu(config, requests)
    late.executor.close()
    assert {*told} == {(True, True), (False, True), (False, False)}
