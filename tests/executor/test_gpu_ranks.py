"""Ranks on devices: processes with checked devices, which exchange by gloo in the place of NCCL.

A sum over parts is rounded otherwise than one sum is, so numbers are nearly one rank's, and tokens in fp32 are its.
"""

from __future__ import annotations

import pytest
import rank_on_checked_device
from late import Late
from rank_on_checked_device import STATIC
from test_gpu_executor import SMALL, greedy, on_cpu, small_requests
from test_graphs import decoding

from core.drive import drive, request
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.executor import graphs, ranks
from pagemill.executor.load import open_executor

LAYERS, FRAME_BYTES = 2, 8192


@pytest.fixture(autouse=True)
def _checked_ranks(monkeypatch):
    monkeypatch.setattr(ranks, "MODULE", rank_on_checked_device.__name__)
    monkeypatch.setattr(graphs, "LEAST_CONTEXT", 32)
    monkeypatch.setattr(graphs, "WORTH_IT", 1)


def opened(small_model, device, size=2, **settings):
    config = EngineConfig(model=small_model, tensor_parallel_size=size, **SMALL | settings)
    return config, open_executor(config, backend=STATIC, device=device)


def on_one(small_model, requests):
    return on_cpu(EngineConfig(model=small_model, **SMALL), requests)


def check_collectives(counted, steps):
    """Two sums in a layer, one for the embedding, one gathering of logits, one handing out of tokens: no more."""
    sums = (2 * LAYERS + 1) * steps
    assert counted == {"allreduce_": sums, "_allgather_base_": steps, "broadcast_": steps}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_graphs_on_all_ranks_bring_the_tokens_of_one(small_model, device, size):
    """4 heads, 2 KV heads: with four ranks, two have the same. Every step samples."""
    config, executor = opened(small_model, device, size, kv_memory=8 * FRAME_BYTES * size // 2)
    device.collectives.clear()  # what made the connections
    late, requests = Late(config, executor, depth=2), decoding(3 if size == 2 else 2)
    late.add(requests)
    tokens = late.run()
    executor.close()
    assert not late.errors
    assert late.most == 2
    assert device.graphs
    check_collectives(device.collectives, device.collectives["broadcast_"])
    assert tokens == on_one(small_model, requests)


def test_an_engine_plans_ahead_of_all_ranks_and_blocks_come_and_go(small_model, device):
    """Forks, drawn tokens, rows that need the host, preemption by swap, another size of the pool."""
    config, executor = opened(small_model, device, kv_host_memory=60 * FRAME_BYTES, preemption_mode="swap")
    core, most = EngineCore(config, executor=executor), []
    requests = [request(f"long{i}", [5 + i, 9, 3], greedy(max_tokens=40)) for i in range(4)] + small_requests(2, 6)
    submit = executor.submit

    def counted(plan):
        handle = submit(plan)
        most.append(len(executor._flights))  # noqa: SLF001
        return handle

    executor.submit = counted
    run = drive(core, requests[:7])
    core.resize(7 * executor.facts.frame_bytes)
    run.tokens |= drive(core, requests[7:]).tokens
    stats = core.stats()
    core.close()
    assert max(most) == 2
    assert stats.preemptions > 0
    assert stats.blocks_loaded > 0
    assert run.tokens == on_one(small_model, requests)
