"""Contexts longer than a GPU's pool, on a device that checks the order: tokens are those of a pool that holds all."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import rank_on_checked_device
import torch
from checked_device import CheckedEvent, CheckedStream, OrderError
from divided_memory import divides_slots
from late import Late
from static_attention import StaticAttention
from test_gpu_executor import BACKEND, greedy, on_cpu

from core.drive import drive, request
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.errors import KVMemoryError
from pagemill.executor import ranks
from pagemill.executor.load import open_executor
from pagemill.kvcache.layer_groups import LayerGroup, LayerGroups
from pagemill.kvcache.layers_ahead import LayersAhead
from pagemill.kvcache.streaming_gpu_frames import Parts, StreamingGpuFrames
from pagemill.memory.block_table import Footprint
from pagemill.sampling.params import SamplingParams

LAYERS, FRAME_BYTES = 5, 5 * 4096
POOL, STREAMED = 7, 9
"""Frames that 12 frames' memory leaves: 9 that stream take 4.6 of it, and there is room for one place more of each."""
LONG = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "kv_memory": 12 * FRAME_BYTES,
    "kv_host_memory": STREAMED * FRAME_BYTES,
    "target_tpot_ms": "off",  # else admission keeps room, and nobody is preempted
    "check_invariants": True,
}


@pytest.fixture(autouse=True)
def _slots_are_checked(device, monkeypatch):
    monkeypatch.setattr(StreamingGpuFrames, "__init__", divides_slots(device, StreamingGpuFrames.__init__))


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory):
    from models.small_llama import save_llama

    folder = tmp_path_factory.mktemp("deep")
    return str(save_llama(folder, num_hidden_layers=LAYERS, max_position_embeddings=256))


def opened(deep_model, device, backend=BACKEND, seed=0, depth=3, **settings):
    """Returns an engine that is driven late."""
    config = EngineConfig(model=deep_model, **LONG | settings)
    return Late(config, open_executor(config, backend=backend, device=device), seed, depth)


def expected(deep_model, requests):
    """Returns the tokens of a pool that holds all."""
    config = EngineConfig(model=deep_model, **LONG | {"kv_memory": 64 * FRAME_BYTES, "kv_host_memory": None})
    return on_cpu(config, list(requests))


def long_requests(seed: int) -> tuple:
    """Prompts with common beginnings, of which each is most of the pool; some fork, some need the host."""
    draw = random.Random(seed)
    kinds = [
        *[{"temperature": 0.0}] * 3,
        {"temperature": 0.9, "seed": seed},
        {"temperature": 1.2, "seed": seed, "n": 2},
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    ]
    begin = [draw.randrange(3, 64) for _ in range(150)]
    made = []
    for index in range(10):
        prompt = begin[: draw.choice((0, 16, 120))] + [draw.randrange(3, 64) for _ in range(draw.randint(1, 90))]
        params = SamplingParams(max_tokens=draw.randint(1, 30), ignore_eos=True, **draw.choice(kinds))
        made.append(request(f"r{index}", prompt, params))
    return tuple(made)


ALONE = (request("long", [3 + at * at % 61 for at in range(215)], greedy(max_tokens=30)),)
"""One request that has 16 blocks in the end, of which 7 fit in the pool."""


@cache
def alone(deep_model):
    """Returns its tokens in a pool that holds all."""
    return expected(deep_model, ALONE)


@pytest.mark.parametrize("seed", [9, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 5, 7))])
def test_random_schedules_bring_the_tokens_of_a_pool_that_holds_all(deep_model, device, seed) -> None:
    """Late collections, preemptions, prefix hits, forks and resizes, beside rows that stream."""
    late, requests, draw = opened(deep_model, device, seed=seed), long_requests(seed), random.Random(seed)
    assert (late.memory.num_frames, late.memory.streamed.count) == (POOL, STREAMED)
    most, left = 0, [*requests]
    while left or late.scheduler.has_work():
        if left and draw.random() < 0.3:
            late.add([left.pop(0)])
        for _ in range(draw.randint(1, 9)):
            late.step()
            most = max(most, late.memory.streamed.active)
        if draw.random() < 0.1:
            late.resize(POOL - (late.memory.num_frames == POOL))
    tokens = late.run()
    late.executor.close()
    assert not late.errors
    assert most > 0
    assert late.scheduler.preemptions > 0
    assert late.scheduler.prefix_hit_tokens > 0
    assert tokens == expected(deep_model, requests)


def test_a_context_of_twice_the_pool_and_what_is_left_of_it_afterwards(deep_model, device) -> None:
    late = opened(deep_model, device)
    late.add(ALONE)
    assert late.run() == alone(deep_model)
    hits = late.scheduler.prefix_hit_tokens
    (first,) = ALONE
    again = request("again", [*first.prompt_token_ids, 5], greedy(max_tokens=3))
    late.add([again])
    tokens = late.run()
    assert late.scheduler.prefix_hit_tokens >= hits + 200, "what streams is cached where it lies"
    assert tokens["again", 0] == expected(deep_model, (again,))["again", 0]


def test_blocks_come_back_when_the_pool_has_room(deep_model, device) -> None:
    late, moved = opened(deep_model, device, depth=1), set()  # nothing moves under a step in flight
    apply = late.executor.apply

    def watched(plan):
        work = plan.work
        moved.update(zip(work.copy_source >= POOL, work.copy_target >= POOL, strict=True))
        return apply(plan)

    late.executor.apply = watched
    requests = (
        request("short", [7] * 30, greedy(max_tokens=30)),
        request("grows", [3 + at % 61 for at in range(48)], greedy(max_tokens=64)),
    )
    late.add(requests)
    tokens = late.run()
    assert not late.errors
    assert tokens == expected(deep_model, requests)
    assert {(False, True), (True, False)} <= moved


def test_steps_that_stream_wait_for_nothing_and_are_no_graphs(deep_model, device, monkeypatch) -> None:
    from pagemill.executor import graphs

    monkeypatch.setattr(graphs, "WORTH_IT", 0)
    late = opened(deep_model, device, BACKEND._replace(attention=StaticAttention()))
    late.add(ALONE)
    while not late.tokens["long", 0]:
        late.step()
    told, copied = [], late.executor.apply
    waits = device.waits
    monkeypatch.setattr(late.executor, "apply", lambda plan: told.append(len(plan.work.copy_source)) or copied(plan))
    tokens, waited = late.run(), device.waits - waits
    assert len(told) > 20
    assert waited == 0
    assert not device.graphs
    assert tokens == alone(deep_model)


def run_broken(deep_model, device, harm) -> dict:
    late = opened(deep_model, device)
    harm(late.executor.pool.frames)
    late.add(ALONE)
    return late.run()


def test_a_layer_that_does_not_wait_for_its_part_is_found(deep_model, device, monkeypatch) -> None:
    bring = StreamingGpuFrames.bring

    def harm(frames):
        def unawaited(self, place, runs):
            before = device.compute.record_event()
            bring(self, place, runs)
            return before

        monkeypatch.setattr(StreamingGpuFrames, "bring", unawaited)

    with pytest.raises(OrderError, match=r"compute reads what stream \d may not have written yet"):
        run_broken(deep_model, device, harm)


def test_a_slot_that_is_used_again_too_early_is_found(deep_model, device, monkeypatch) -> None:
    bring, waits = StreamingGpuFrames.bring, CheckedStream.wait_event

    def harm(frames):
        def at_once(self, place, runs):
            monkeypatch.setattr(CheckedStream, "wait_event", lambda stream, event: None)
            event = bring(self, place, runs)
            monkeypatch.setattr(CheckedStream, "wait_event", waits)
            return event

        monkeypatch.setattr(StreamingGpuFrames, "bring", at_once)

    with pytest.raises(OrderError, match=r"stream \d writes what compute may still use"):
        run_broken(deep_model, device, harm)


def test_a_part_of_another_layer_is_found(deep_model, device, monkeypatch) -> None:
    copy = device.copy

    def harm(frames):
        memory = frames._memory  # noqa: SLF001

        def other(source, target):
            inside = source.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
            if inside and source.storage_offset() + memory.shape[1] + len(source) <= memory.numel():
                source = torch.as_strided(source, source.shape, (1,), source.storage_offset() + memory.shape[1])
            copy(source, target)

        monkeypatch.setattr(device, "copy", other)

    assert run_broken(deep_model, device, harm) != alone(deep_model)


def test_blocks_that_nobody_waits_for_on_their_way_out_are_found(deep_model, device, monkeypatch) -> None:
    put_out = StreamingGpuFrames._put_out  # noqa: SLF001
    waits = CheckedEvent.synchronize

    def harm(frames):
        def at_once(self, source, target):
            monkeypatch.setattr(CheckedEvent, "synchronize", lambda event: None)
            put_out(self, source, target)
            monkeypatch.setattr(CheckedEvent, "synchronize", waits)

        monkeypatch.setattr(StreamingGpuFrames, "_put_out", at_once)

    with pytest.raises(OrderError, match=r"memory of the host|may still use it"):
        run_broken(deep_model, device, harm)


PLACES, PART = 3, 8


@pytest.fixture
def frames(device):
    return StreamingGpuFrames(6, PLACES * PART + 8, device, 5, Parts(PLACES, PART))


@pytest.fixture
def two_groups():
    """Layers 2 and 3, side by side in the model, lie in places 2 and 0, which share slots."""
    return LayerGroups((LayerGroup(None, (0, 1, 2)), LayerGroup(None, (3, 4, 5))), PLACES)


def slots(frames, place: int, count: int) -> torch.Tensor:
    """Returns a place's slots, as attention reads them."""
    return torch.as_strided(frames.bytes, (count, PART), (2 * PART, 1), frames.bytes.numel() + place * PART)


def attend(frames, ahead, groups, of_groups) -> None:
    """Reads as a step does, and checks what it finds."""
    begin = ahead.step([np.array(each, np.int32) for each in of_groups])
    for layer in range(groups.num_layers):
        begin(layer)
        group, place = groups.place(layer)
        wanted = of_groups[group]
        if wanted:
            found = slots(frames, place, 5)[torch.tensor(wanted)]
            assert (found.numpy() == frames._outside[place, wanted]).all()  # noqa: SLF001


def test_layers_whose_places_share_slots_are_brought_one_after_the_other(device, frames, two_groups) -> None:
    fill(frames, range(6, 11))
    ahead = LayersAhead(frames, two_groups, device)
    for _ in range(2):
        attend(frames, ahead, two_groups, [[0, 2], [1, 3, 4]])
    attend(frames, ahead, two_groups, [[], [1, 3, 4]])


def test_layers_that_share_slots_and_are_brought_at_once_are_found(device, frames, two_groups, monkeypatch) -> None:
    fill(frames, range(6, 11))
    monkeypatch.setattr(LayersAhead, "_share", lambda *layers: False)
    monkeypatch.setattr(device, "wait_for", lambda tensor, why: None)  # by which the host would order all
    with pytest.raises(OrderError, match=r"reads what stream \d may not|may still use"):
        attend(frames, LayersAhead(frames, two_groups, device), two_groups, [[0, 2], [1, 3, 4]])


def fill(frames, numbers) -> None:
    with frames.write([*numbers], frames.mark()) as places:
        for number, place in zip(numbers, places, strict=True):
            place[:] = np.random.default_rng(number).integers(0, 256, place.shape, np.uint8)


@pytest.mark.parametrize("seed", range(4))
def test_random_copies_reads_and_writes_keep_contents(device, frames, seed) -> None:
    draw, known = np.random.default_rng(seed), {}
    for step in range(40):
        match int(draw.integers(3)):
            case 0:
                picked = draw.permutation(11)[:3].tolist()
                records = draw.integers(0, 256, (3, PLACES * PART + 8), np.uint8)
                with frames.write(picked, frames.mark()) as places:
                    for place, record in zip(places, records, strict=True):
                        place[:] = record
                known.update(zip(picked, records, strict=True))
            case 1 if len(known) > 3:
                source, target = draw.choice([*known], 6).tolist(), draw.integers(0, 11, 6).tolist()
                assert frames.copy(source, target) == []
                for here, there in zip(source, target, strict=True):
                    known[there] = known[here]
            case _ if known:
                picked = draw.permutation([*known])[:4].tolist()
                reading = frames.begin_read(picked)
                reading.wait()
                wanted = np.stack([known[frame] for frame in picked])
                # What lies behind the last place of a frame is not kept outside.
                assert (reading.records[:, : PLACES * PART] == wanted[:, : PLACES * PART]).all(), step
                assert reading.whole == [True] * len(picked)
    with pytest.raises(IndexError, match=r"not all in 0 \.\. 10"):
        frames.copy([11], [0])


def test_what_cannot_stream_is_refused_and_says_the_way_out(deep_model, device, monkeypatch, tmp_path) -> None:
    for settings in (
        {"kv_host_memory": (STREAMED - 1) * FRAME_BYTES},
        {"kv_host_memory": None, "kv_disk_memory": "1GiB", "kv_disk_path": str(tmp_path)},
    ):
        with pytest.raises(KVMemoryError, match=r"needs 16 .*max_model_len=256; .*give kv_host_memory what is missing"):
            opened(deep_model, device, **settings)

    drafts = {"method": "draft_model", "model": deep_model, "num_speculative_tokens": 2}
    with pytest.raises(KVMemoryError, match=r"; raise kv_memory, or lower max_model_len"):
        opened(deep_model, device, speculative_config=drafts, kv_memory=6 * FRAME_BYTES)

    def refuse(nbytes):
        raise KVMemoryError(f"{nbytes} bytes of host memory cannot be pinned")

    monkeypatch.setattr(device, "pinned_whole", refuse)
    with pytest.raises(KVMemoryError, match=f"{STREAMED * FRAME_BYTES} bytes of host memory cannot be pinned"):
        opened(deep_model, device)


def test_an_engine_streams_to_its_device(deep_model, device) -> None:
    config = EngineConfig(model=deep_model, **LONG)
    core = EngineCore(config, executor=open_executor(config, backend=BACKEND, device=device))
    run = drive(core, list(ALONE))
    assert run.tokens == alone(deep_model)
    assert run.last["long", 0].kv_blocks[1] >= 8
    assert core.resize(11 * FRAME_BYTES).num_frames == POOL - 1
    assert core.resize(LONG["kv_memory"]).num_frames == POOL
    for _ in range(2):  # as sleeping and waking up do
        assert core.resize(core.ready.kv_memory).num_frames == POOL
    core.close()


@pytest.mark.parametrize("kv", [pytest.param("int8", marks=pytest.mark.slow), "int4_mixed"])
def test_narrow_formats_stream_too(tmp_path, device, kv) -> None:
    """Remainders of the latest tokens lie in a layer group of their own, which does not stream."""
    from models.small_llama import save_llama

    model = str(save_llama(tmp_path, num_hidden_layers=LAYERS, hidden_size=128, max_position_embeddings=256))
    settings = {"model": model, **LONG, "kv_cache_dtype": kv}
    executor = open_executor(EngineConfig(**settings), backend=BACKEND, device=device)
    size, windows = executor.facts.frame_bytes, [*executor.facts.windows]
    frames = Footprint(16, windows).frames(255, 24) - 4
    streamed = -(-5 * size // (size - executor.facts.streamed_bytes))
    late = Late(EngineConfig(**settings | {"kv_memory": frames * size, "kv_host_memory": streamed * size}), executor)
    assert late.memory.streamed.count == streamed
    late.add(ALONE)
    whole = EngineConfig(**settings | {"kv_memory": 64 * size, "kv_host_memory": None})
    assert late.run() == on_cpu(whole, ALONE)


def test_ranks_stream_their_parts_of_blocks(deep_model, device, monkeypatch) -> None:
    monkeypatch.setattr(ranks, "MODULE", rank_on_checked_device.__name__)
    late = opened(deep_model, device, rank_on_checked_device.STATIC, depth=2, tensor_parallel_size=2)
    assert (late.memory.num_frames, late.memory.streamed.count) == (POOL, STREAMED)
    requests = (*ALONE, request("also", [5] * 90, greedy(max_tokens=12, logprobs=1)))
    late.add(requests)
    tokens = late.run()
    late.executor.close()
    assert not late.errors
    assert tokens == expected(deep_model, requests)
