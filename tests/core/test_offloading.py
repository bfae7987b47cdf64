"""Blocks that leave the pool come back from host memory or disk, after a restart too, and change no bit."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from drive import drive, request

from device_tier import DeviceTier
from pagemill.distributed.replica import split_digests
from pagemill.engine import tiers as engine_tiers
from pagemill.engine.messages import DIGEST_BYTES
from pagemill.executor import backend
from pagemill.kvcache.layout import layer_major
from pagemill.kvcache.load_time import LoadTime
from pagemill.kvcache.offload_tiers import OffloadTiers
from pagemill.memory.digest import extend_chain
from pagemill.memory.work import MemoryWork
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.step_plan import StepPlan
from shallow import FRAME_BYTES

pytestmark = pytest.mark.shallow
LENGTH, BLOCKS = 200, 12
"""The length of each prompt, in tokens and in whole blocks."""
SLOT_BYTES = FRAME_BYTES + 4096
"""Of a block on disk."""


@pytest.fixture(scope="module")
def conversations(prompts):
    joined = [token for prompt in prompts for token in prompt] * 3
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    starts = range(0, 6 * LENGTH, LENGTH)
    return [
        request(f"r{at}", joined[at + at // 7 : at + at // 7 + LENGTH], params, cache_salt=str(at)) for at in starts
    ]


@pytest.fixture(scope="module")
def expected(conversations, make_engine):
    return drive(make_engine(enable_prefix_caching=False), conversations, record=True)


SMALL = {"kv_memory": 30 * FRAME_BYTES, "max_model_len": 352, "max_num_seqs": 2, "max_num_batched_tokens": 128,
         "target_tpot_ms": "off"}  # fmt: skip
"""Room for two of the six."""


def same(run, expected) -> None:
    assert run.tokens == expected.tokens
    for key, logits in run.logits.items():
        assert logits.equal(expected.logits[key]), key


@pytest.mark.parametrize("compression", ["off", "zstd"])
def test_who_routes_is_told_what_pool_and_host_memory_hold(conversations, make_engine, compression):
    """The pool has room for two prompts, host memory for one and a half more."""
    host = {"kv_host_memory": 20 * FRAME_BYTES, "kv_host_compression": compression}
    core = make_engine(**SMALL, **host, publishes=True)
    digests = []
    for one in conversations:
        chain = []
        extend_chain(chain, core.root(one), one.prompt_token_ids, 16)
        digests += chain
    known, step, less = set(), core.step, []

    def told_step():
        outputs = step()
        if (held := core.take_held()) is not None:
            removed = split_digests(held.removed)
            less.extend(digest for digest in removed if digest in known)
            known.difference_update(removed)
            known.update(split_digests(held.stored))
        return outputs

    core.step = told_step
    drive(core, conversations)
    core.tiers.transfers.flush()
    drive(core, conversations[:1])
    core.tiers.transfers.flush()
    told_step()
    blocks = [(digest, 0) for digest in digests]
    here = core.memory.are_published(digests)
    below = core.tiers.offload.in_memory(blocks)
    assert sum(below) > 10
    assert less
    expected = {digest[:DIGEST_BYTES] for digest, *ways in zip(digests, here, below, strict=True) if any(ways)}
    assert known & {digest[:DIGEST_BYTES] for digest in digests} == expected
    assert len(expected) < len(digests)


@pytest.mark.parametrize(
    ("tier", "compression"),
    [
        pytest.param("host", "off", marks=pytest.mark.slow),
        ("host", "zstd"),
        ("disk", "off"),
        ("both", "off"),
        pytest.param("both", "zstd", marks=pytest.mark.slow),
    ],
)
def test_what_was_evicted_comes_back(conversations, expected, make_engine, tmp_path, tier, compression, monkeypatch):
    monkeypatch.setattr(LoadTime, "pays", lambda *how: True)
    settings = {**SMALL, "kv_host_compression": compression}
    if tier != "disk":
        settings["kv_host_memory"] = (200 if tier == "host" else 20) * FRAME_BYTES
    if tier != "host":
        settings |= {"kv_disk_memory": "1GiB", "kv_disk_path": str(tmp_path)}
    core = make_engine(**settings)
    drive(core, conversations)
    core.tiers.transfers.flush()
    again = drive(core, conversations, record=True)
    assert set(again.cached.values()) == {BLOCKS * 16}
    same(again, expected)
    stats = core.stats()
    assert stats.blocks_loaded >= 4 * BLOCKS
    assert stats.tier_blocks.keys() == ({"host", "disk"} if tier == "both" else {tier})
    assert compression == "zstd" or stats.tier_blocks.get("host", 0) <= (20 if tier == "both" else 200)
    assert sum(stats.tier_blocks.values()) == stats.blocks_saved >= 6 * BLOCKS - stats.frames
    assert stats.blocks_missed == 0
    assert stats.frames_active == 0
    assert stats.stalled_s > 0, "at first there was nothing else to do"
    assert stats.loading_s > 0
    core.close()


def test_an_engine_takes_another_kind_of_tier(conversations, expected, make_engine, tmp_path, monkeypatch):
    def with_device(tiers, record_bytes, **settings):
        return OffloadTiers([DeviceTier(15, record_bytes), *tiers], record_bytes, **settings)

    disk = {"kv_disk_memory": "1GiB", "kv_disk_path": str(tmp_path)}
    with monkeypatch.context() as patch:
        patch.setattr(engine_tiers, "OffloadTiers", with_device)
        core = make_engine(**SMALL, **disk, kv_host_memory=20 * FRAME_BYTES)
        drive(core, conversations)
        core.tiers.transfers.flush()
        held = core.stats().tier_blocks
        assert held.pop("disk") > 0
        assert held == {"device": 15, "host": 20}
        same(drive(core, conversations, record=True), expected)
        assert core.stats().blocks_missed == 0
        core.close()
    again = make_engine(**SMALL, **disk)
    run = drive(again, conversations, record=True)
    assert set(run.cached.values()) == {BLOCKS * 16}
    same(run, expected)
    again.close()


def test_engines_that_share_a_folder_find_each_others_blocks_while_both_run(
    conversations, expected, make_engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(LoadTime, "pays", lambda *how: True)
    settings = {**SMALL, "kv_disk_memory": "1GiB", "kv_disk_path": str(tmp_path), "kv_disk_shared": True}
    one, other = make_engine(**settings), make_engine(**settings)
    drive(one, conversations)
    one.tiers.transfers.flush()
    here, there = (core.tiers.offload.tiers[-1] for core in (one, other))
    there.look()
    assert len(there.names()) == len(here.names()) == one.stats().blocks_saved >= 6 * BLOCKS - one.stats().frames
    run = drive(other, conversations, record=True)
    assert max(run.cached.values()) == BLOCKS * 16
    same(run, expected)
    assert other.stats().blocks_loaded >= 3 * BLOCKS
    for core in (one, other):
        core.close()
    again = make_engine(**settings)
    run = drive(again, conversations, record=True)
    assert set(run.cached.values()) == {BLOCKS * 16}
    same(run, expected)
    again.close()


@pytest.mark.parametrize("where", ["begin_writes", "mark"])
def test_a_load_that_can_not_be_begun_ends_and_disturbs_nobody(
    conversations, expected, make_engine, monkeypatch, caplog, where
):
    monkeypatch.setattr(LoadTime, "pays", lambda *how: True)
    core = make_engine(**SMALL, kv_host_memory=200 * FRAME_BYTES)
    drive(core, conversations)
    core.tiers.transfers.flush()
    with monkeypatch.context() as patch:
        patch.setattr(core.executor.frames, where, Mock(side_effect=RuntimeError("no luck")))
        same(drive(core, conversations, every=3, record=True), expected)
    assert "a load of 12 KV blocks could not be begun, which are computed: RuntimeError: no luck" in caplog.text
    assert core.scheduler.num_loading == core.stats().frames_active == core.stats().blocks_loaded == 0
    same(drive(core, conversations), expected)
    assert core.stats().blocks_loaded > 0
    core.close()


@pytest.fixture
def kept(conversations, make_engine, tmp_path):
    """Settings of an engine that was closed after the conversations, its file of blocks, and the size of a slot."""
    settings = {**SMALL, "kv_disk_memory": "1GiB", "kv_disk_path": str(tmp_path)}
    core = make_engine(**settings)
    slot_bytes = core.tiers.offload.tiers[-1].slot_bytes
    drive(core, conversations)
    core.close()
    (blocks,) = tmp_path.glob("*/blocks.dat")
    return settings, blocks, slot_bytes


def test_a_new_engine_finds_what_the_last_one_kept(kept, conversations, expected, make_engine):
    settings, _, _ = kept
    core = make_engine(**settings)
    run = drive(core, conversations, record=True)
    assert set(run.cached.values()) == {BLOCKS * 16}
    same(run, expected)
    core.close()
    other = make_engine(**settings, dtype="bfloat16")
    assert set(drive(other, conversations).cached.values()) == {0}
    other.close()


def test_blocks_of_another_layout_are_not_found(conversations, make_engine, tmp_path, monkeypatch):
    settings = {**SMALL, "dtype": "bfloat16", "kv_disk_memory": "1GiB", "kv_disk_path": str(tmp_path)}

    def cached() -> set[int]:
        core = make_engine(**settings)
        run = drive(core, conversations[:2])
        core.close()
        return set(run.cached.values())

    def without_pairs(shape, frames):
        return layer_major(replace(shape, format=replace(shape.format, beside=1)), frames)

    assert cached() == {0}
    assert cached() == {BLOCKS * 16}
    with monkeypatch.context() as patch:
        patch.setattr(backend, "layer_major", without_pairs)
        assert cached() == {0}
    assert cached() == {BLOCKS * 16}


def test_broken_blocks_are_computed_again(kept, conversations, expected, make_engine):
    settings, blocks, slot_bytes = kept
    with blocks.open("r+b") as file:
        for slot in range(5, blocks.stat().st_size // slot_bytes, 7):
            file.seek(slot * slot_bytes + slot_bytes // 2)
            file.write(b"broken")
    core = make_engine(**settings)
    run = drive(core, conversations, record=True)
    assert 0 < sum(run.cached.values()) < 6 * BLOCKS * 16
    same(run, expected)
    assert core.stats().blocks_missed > 0
    assert core.stats().frames_active == 0
    core.close()


def test_a_share_of_the_disk_counts_what_the_store_has_of_it(conversations, make_engine, tmp_path, monkeypatch):
    """Else each start would leave less of it, and the store would be cut."""
    usage, room = shutil.disk_usage(tmp_path), 100 * SLOT_BYTES

    def free(path):
        held = sum(file.stat().st_size for file in Path(path).glob("*/blocks.dat"))
        return usage._replace(free=room - held)

    monkeypatch.setattr(engine_tiers.shutil, "disk_usage", free)
    settings = {**SMALL, "kv_disk_memory": "90%", "kv_disk_path": str(tmp_path)}
    for _ in range(2):
        core = make_engine(**settings)
        assert core.tiers.offload.tiers[-1].capacity == 90
        drive(core, conversations)
        core.close()


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.slow), "swap", "recompute"])
def test_preempted_sequences_come_back_as_the_mode_says(crowd, make_engine, mode):
    requests, expected = crowd
    core = make_engine(
        **SMALL | {"max_num_seqs": 6}, kv_host_memory=200 * FRAME_BYTES, preemption_mode=mode, num_threads=2
    )
    same(drive(core, requests, record=True), expected)
    stats = core.stats()
    assert stats.preemptions >= 3
    if mode == "recompute":
        assert stats.preempted_tokens_swapped_in == stats.blocks_loaded == 0
        assert stats.preempted_tokens_recomputed > stats.preemptions * 16
    if mode == "swap":
        assert stats.preempted_tokens_swapped_in == 16 * stats.blocks_loaded > 0
        assert stats.preempted_tokens_recomputed <= stats.preemptions * 16, "only what is left of the last block"
    core.close()


@pytest.mark.parametrize(
    ("blocks", "mode", "foresees"), [(30, "auto", False), (29, "auto", True), (30, "recompute", True)]
)
def test_room_is_foreseen_unless_host_memory_holds_as_much_as_the_pool(crowd, make_engine, blocks, mode, foresees):
    requests, expected = crowd
    settings = SMALL | {"max_num_seqs": 6, "target_tpot_ms": "auto"}
    core = make_engine(**settings, kv_host_memory=blocks * FRAME_BYTES, preemption_mode=mode, num_threads=2)
    assert drive(core, requests).tokens == expected.tokens
    stats = core.stats()
    assert (stats.preemptions == 0) == foresees
    assert (stats.preempted_tokens_swapped_in == 0) == foresees
    core.resize(31 * FRAME_BYTES)
    assert core.scheduler.state.foresees, "the pool has grown past what host memory takes"
    core.close()


def test_beside_a_gpu_what_is_preempted_goes_to_host_memory_by_default(crowd, make_engine):
    requests, expected = crowd
    core = make_engine(**SMALL | {"max_num_seqs": 6, "own_memory": True})
    assert drive(core, requests).tokens == expected.tokens
    assert core.stats().tier_blocks == {"host": 30}
    core.close()


@pytest.fixture(scope="module")
def crowd(prompts, make_engine):
    """Six requests that fit side by side at first, and not at their end; and what they bring."""
    joined = [token for prompt in prompts for token in prompt] * 3
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    requests = [request(f"r{at}", joined[at * 60 : at * 60 + 40 + at], params, cache_salt=str(at)) for at in range(6)]
    return requests, drive(make_engine(enable_prefix_caching=False), requests, record=True)


def test_what_is_still_being_stored_comes_back_too(conversations, expected, make_engine, monkeypatch):
    core = make_engine(**SMALL, kv_host_memory=200 * FRAME_BYTES)
    tiers, stores = core.tiers, threading.Event()
    write = tiers.offload.write

    def late(names, records):
        assert stores.wait(30)
        write(names, records)

    monkeypatch.setattr(tiers.offload, "write", late)
    drive(core, conversations[:4])
    digests = []
    extend_chain(digests, core.root(conversations[0]), conversations[0].prompt_token_ids, 16)
    assert len(digests) == BLOCKS
    for preempted in (False, True):
        assert tiers.stored(digests, 0, preempted) == BLOCKS
    run = drive(core, conversations[:1], record=True)
    assert set(run.cached.values()) == {BLOCKS * 16}
    assert all(logits.equal(expected.logits[key]) for key, logits in run.logits.items())
    assert core.stats().tier_blocks == {"host": 0}
    stores.set()
    core.close()


def test_what_takes_less_time_by_the_speeds_measured_is_done(conversations, expected, make_engine):
    core = make_engine(**SMALL, kv_host_memory=200 * FRAME_BYTES)
    drive(core, conversations)
    core.tiers.transfers.flush()
    (load_time,) = core.tiers.transfers.load_times.values()

    def loads(at: int, prefill_s_per_token: float) -> bool:
        """Whether a conversation is loaded, or else computed."""
        loaded = core.stats().blocks_loaded
        core.tiers.prefill.s_per_token = prefill_s_per_token
        run = drive(core, conversations[at : at + 1], record=True)
        (name,) = run.cached
        assert run.tokens[name, 0] == expected.tokens[name, 0]
        assert (run.cached[name], core.stats().blocks_loaded - loaded) in [(BLOCKS * 16, BLOCKS), (0, 0)]
        return run.cached[name] > 0

    assert [loads(at, 1e-9) for at in (0, 1)] == [True, True], "nothing is known of loading yet"
    assert load_time.of(BLOCKS) > 0
    load_time.note(BLOCKS, 1.0)  # no trial is due before steps have taken twenty
    assert not loads(2, 1e-9)
    assert loads(3, 1.0)
    load_time.note(BLOCKS, 1e6)
    assert not loads(4, 1.0), "it takes too long of late"
    load_time.note_step(1e8)
    assert loads(5, 1.0), "it was not tried for long"
    assert load_time.of(BLOCKS) < 1e3
    assert loads(0, 1.0)
    core.close()


def step_of(query_lens: list[int]) -> StepPlan:
    none, counts = np.empty(0, dtype=np.int32), np.array(query_lens, dtype=np.int32)
    return StepPlan(
        step=0,
        work=MemoryWork.none(),
        rows=none,
        starts=none,
        query_lens=counts,
        generates=counts == 1,
        sample_from=none,
        sample_to=none,
        max_accepted=none,
        branches=np.empty(0, np.bool_),
        prompt_logprobs=none,
    )


def test_steps_that_hardly_compute_prompts_say_nothing_about_that(make_engine):
    core = make_engine(**SMALL, kv_host_memory=200 * FRAME_BYTES)
    for query_lens in ([1] * 200, [63], [1] * 65 + [64]):
        core.tiers.note_step(step_of(query_lens), 1.0)
        assert core.tiers.prefill.s_per_token == 0.0
    core.tiers.note_step(step_of([1] * 20 + [80]), 1.0)
    assert core.tiers.prefill.s_per_token == 0.01
    core.close()


def test_a_target_that_nobody_meets_changes_no_bit(crowd, make_engine):
    requests, expected = crowd
    core = make_engine(**SMALL | {"max_num_seqs": 6, "target_tpot_ms": 0.001}, kv_host_memory=200 * FRAME_BYTES)
    same(drive(core, requests, record=True), expected)
    assert core.stats().running_limit == 1
    core.close()


def found(core, conversations) -> list[int]:
    """How many blocks of each are stored, from its beginning on."""
    reached = []
    for one in conversations:
        digests = []
        extend_chain(digests, core.root(one), one.prompt_token_ids, 16)
        reached.append(core.memory.reach(digests, lambda block: core.tiers.offload.holds([block])[0]))
    return reached


@pytest.mark.parametrize("host", [pytest.param(0, marks=pytest.mark.slow), 200])
def test_of_what_does_not_fit_on_disk_the_most_recent_is_kept(conversations, make_engine, tmp_path, host):
    """Six conversations, thirty blocks. With host memory, that of four of them has gone down to it before."""
    settings = {**SMALL, "kv_disk_memory": 30 * SLOT_BYTES, "kv_disk_path": str(tmp_path)}
    settings |= {"kv_host_memory": host * FRAME_BYTES} if host else {"kv_memory": 100 * FRAME_BYTES}

    def kept_of(asked) -> list[int]:
        core = make_engine(**settings)
        assert core.tiers.offload.tiers[-1].slot_bytes == SLOT_BYTES
        for one in asked:
            drive(core, [one])
        core.close()
        again = make_engine(**settings)
        reached = found(again, conversations)
        again.close()
        return reached

    assert kept_of(conversations) == [0, 0, 0, 6, BLOCKS, BLOCKS]
    assert kept_of([conversations[4], conversations[0]]) == [BLOCKS, 0, 0, 0, BLOCKS, 6]
