"""GpuExecutor on a device that checks the order of everything, against LocalExecutor on the same operators."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from benchmarks.draft_pair import save_pair
from checked_device import OrderError
from late import Late
from static_attention import StaticAttention

from core.drive import drive, request
from eager_drafter import Eager
from interpreter import CAPABILITY, DEVICE
from pagemill.attention import sdpa_backend
from pagemill.attention.sdpa_operators import HeadShape, flash_of_cpu
from pagemill.attention.torch_backend import TorchAttention
from pagemill.attention.triton_backend import TritonAttention
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.errors import DeviceLostError, NonFiniteLogitsError
from pagemill.executor import staging
from pagemill.executor.backend import torch_backend
from pagemill.executor.load import open_executor
from pagemill.executor.staging import Ring, Slot, Streams
from pagemill.sampling.params import SamplingParams

BACKEND = torch_backend(torch.device("cpu"))
SMALL = {
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 8,
    "kv_memory": 8 * 8192,
    "target_tpot_ms": "off",  # else admission keeps room, and nobody is preempted
    "check_invariants": True,
}


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4, 6, 8, 9, 11))]
"""Of schedules in which sequences are preempted."""
MARK = 63
"""A token that only the prompt of one request has."""
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)


def greedy(**fields) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, **fields)


def small_requests(seed: int, count: int):
    """Prompts with common beginnings; some answers are drawn, some fork, some need the host."""
    draw = random.Random(seed)
    kinds = [
        *[{"temperature": 0.0}] * 6,
        {"temperature": 0.9, "seed": seed},
        {"temperature": 1.2, "seed": seed, "n": 3},
        {"temperature": 0.8, "seed": seed, "top_k": 5},
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    begin = [draw.randrange(3, 64) for _ in range(40)]
    made = []
    for index in range(count):
        prompt = begin[: draw.choice((0, 16, 35))] + [draw.randrange(3, 64) for _ in range(draw.randint(1, 30))]
        params = SamplingParams(max_tokens=draw.randint(1, 14), ignore_eos=True, **draw.choice(kinds))
        made.append(request(f"r{index}", prompt, params))
    return made


def on_cpu(config: EngineConfig, requests):
    core = EngineCore(config, executor=open_executor(config, backend=BACKEND))
    run = drive(core, requests)
    core.close()
    return run.tokens


def check_against_host(small_model, device, seed: int, backend) -> None:
    """Runs a random schedule of requests, late collections, preemptions and resizes, on an executor and on the host."""
    config = EngineConfig(model=small_model, **SMALL)
    requests = small_requests(seed, 10)
    late = Late(config, open_executor(config, backend=backend, device=device), seed)
    draw = random.Random(seed)
    late.add(requests[:4])
    left, sizes = requests[4:], [late.memory.num_frames, late.memory.num_frames - 2]
    while left:
        for _ in range(draw.randint(1, 9)):
            late.step()
        late.add([left.pop(0)])
        if draw.random() < 0.2:
            late.resize(sizes[0] if late.memory.num_frames == sizes[1] else sizes[1])
    tokens = late.run()
    late.executor.close()
    assert late.most > 1
    assert late.scheduler.preemptions > 0
    assert late.scheduler.prefix_hit_tokens > 0
    assert not late.errors
    assert tokens == on_cpu(config, requests)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_schedules_bring_the_tokens_of_the_host_and_break_no_order(small_model, device, seed):
    check_against_host(small_model, device, seed, BACKEND)


@pytest.mark.parametrize(("kv", "heads"), [("auto", 4), ("int4_mixed", 2)])
def test_drafts_that_branch_bring_the_tokens_of_the_host_and_break_no_order(device, tmp_path, kv, heads):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": heads}
    model, draft = save_pair(tmp_path, draft_layers=1, later=0.3, vocab_size=64, num_key_value_heads=2, **sizes)
    settings = SMALL | {"kv_memory": 1 << 19, "max_num_seqs": 16, "kv_cache_dtype": kv}
    plain = EngineConfig(model=str(model), **settings)
    drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    config = EngineConfig(model=str(model), **settings, speculative_config=drafts)
    core = EngineCore(config, executor=open_executor(config, backend=BACKEND, device=device))
    core.scheduler.drafter = Eager(branches=4)
    requests = [request(f"long{seed}", [5, 9, 3 + seed], greedy(max_tokens=80)) for seed in range(4)]
    requests += small_requests(5, 3)
    assert drive(core, requests, every=3).tokens == on_cpu(plain, requests)
    assert core.scheduler.drafter.branched > 2
    core.close()


@pytest.mark.skipif(DEVICE == "cuda", reason="Triton interprets kernels where there is no GPU")
def test_prompts_by_torchs_own_attention_bring_the_tokens_of_the_host(small_model, device, monkeypatch):
    attended, cut = [], sdpa_backend.cut
    monkeypatch.setattr(sdpa_backend, "cut", lambda *lengths: attended.append(lengths) or cut(*lengths))
    for name, value in (("LONG_QUERIES", 5), ("GRANULE", 8), ("MOST_KEYS", 32)):
        monkeypatch.setattr(sdpa_backend, name, value)
    heads = HeadShape(torch.float32, 4, 2, 16)
    attention = sdpa_backend.SdpaAttention(flash_of_cpu(torch.device("cpu")), heads, TorchAttention(), CAPABILITY)
    check_against_host(small_model, device, 0, BACKEND._replace(attention=attention))
    assert sum(before > 0 for _, before in attended) > 5


def run_broken(small_model, device, harm) -> None:
    """Runs answers of which several steps are in flight, on an executor that is harmed."""
    config = EngineConfig(model=small_model, **SMALL)
    late = Late(config, open_executor(config, backend=BACKEND, device=device), depth=3)
    late.add([request(f"r{i}", [5, 9, 3 + i], greedy(max_tokens=8)) for i in range(3)])
    late.step()
    harm(late.executor)
    late.run()


def test_a_wait_that_is_left_out_is_found(small_model, device, monkeypatch):
    def harm(executor):
        monkeypatch.setattr(device.compute, "wait_event", lambda event: None)

    with pytest.raises(OrderError, match="compute reads what stream 1 may not have written yet"):
        run_broken(small_model, device, harm)


def test_a_download_that_does_not_wait_is_found(small_model, device, monkeypatch):
    def harm(executor):
        monkeypatch.setattr(type(device.compute), "wait_event", waits_for_uploads_only)

    waits = type(device.compute).wait_event

    def waits_for_uploads_only(stream, event):
        if stream is device.compute:
            waits(stream, event)

    with pytest.raises(OrderError, match="stream 2 reads what compute may not have written yet"):
        run_broken(small_model, device, harm)


def test_a_buffer_that_is_used_again_too_early_is_found(small_model, device, monkeypatch):
    def harm(executor):
        slots = []
        take = Ring.take
        monkeypatch.setattr(Ring, "take", lambda ring: slots[0] if slots else slots.append(take(ring)) or slots[0])

    with pytest.raises(OrderError, match=r"memory of the host|may still use"):
        run_broken(small_model, device, harm)


def test_tokens_that_are_read_before_they_came_are_found(small_model, device, monkeypatch):
    def harm(executor):
        monkeypatch.setattr(device, "let_host_know", lambda clock: None)

    with pytest.raises((OrderError, ValueError, AssertionError)):
        run_broken(small_model, device, harm)


def test_an_engine_plans_ahead_of_it(small_model, device, monkeypatch):
    config = EngineConfig(model=small_model, **SMALL)
    requests, order = small_requests(5, 8), []
    executor = open_executor(config, backend=BACKEND, device=device)
    for name in ("submit", "collect"):
        call = getattr(executor, name)
        monkeypatch.setattr(executor, name, lambda what, name=name, call=call: order.append(name) or call(what))
    run = drive(EngineCore(config, executor=executor), requests, every=2)
    assert ("submit", "submit") in pairwise(order)
    assert run.tokens == on_cpu(config, requests)


@pytest.mark.parametrize("params", [greedy(max_tokens=6), SamplingParams(temperature=1.0, seed=3, max_tokens=6)])
def test_submit_waits_for_nothing(small_model, device, params):
    config = EngineConfig(model=small_model, **SMALL)
    backend = BACKEND._replace(attention=StaticAttention())
    late = Late(config, open_executor(config, backend=backend, device=device))
    late.add([request(f"r{i}", [5, 9, 3 + i], params) for i in range(3)])
    late.run()  # prompts, whose attention waits here
    prompts = device.waits
    late.add([request("again", [5], params)])
    late.run()
    assert device.waits == prompts


def test_a_token_that_comes_late_does_not_go_to_whoever_has_its_row_by_then(small_model, device):
    config = EngineConfig(model=small_model, **SMALL)
    late = Late(config, open_executor(config, backend=BACKEND, device=device))
    late.add([request("gone", [5, 9, 3], greedy(max_tokens=8))])
    plan = late.scheduler.schedule(0.0)
    late.executor.apply(plan)
    flight = late.executor.submit(plan)
    late.scheduler.abort("gone", 0.0)
    asked = request("next", [7] * 12, greedy(max_tokens=4, logprobs=1))  # which runs by the host's tokens
    late.add([asked])
    behind = late.scheduler.schedule(0.0)
    assert behind.rows == plan.rows
    late.executor.apply(behind)
    handle = late.executor.submit(behind)
    late.take(late.executor.collect(flight))
    late.take(late.executor.collect(handle))
    assert late.run()["next", 0] == on_cpu(config, [asked])["next", 0]


def test_rows_that_are_not_finite_fail_alone(small_model, device, monkeypatch):
    config = EngineConfig(model=small_model, **SMALL)
    executor = open_executor(config, backend=BACKEND, device=device)
    forward = executor.decoder.forward

    def poisoned(token_ids, *rest):
        hidden = forward(token_ids, *rest)
        return torch.where((token_ids == MARK).unsqueeze(-1), torch.nan, hidden)

    monkeypatch.setattr(executor.decoder, "forward", poisoned)
    late = Late(config, executor)
    good = [request("good", [5, 9, 3], greedy(max_tokens=5))]
    late.add([*good, request("bad", [5, 9, MARK], greedy(max_tokens=5))])
    tokens = late.run()
    assert [*late.errors] == ["bad"]
    assert isinstance(late.errors["bad"], NonFiniteLogitsError)
    assert tokens["good", 0] == on_cpu(config, good)["good", 0]


def test_a_step_without_memory_is_survived_and_what_stood_on_it_is_run_again(small_model, device, monkeypatch):
    config = EngineConfig(model=small_model, **SMALL)
    executor = open_executor(config, backend=BACKEND, device=device)
    core = EngineCore(config, executor=executor)
    forward, fails = executor.decoder.forward, [4]

    def narrow(token_ids, *rest):
        fails[0] -= 1
        if fails[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(token_ids, *rest)

    monkeypatch.setattr(executor.decoder, "forward", narrow)
    requests = [request(f"r{i}", [5, 9, 3 + i], p) for i, p in enumerate([greedy(max_tokens=8), DRAWN])]
    run = drive(core, requests)
    assert fails[0] < 0
    assert run.tokens == on_cpu(config, requests)


def test_a_slot_without_memory_to_grow_stays_as_it_was(device, monkeypatch):
    slot, arrays, empty = Slot(device, 8, Streams(device)), [np.arange(1 << 17, dtype=np.int32)], torch.empty

    def out_of_memory(*size, **kinds):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(staging.torch, "empty", out_of_memory)
        patch.setattr(device, "pinned", lambda nbytes: empty(nbytes, dtype=torch.uint8))
        with pytest.raises(torch.OutOfMemoryError):
            slot.stage(arrays)
    (place,) = slot.stage(arrays)
    there = slot.upload()
    device.synchronize()
    assert torch.equal(place.of(there), torch.from_numpy(arrays[0]))


def test_a_lost_device_is_a_dead_engine(small_model, device):
    config = EngineConfig(model=small_model, **SMALL)
    core = EngineCore(config, executor=open_executor(config, backend=BACKEND, device=device))
    core.add_request(request("r", [5, 9, 3], greedy(max_tokens=8)))
    core.step()
    device.broken = True
    with pytest.raises(DeviceLostError, match=r"cpu does no more work .*an illegal memory access.*has to start anew"):
        drive(core, [])
    device.broken = False


@pytest.mark.skipif(DEVICE == "cuda", reason="Triton interprets kernels where there is no GPU")
def test_attention_in_triton_runs_ahead(small_model, device):
    """The interpreter's kernels read and write memory unseen: of them only the tokens are checked."""
    config = EngineConfig(model=small_model, **SMALL)
    requests = [request(f"r{i}", [5 + i] * (1 + 7 * i), greedy(max_tokens=3)) for i in range(3)]
    backend = BACKEND._replace(attention=TritonAttention(CAPABILITY))
    late = Late(config, open_executor(config, backend=backend, device=device))
    late.add(requests)
    tokens = late.run()
    assert not late.errors
    assert tokens == on_cpu(config, requests)
