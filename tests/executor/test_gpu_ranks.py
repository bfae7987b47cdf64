"""Ranks on devices: processes with checked devices, which exchange by gloo in the place of NCCL.

A sum over parts is rounded otherwise than one sum is, so numbers are nearly one rank's, and tokens in fp32 are its.
"""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import psutil
import pytest
import rank_on_checked_device
import torch
from checked_device import OrderError
from late import Late
from rank_on_checked_device import STATIC
from test_gpu_executor import SMALL, greedy, on_cpu, small_requests
from test_graphs import decoding

from core.drive import drive, ranks_of, request
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.errors import ConfigError, RankLostError
from pagemill.executor import graphs, process_group, rank, ranks
from pagemill.executor.load import open_executor
from pagemill.executor.process_group import GroupExchange, host_meeting
from pagemill.executor.rank_devices import check_alike
from pagemill.executor.trial_steps import FEW_TOKENS
from waiting import wait_until

LAYERS, FRAME_BYTES = 2, 8192


@pytest.fixture(autouse=True)
def _checked_ranks(monkeypatch):
    monkeypatch.setattr(ranks, "MODULE", rank_on_checked_device.__name__)
    monkeypatch.setattr(graphs, "LEAST_CONTEXT", 32)
    monkeypatch.setattr(graphs, "WORTH_IT", 1)


def opened(small_model, device, size=2, **settings):
    config = EngineConfig(model=small_model, tensor_parallel_size=size, **SMALL | settings)
    return config, open_executor(config, backend=STATIC, device=device)


def begun(small_model, device):
    """Returns an engine of two ranks in the middle of two requests, and the process of rank 1."""
    config, executor = opened(small_model, device)
    core, (pid,) = EngineCore(config, executor=executor), (rank.pid for rank in ranks_of(os.getpid()))
    for each in decoding(2):
        core.add_request(each)
    for _ in range(3):
        core.step()
    return core, pid


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
    late, requests = Late(config, executor, depth=2), decoding(3 if size == 2 else 2)
    executor.warm_up()
    assert executor.graphs().number == len(device.graphs) == 2 * len(graphs.batch_sizes(config.max_num_seqs))
    device.collectives.clear()  # what made the connections, and the warm-up's
    late.add(requests)
    tokens = late.run()
    executor.close()
    assert not late.errors
    assert late.most == 2
    assert sum(graph.replays for graph in device.graphs) > len(device.graphs)
    check_collectives(device.collectives, device.collectives["broadcast_"])
    assert tokens == on_one(small_model, requests)


@pytest.mark.parametrize(
    ("kv_memory", "most"), [(8 * FRAME_BYTES, FEW_TOKENS), (None, SMALL["max_num_batched_tokens"])]
)
def test_ranks_compile_by_steps_that_are_sure_to_have_memory(small_model, device, monkeypatch, kv_memory, most):
    """None goes on alone where another cannot."""
    _, executor = opened(small_model, device, kv_memory=kv_memory)
    forward, seen = executor.decoder.forward, []
    monkeypatch.setattr(executor.decoder, "forward", lambda ids, *rest: seen.append(len(ids)) or forward(ids, *rest))
    executor.compile()
    executor.close()
    assert max(seen) == most


def test_an_engine_plans_ahead_of_all_ranks_and_blocks_come_and_go(small_model, device, monkeypatch):
    """Forks, drawn tokens, rows that need the host, preemption by swap, another size of the pool. One rank cannot
    capture graphs: none has any."""
    monkeypatch.setenv(rank_on_checked_device.CANNOT_CAPTURE, "1")
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
    assert len(device.graphs) == 1  # which was captured, and never launched
    assert device.graphs[0].replays == 0


@pytest.mark.parametrize("signal_", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_in_a_step_ends_all(small_model, device, monkeypatch, signal_):
    """Rank 0 waits for it on the device, and hears of it all the same."""
    core, pid = begun(small_model, device)
    os.kill(pid, signal.SIGSTOP)
    if signal_ == signal.SIGKILL:
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        words = "rank 1 of 2 was killed by SIGKILL"
    else:
        monkeypatch.setattr(ranks, "TIMEOUT_S", 0.5)
        words = "rank 1 of 2 is stopped .* did not come for 0.5 s"
    with pytest.raises(RankLostError, match=words):
        drive(core, [])
    with pytest.raises(RankLostError, match=words):  # and so it stays
        core.resize(7 * core.executor.facts.frame_bytes)
    wait_until(lambda: not psutil.pid_exists(pid), "rank 1 lives on")
    core.close()


def test_a_rank_whose_device_fails_between_steps_ends_at_once(small_model, device):
    """Rank 0 has nothing to say to it, and would wait for it in the next collective."""
    core, pid = begun(small_model, device)
    os.kill(pid, signal.SIGUSR1)
    rank_1 = psutil.Process(pid)
    wait_until(lambda: rank_1.status() == psutil.STATUS_ZOMBIE, "rank 1 waits for rank 0")
    with pytest.raises(RankLostError, match="rank 1 of 2 ended"):
        drive(core, [])
    core.close()


def test_frames_are_asked_for_behind_the_steps_that_write_them():
    ours, theirs = Pipe()
    told, served = rank.Told(theirs), threading.Event()
    for message in ("step", "edit", "step"):
        ours.send(message)
    thread = threading.Thread(target=lambda: told.wait_until_done(2) or served.set())
    thread.start()
    for served_already in (False, False, True):
        assert not served.wait(0.05)
        told.next()
        assert served.wait(5 if served_already else 0.05) == served_already
    thread.join()


def test_a_collective_of_another_stream_is_found(device):
    """It is work of the stream in use, as kernels are, and has to come behind what it adds up."""
    exchange = GroupExchange(0, 1)
    exchange.connect(host_meeting())
    part, beside = torch.ones(3), device.stream()
    with device.use(beside), pytest.raises(OrderError, match="stream 1 reads what compute may not have written yet"):
        exchange.all_reduce(part)
    beside.wait_event(device.compute.record_event())
    with device.use(beside):
        total = exchange.all_reduce(part)
    with pytest.raises(OrderError, match="compute reads what stream 1 may not have written yet"):
        total + 1


def test_the_end_of_a_group_that_waits_for_graphs_is_begun_once_and_not_waited_for(monkeypatch):
    """NCCL's returns when all graphs that hold its collectives are gone, which may be those of who calls it."""
    monkeypatch.setattr(process_group, "ABORT_S", 0.01)
    gone, begun = threading.Event(), []
    exchange = GroupExchange(0, 1)
    exchange.abort()  # nothing has begun
    exchange.connect(host_meeting())
    monkeypatch.setattr(exchange, "_backend", SimpleNamespace(abort=lambda: (begun.append(1), gone.wait())))
    exchange.abort()
    exchange.abort()
    gone.set()
    exchange._aborting.join()  # noqa: SLF001
    assert begun == [1]


@pytest.mark.parametrize(
    ("device_name", "gpus", "words"),
    [
        ("cuda", 2, "tensor_parallel_size is 4, but there are 2 GPUs .*CUDA_VISIBLE_DEVICES"),
        ("auto", 1, "tensor_parallel_size is 4, but there is 1 GPU .* or use device 'cpu'"),
        ("cuda:1", 8, "device is 'cuda:1', but with tensor_parallel_size 4 rank r takes GPU r"),
    ],
)
def test_gpus_that_are_not_there_are_refused(small_model, monkeypatch, device_name, gpus, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=words):
        open_executor(EngineConfig(small_model, tensor_parallel_size=4, device=device_name, **SMALL))


def test_ranks_that_attend_differently_are_refused():
    check_alike(["triton", "triton"])
    with pytest.raises(ConfigError, match="triton, flash_attn; name one"):
        check_alike(["triton", "flash_attn"])
