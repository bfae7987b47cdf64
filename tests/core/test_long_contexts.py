"""Contexts several times the pool, attended from host memory and from disk, have the bits of an all-resident run."""

from __future__ import annotations

import ctypes
import errno
import os
import resource

import pytest
from drive import Run, drive, request

from pagemill.errors import KVMemoryError, KVStoreError
from pagemill.kvcache import read_ahead, streamed_file
from pagemill.sampling.params import SamplingParams
from shallow import FRAME_BYTES

pytestmark = pytest.mark.shallow
SMALL = {"kv_memory": 12 * FRAME_BYTES, "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64}
"""Of a pool of 12 blocks, a step writes 5; the context has 32."""


@pytest.fixture(scope="module")
def conversations(prompts):
    joined = [token for prompt in prompts for token in prompt] * 4
    params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
    return [request("long", joined[:480], params), request("short", joined[900:960], params)]


@pytest.fixture(scope="module")
def expected(conversations, make_engine):
    return drive(make_engine(), conversations, record=True)


def settings(tier, folder):
    bytes = 70 * FRAME_BYTES
    return {"kv_host_memory": bytes} if tier == "host" else {"kv_disk_memory": bytes, "kv_disk_path": str(folder)}


@pytest.mark.parametrize(
    ("tier", "caching"),
    [
        ("host", True),
        pytest.param("host", False, marks=pytest.mark.slow),
        pytest.param("disk", True, marks=pytest.mark.slow),
        ("disk", False),
    ],
)
def test_not_a_bit_differs(conversations, expected, make_engine, tmp_path, tier, caching):
    core = make_engine(**SMALL, **settings(tier, tmp_path), enable_prefix_caching=caching)
    assert core.ready.longest_sequence == 512
    run = drive(core, conversations, record=True)
    assert run.tokens == expected.tokens
    for key, logits in run.logits.items():
        assert logits.equal(expected.logits[key]), key
    resident, streamed = run.last["long", 0].kv_blocks
    assert 0 < resident <= 12
    assert resident + streamed == 32
    assert sum(run.last["short", 0].kv_blocks) == 6
    assert core.stats().preemptions == core.stats().blocks_streamed == core.stats().frames_active == 0
    core.close()


def test_what_streams_is_told_while_it_runs(conversations, make_engine, tmp_path):
    core = make_engine(**SMALL, **settings("host", tmp_path))
    core.add_request(conversations[0])
    told = []
    while core.has_work():
        told += [(output.kv_blocks, core.stats().blocks_streamed) for output in core.step() if not output.finish_reason]
    assert told
    for (resident, streamed), in_all in told:
        assert 0 < resident <= 12
        assert streamed == in_all > 15
    core.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", pytest.param("int4", marks=pytest.mark.slow), "int4_mixed"])
def test_in_other_dtypes(conversations, make_engine, tmp_path, dtype):
    kinds = {"dtype": "bfloat16"} if dtype == "bfloat16" else {"kv_cache_dtype": dtype}
    small = SMALL | {"kv_memory": SMALL["kv_memory"] // {"bfloat16": 2, "int8": 3, "int4": 6, "int4_mixed": 4}[dtype]}
    whole = drive(make_engine(**kinds), conversations[:1], record=True)
    core = make_engine(**small, **settings("disk", tmp_path), **kinds)
    run = drive(core, conversations[:1], record=True)
    assert run.last["long", 0].kv_blocks[1] > 15
    for key, logits in run.logits.items():
        assert logits.equal(whole.logits[key]), key
    core.close()


def test_layers_are_read_ahead_and_let_go_of(conversations, expected, make_engine, tmp_path, monkeypatch):
    core = make_engine(**SMALL, **settings("disk", tmp_path))
    pool, calls = core.executor.pool, []
    advise = read_ahead.advise
    monkeypatch.setattr(read_ahead, "advise", lambda *call: calls.append(call) or advise(*call))
    run = drive(core, conversations[:1])
    assert run.tokens["long", 0] == expected.tokens["long", 0]
    regions = pool.streamed_file.regions
    read = [call for call in calls if call[2] == read_ahead.POPULATE_READ]
    steps = core.stats().steps
    for region in regions:
        inside = [call for call in read if region.begin <= call[0] and call[0] + call[1] <= region.begin + region.bytes]
        assert 20 < len(inside) <= 2 * steps, "each layer is read ahead in each step that streams"
    let_go = [call[:2] for call in calls if call[2] == read_ahead.mmap.MADV_DONTNEED]
    assert set(let_go) == {tuple(region) for region in regions}
    core.close()


@pytest.fixture
def streaming(conversations, make_engine, tmp_path):
    """An engine with both conversations under way, of which one streams, and nothing is moved in the next step; its
    file; and what has come of them."""
    core = make_engine(**SMALL, **settings("disk", tmp_path))
    run = Run()
    for each in reversed(conversations):
        core.add_request(each)
    while len(run.tokens.get(("long", 0), [])) < 2:
        run.take(core.step())
    yield core, core.executor.pool.streamed_file.fileno(), run
    core.close()


def finish(core, run) -> None:
    while core.has_work():
        run.take(core.step())


def assert_only_the_long_one_failed(core, run, expected, message) -> None:
    assert run.tokens["short", 0] == expected.tokens["short", 0]
    assert run.last["short", 0].finish_reason == "length"
    assert run.last["long", 0].error.error_type == "KVStoreError"
    assert message in run.last["long", 0].error.message
    tokens = run.tokens["long", 0]
    assert tokens == expected.tokens["long", 0][: len(tokens)]
    assert core.stats().blocks_streamed == core.stats().frames_active == 0


def assert_computed_anew(core, conversations, expected) -> None:
    again = drive(core, conversations[:1])
    assert again.cached["long"] == 0
    assert again.tokens["long", 0] == expected.tokens["long", 0]


def test_a_disk_that_can_not_read_fails_the_request_and_no_other(streaming, conversations, expected):
    core, file, run = streaming
    size = os.fstat(file).st_size
    os.ftruncate(file, size // 2)  # what lies behind the end of a file fails as a broken disk does
    finish(core, run)
    assert_only_the_long_one_failed(core, run, expected, "the disk cannot read blocks of this context, of layer 3")
    os.ftruncate(file, size)
    assert_computed_anew(core, conversations, expected)


def test_a_disk_that_takes_no_block_fails_the_request_and_no_other(conversations, expected, make_engine, tmp_path):
    core = make_engine(**SMALL, **settings("disk", tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        run = drive(core, conversations)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_only_the_long_one_failed(core, run, expected, "the disk has lost blocks of this context")
    assert_computed_anew(core, conversations, expected)
    core.close()


class Losing:
    """A disk that has not taken what the system wrote to it later: it reads as it was before, and that is said once."""

    def __init__(self, file: int, monkeypatch) -> None:
        self._real, self._due = streamed_file.written_back, True
        os.pwrite(file, bytes(os.fstat(file).st_size), 0)
        monkeypatch.setattr(streamed_file, "written_back", self.written_back)

    def written_back(self, file: int, size: int) -> bool:
        failed = self._due and self._real(file, size)
        self._due = False
        ctypes.set_errno(errno.EIO)
        return not failed


def test_what_a_disk_loses_later_fails_who_streams_it_and_is_never_read(
    streaming, conversations, expected, monkeypatch
):
    core, file, run = streaming
    step = core.executor.run
    # The step begins with all that was written, and reads what is left of it.
    monkeypatch.setattr(core.executor, "run", lambda plan: (Losing(file, monkeypatch), step(plan))[1])
    run.take(core.step())
    monkeypatch.setattr(core.executor, "run", step)
    finish(core, run)
    assert_only_the_long_one_failed(core, run, expected, "the disk has lost blocks of this context")
    assert len(run.tokens["long", 0]) == 2
    assert_computed_anew(core, conversations, expected)


def test_what_a_disk_loses_while_it_is_cached_is_computed_anew(
    conversations, expected, make_engine, tmp_path, monkeypatch
):
    core = make_engine(**SMALL, **settings("disk", tmp_path))
    drive(core, conversations[:1])
    Losing(core.executor.pool.streamed_file.fileno(), monkeypatch)
    assert_computed_anew(core, conversations, expected)
    core.close()


def test_a_context_is_found_again_where_it_lies(conversations, expected, make_engine, tmp_path):
    core = make_engine(**SMALL, **settings("disk", tmp_path))
    drive(core, conversations[:1])
    again = drive(core, conversations[:1])
    assert again.cached["long"] == 479
    assert again.tokens["long", 0] == expected.tokens["long", 0]
    core.close()


def test_a_stored_context_is_loaded_in_another_engine(conversations, expected, make_engine, tmp_path):
    small = SMALL | settings("disk", tmp_path) | {"kv_disk_memory": 110 * FRAME_BYTES}
    core = make_engine(**small)
    drive(core, conversations[:1])
    core.close()
    core = make_engine(**small)
    run = drive(core, conversations[:1], record=True)
    assert run.cached["long"] == 464, "29 blocks, in a pool of 12"
    for key, logits in run.logits.items():
        assert logits.equal(expected.logits[key]), key
    assert run.last["long", 0].kv_blocks[1] > 15
    assert core.stats().blocks_loaded == 29
    assert core.stats().blocks_streamed == core.stats().frames_active == 0
    core.close()


def test_what_no_tier_holds_is_refused(make_engine, tmp_path, monkeypatch):
    with pytest.raises(KVMemoryError, match="give kv_host_memory or kv_disk_memory what is missing"):
        make_engine(**SMALL, kv_host_memory=19 * FRAME_BYTES)
    make_engine(**SMALL, kv_host_memory=20 * FRAME_BYTES).close()
    with pytest.raises(KVMemoryError, match="one sequence needs 5"):
        make_engine(**SMALL | {"kv_memory": 4 * FRAME_BYTES}, kv_host_memory=70 * FRAME_BYTES)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(streamed_file.os, "posix_fallocate", full)
    with pytest.raises(KVStoreError, match="No space left"):
        make_engine(**SMALL, **settings("disk", tmp_path))
