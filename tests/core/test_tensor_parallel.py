"""A model in parts over processes: the bits, blocks and records of one, whatever the number, and a clean end."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from drive import drive, ranks_of, request
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from pagemill import LLM, AsyncLLM, SamplingParams
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.errors import ConfigError, EngineDeadError, EngineRestartingError, ModelNotFoundError, RankLostError
from pagemill.executor import ranks as rank_processes
from pagemill.executor.process_group import GroupExchange, host_meeting
from pagemill.executor.rank_messages import Step, pack, unpack
from pagemill.executor.record_parts import RecordParts
from pagemill.hub import resolve_model
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.layout import FrameShape, block_major, layer_major
from pagemill.models.sharding import kv_heads_of

VOCAB, LAYERS, KV_HEADS, HEAD_DIM, BLOCK = 96, 3, 2, 16, 8
FRAME_BYTES = LAYERS * KV_HEADS * BLOCK * 2 * HEAD_DIM * 2
SMALL = {"dtype": "bfloat16", "block_size": BLOCK, "max_model_len": 160, "max_num_batched_tokens": 48,
         "max_num_seqs": 6, "num_threads": 1, "target_tpot_ms": "off", "kv_memory": 24 * FRAME_BYTES}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1)
DRAWN = SamplingParams(temperature=1.0, top_k=20, n=3, seed=3, max_tokens=16, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """4 heads, 2 KV heads: two ranks have one each, four have each of them twice."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=100, intermediate_size=130, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=1024, initializer_range=0.3,
        eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def make(path):
    def make(ranks, **more):
        config = EngineConfig(str(path), tensor_parallel_size=ranks, check_invariants=True, **(SMALL | more))
        return EngineCore(config)

    return make


@pytest.fixture(scope="module")
def requests():
    random_ = random.Random(5)
    shared = [random_.randrange(3, VOCAB) for _ in range(40)]
    prompts = [
        shared * (i % 2) + [random_.randrange(3, VOCAB) for _ in range(random_.randrange(5, 70))] for i in range(9)
    ]
    return [request(f"r{i}", prompt, (GREEDY, DRAWN, SCORED)[i % 3]) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(make, requests):
    core = make(1)
    run = drive(core, requests, every=2)
    assert core.stats().preemptions > 0
    return run


def same(run, expected):
    assert run.tokens == {key: expected.tokens[key] for key in run.tokens}
    assert run.logprobs == {key: expected.logprobs[key] for key in run.logprobs}


@pytest.mark.parametrize("ranks", [2, 4])
def test_bits_are_those_of_one(make, requests, expected, ranks):
    """Chunks, forks, preemption and swap, drawn tokens and log probabilities; another size; once more, from blocks
    that lower tiers kept."""
    facts = make(1).executor.facts
    core = make(ranks, kv_host_memory=60 * FRAME_BYTES, preemption_mode="swap")
    some = requests if ranks == 2 else requests[6:]  # they share few cores
    same(drive(core, some, every=2), expected)
    core.resize(30 * core.executor.facts.frame_bytes)
    assert core.memory.num_frames == 30
    again = drive(core, some, every=2)
    same(again, expected)
    assert sum(again.cached.values()) > 0
    assert core.stats().blocks_loaded > 0 or ranks == 4
    ours = core.executor.facts
    assert (ours.frame_bytes, ours.record_bytes) == (FRAME_BYTES * ranks // 2, FRAME_BYTES)
    for name in ("fingerprint", "kv_format", "numerics", "windows", "record_bytes"):
        assert getattr(ours, name) == getattr(facts, name)
    core.close()


def test_blocks_on_disk_are_found_whatever_the_number_of_ranks(make, requests, tmp_path):
    """Stored by two ranks, found by one: the same records under the same digests."""
    disk = {"kv_disk_memory": "4MiB", "kv_disk_path": str(tmp_path), "kv_memory": 200 * FRAME_BYTES}
    some, found = [each for each in requests if each.params is GREEDY], []
    for ranks in (2, 1):
        core = make(ranks, **disk)
        found.append(drive(core, some))
        core.close()
    assert found[0].tokens == found[1].tokens
    for each in some:
        assert found[1].cached[each.request_id] >= (len(each.prompt_token_ids) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("tier", [pytest.param("host", marks=pytest.mark.slow), "disk"])
def test_contexts_longer_than_the_pool(make, tier, tmp_path):
    long = [request("long", [3 + i * 7 % 90 for i in range(400)], GREEDY)]
    room = {"kv_disk_memory": "4MiB", "kv_disk_path": str(tmp_path)} if tier == "disk" else {"kv_host_memory": "2MiB"}
    settings = {"max_model_len": 512, "max_num_seqs": 1}
    roomy = drive(make(1, **settings, kv_memory=80 * FRAME_BYTES), long)
    core = make(2, **settings, **room, kv_memory=30 * FRAME_BYTES)
    run = drive(core, long)
    core.close()
    assert run.tokens == roomy.tokens
    assert run.last["long", 0].kv_blocks[1] > 15


def test_narrow_numbers_in_memory_of_each_rank(make, requests):
    """kv_cache_memory_bytes is of each rank, as vLLM's; kv_memory would be of all."""
    narrow = {"kv_cache_dtype": "int8", "quantization": "int8", "kv_memory": None}
    one, two = make(1, **narrow, kv_cache_memory_bytes=1 << 20), make(2, **narrow, kv_cache_memory_bytes=1 << 19)
    assert one.memory.num_frames == two.memory.num_frames
    same(drive(two, requests), drive(one, requests))
    two.close()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tensor_parallel_size": 3}, "is 3, but the model has 4 attention heads and 2 KV heads.* use one of 1, 2, 4"),
        ({"kv_memory": 1000}, "less than the .* of a single block"),
        ({"enable_lora": True}, "enable_lora is True, which a model in parts cannot have"),
        ({"speculative_config": {"method": "draft_model", "model": "x"}}, "speculative_config: model is 'x', which a"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
    ],
)
def test_refusals_name_what_cannot_be(path, more, words):
    with pytest.raises(ConfigError, match=words):
        EngineCore(EngineConfig(str(path), **(SMALL | {"tensor_parallel_size": 2} | more)))
    assert ranks_of(os.getpid()) == []  # none waits for the garbage collector


def test_a_model_that_does_not_load_leaves_no_rank(tmp_path):
    with pytest.raises(ModelNotFoundError):
        EngineCore(EngineConfig(str(tmp_path / "none"), tensor_parallel_size=2))
    assert ranks_of(os.getpid()) == []


def wait_for(what, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("when", ["between steps", "in a step"])
def test_a_rank_that_is_killed_ends_the_engine_and_the_others(path, requests, when):
    core = EngineCore(EngineConfig(str(path), tensor_parallel_size=2, **SMALL))
    (pid,) = (rank.pid for rank in ranks_of(os.getpid()))
    for each in requests:
        core.add_request(each)
    for _ in range(3):
        core.step()
    if when == "in a step":
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    else:
        os.kill(pid, signal.SIGKILL)

    def steps():
        for _ in range(5):
            core.step()

    for _ in range(2):  # and so it stays
        with pytest.raises(RankLostError, match="rank 1 of 2 was killed by SIGKILL"):
            steps()
    with pytest.raises(RankLostError):
        core.resize(30 * FRAME_BYTES)
    assert not psutil.pid_exists(pid)
    core.close()


def stop_rank(core, monkeypatch):
    """Stops rank 1, which is waited for half a second from now on."""
    monkeypatch.setattr(rank_processes, "TIMEOUT_S", 0.5)
    for rank in core.executor.ranks._ranks:  # noqa: SLF001
        for connection in (rank.control, rank.frames):
            with socket.socket(fileno=os.dup(connection.fileno())) as end:
                rank_processes.limit_waits(end)
    (pid,) = (rank.pid for rank in ranks_of(os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_rank_that_is_stopped_is_lost_after_a_while_whatever_it_was_asked(path, monkeypatch):
    """Neither an answer that does not come, nor frames beside the steps, nor a message that is not taken is waited for
    without end; who waits in another thread hears of it, too."""
    core = EngineCore(EngineConfig(str(path), tensor_parallel_size=2, **SMALL))
    pid = stop_rank(core, monkeypatch)
    heard: list[BaseException] = []

    def read():
        try:
            core.executor.frames.read([0])
        except BaseException as error:
            heard.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    with pytest.raises(RankLostError, match=r"rank 1 of 2 is stopped .* did not come for 0.5 s"):
        core.resize(30 * FRAME_BYTES)
    thread.join(10)
    assert not thread.is_alive()
    assert heard == []  # blocks that could not be read, as of a disk
    wait_for(lambda: not psutil.pid_exists(pid))
    core.close()


@pytest.mark.slow
def test_messages_that_nobody_takes_are_not_waited_for(path, monkeypatch):
    core = EngineCore(EngineConfig(str(path), tensor_parallel_size=2, **SMALL))
    stop_rank(core, monkeypatch)
    with pytest.raises(RankLostError, match="is stopped"):
        core.executor.ranks.send(bytes(8 << 20))
    core.close()


@pytest.mark.parametrize("where", ["in a step", pytest.param("at an answer", marks=pytest.mark.slow)])
def test_an_interrupt_that_parts_the_ranks_ends_them(path, requests, monkeypatch, where):
    """A step that only one rank has run to its end would leave the others at another place of the exchange."""
    core = EngineCore(EngineConfig(str(path), tensor_parallel_size=2, **SMALL))
    (pid,) = (rank.pid for rank in ranks_of(os.getpid()))
    core.add_request(requests[0])
    core.step()

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    in_step = where == "in a step"
    with monkeypatch.context() as patched:
        patched.setattr(*(core.executor.decoder, "forward") if in_step else (Connection, "recv"), interrupt)
        with pytest.raises(KeyboardInterrupt):
            core.step() if in_step else core.resize(30 * FRAME_BYTES)
    with pytest.raises(RankLostError):
        core.resize(30 * FRAME_BYTES)
    wait_for(lambda: not psutil.pid_exists(pid))
    core.close()


def test_a_start_that_fails_half_way_leaves_no_process(path, monkeypatch):
    config = EngineConfig(str(path), tensor_parallel_size=4, **SMALL)
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    started = []

    def start(shared, real=rank_processes.start_rank):
        if len(started) == 2:
            raise OSError("no more processes")
        started.append(real(shared))
        return started[-1]

    monkeypatch.setattr(rank_processes, "start_rank", start)
    with pytest.raises(OSError, match="no more processes"):
        rank_processes.Ranks(config, 1)
    assert [one.child.process.poll() for one in started] == [-signal.SIGKILL] * 2
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_ranks_meet_on_the_loopback_interface_alone():
    store = host_meeting()
    found = [one.laddr for one in psutil.net_connections("tcp") if one.status == "LISTEN"]
    assert [address.ip for address in found if address.port == store.port] == ["127.0.0.1"]


def test_no_rank_outlives_an_engine_that_is_killed(path):
    code = (
        "import sys; from pagemill.config import EngineConfig; from pagemill.engine.core import EngineCore; "
        "core = EngineCore(EngineConfig(sys.argv[1], tensor_parallel_size=2, num_threads=1, kv_memory='1MiB')); "
        "print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    (rank,) = ranks_of(process.pid)
    process.kill()
    process.communicate()
    wait_for(lambda: not rank.is_running())


@pytest.mark.parametrize(
    "restarts",
    # An engine of ranks starts three Python processes with torch, one after the other: seconds, and each once more.
    [0, pytest.param(1, marks=pytest.mark.slow)],
)
def test_a_lost_rank_ends_its_engine_and_is_a_restart(path, restarts):
    """What a stream has given is not given again: it can be sent again. Who has given nothing is answered."""
    prompt = {"prompt_token_ids": [3, 5, 7]}

    async def read(llm, params, begun=None):
        outputs = []
        async for output in llm.generate(prompt, params):
            outputs = output.outputs[0].token_ids
            if begun is not None:
                begun.set()
        return outputs

    async def scenario():
        settings = SMALL | {"max_num_seqs": 1, "tokenizer": resolve_model("smollm2-135m")}
        llm = AsyncLLM(str(path), tensor_parallel_size=2, max_engine_restarts=restarts, **settings)
        params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
        begun = asyncio.Event()
        streaming = asyncio.create_task(read(llm, params, begun))
        await begun.wait()
        waiting = asyncio.create_task(read(llm, params))
        await asyncio.sleep(0.01)
        (rank,) = ranks_of(engine := llm.engine_pid)
        rank.kill()
        words = r"RankLostError: rank 1 of 2 was killed by SIGKILL" + ".*send this again" * restarts
        with pytest.raises(EngineRestartingError if restarts else EngineDeadError, match=words):
            await streaming
        pids = [engine, rank.pid]
        if restarts:
            answer = await waiting
            assert llm.engine_pid != engine
            pids += [llm.engine_pid, *(each.pid for each in ranks_of(llm.engine_pid))]
            assert len(pids) == 4
            assert await read(llm, params) == answer
        else:
            with pytest.raises(EngineDeadError):
                await waiting
        await llm.shutdown()
        return pids

    pids = asyncio.run(scenario())
    wait_for(lambda: not any(map(psutil.pid_exists, pids)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_records_are_cut_and_joined(data):
    """Any shape and format: joined, a rank's parts are the record; heads that several ranks have are the same."""
    kv_heads, copies = data.draw(st.sampled_from([1, 2, 3, 4, 8])), data.draw(st.sampled_from([1, 2]))
    ranks = (
        copies * kv_heads
        if copies > 1
        else data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if kv_heads % n == 0]))
    )
    format = kv_format(data.draw(st.sampled_from(["bfloat16", "float32", "int8", "int4"])))
    groups = group_layers([None] * data.draw(st.integers(1, 3)))
    block, dim = data.draw(st.sampled_from([8, 16])), data.draw(st.sampled_from([32, 64]))
    heads = kv_heads_of(SimpleNamespace(num_kv_heads=kv_heads), ranks)
    whole, part = (FrameShape(groups, n, block, dim, dim, format) for n in (kv_heads, heads[0].stop - heads[0].start))
    make = data.draw(st.sampled_from([layer_major, block_major]))
    parts, at, of_part = RecordParts(whole, part, heads, make), make(whole, 1), make(part, 1)
    pieces = at.frame_bytes // at.piece_bytes
    records = np.random.default_rng(0).integers(0, 256, (2, pieces, at.piece_bytes), np.uint8)
    used = whole.places // pieces * block * format.slot_bytes(kv_heads, dim, dim)
    records[:, :, used:] = 0  # what fills a page up
    cut = parts.cut(records)
    assert {each.shape for each in cut} == {(2, pieces, of_part.piece_bytes)}
    assert (parts.join([each.reshape(2, -1) for each in cut]) == records).all()
    place = data.draw(st.integers(0, whole.places - 1))
    for rank, mine in enumerate(heads):
        for ours, theirs in zip(views(part, make, cut[rank], place), views(whole, make, records, place), strict=True):
            assert torch.equal(ours, theirs[:, mine])


def views(shape, make, records, place):
    """Keys, values and scales [1, heads, ...] in a place of the first record, as a pool's layers see them."""
    pool = DevicePool(1, shape, layout=make)
    pool.frames.bytes.view(-1)[: records[0].size] = torch.from_numpy(records[0].reshape(-1))
    return [each.contiguous().view(torch.uint8) for each in pool.packed_layer(shape, place, 0) if each is not None]


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), min_size=1, max_size=5))
def test_arrays_travel_in_one_piece(lists):
    arrays = [np.array(each, np.int32) for each in lists]
    assert [each.tolist() for each in unpack(pack(*arrays))] == lists


def test_a_step_of_a_few_rows_is_a_small_message():
    rows = np.arange(8, dtype=np.int32)
    assert len(Step.of(rows, rows, rows, rows).numbers) == 4 * (5 + 4 * 8)


def test_gloo_gathers_parts_of_any_width():
    code = (
        "import os, sys, torch; from pagemill.executor.process_group import *; e = GroupExchange(1, 2); "
        "e.connect(join_meeting(int(sys.argv[1]))); "
        "[e.all_gather(torch.full((3, w), 2.0), [5, w]) for w in (5, 2, 9)]; os._exit(0)"
    )
    store, exchange = host_meeting(), GroupExchange(0, 2)
    other = subprocess.Popen([sys.executable, "-c", code, str(store.port)])
    exchange.connect(store)
    for width in (5, 2, 9):
        whole = exchange.all_gather(torch.full((3, 5), 1.0), [5, width])
        assert whole.tolist() == [[1.0] * 5 + [2.0] * width] * 3
    assert other.wait(20) == 0


def test_the_real_model_on_three_ranks():
    """9 heads and 3 KV heads: three of each on every rank, the text of one process to the last bit."""
    prompts, params = (
        ["The capital of France is", "Once upon a time"],
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=3),
    )
    texts = []
    for ranks in (1, 3):
        llm = LLM("smollm2-135m", tensor_parallel_size=ranks, max_model_len=128, num_threads=1, kv_memory="16MiB")
        texts.append(
            [(each.outputs[0].text, each.outputs[0].logprobs) for each in llm.generate(prompts, params, use_tqdm=False)]
        )
        llm.close()
    assert texts[0] == texts[1]
    with pytest.raises(EngineDeadError):
        llm.generate("again")
