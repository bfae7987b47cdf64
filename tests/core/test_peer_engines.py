"""A block travels: an engine fetches what another holds, with the same bits, and what goes wrong costs only time."""

from __future__ import annotations

import numpy as np
import pytest
from drive import Run, drive, request

from pagemill.engine.messages import HeldBlocks, Peering
from pagemill.engine.peering import ServedBlocks
from pagemill.kvcache import peer_store, tcp_peer, transfers
from pagemill.kvcache.load_time import LoadTime
from pagemill.memory.digest import extend_chain
from pagemill.sampling.params import SamplingParams
from peer_proxy import Proxy
from shallow import FRAME_BYTES

pytestmark = pytest.mark.shallow
SECRET = b"s" * 32
LENGTH = 200
SETTINGS = {"kv_memory": 68 * FRAME_BYTES, "max_model_len": 512, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def prompt(prompts):
    return [token for prompt in prompts for token in prompt][:LENGTH]


def asked(name, prompt, *more, held=None, **params):
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params})
    return request(name, [*prompt, *more], params, held=held, seed=1)


@pytest.fixture
def make_peer(make_engine, monkeypatch):
    engines = []

    def make(secret=SECRET, **settings):
        core = make_engine(**{**SETTINGS, **settings}, peering=Peering(secret, "127.0.0.1"))
        engines.append(core)
        return core

    monkeypatch.setattr(LoadTime, "pays", lambda *how: True)
    yield make
    for core in engines:
        core.close()


def holding(core, num_blocks=LENGTH // 16):
    return HeldBlocks(core.ready.peer_address, num_blocks)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_session_that_moves_takes_its_blocks_along_and_gets_the_same_tokens(prompt, make_peer, temperature):
    first, second = make_peer(), make_peer()
    answer = drive(first, [asked("a", prompt, temperature=temperature)]).tokens["a", 0]
    again = asked("b", prompt, *answer, 5, 6, temperature=temperature)
    here = drive(first, [again], record=True)
    again.held = holding(first, (LENGTH + len(answer)) // 16)
    moved = drive(second, [again], record=True)
    assert moved.tokens == here.tokens
    assert all(moved.logits[key].equal(logits) for key, logits in here.logits.items())
    assert moved.cached["b"] >= LENGTH // 16 * 16
    stats, served = second.stats(), first.stats()
    assert stats.blocks_fetched == stats.blocks_loaded == served.blocks_served == (LENGTH + len(answer)) // 16
    assert stats.fetched_bytes == stats.blocks_fetched * stats.block_bytes
    assert stats.fetching_s > 0
    assert stats.fetches_failed == {}


FIRST_BLOCK = 500
"""Bytes of a greeting, at most."""


@pytest.mark.parametrize(("fault", "reason"), [("cut", "cut"), ("change", "broken"), ("stop", "slow")])
def test_a_transfer_that_fails_is_computed_and_nobody_else_waits(prompt, make_peer, monkeypatch, fault, reason, caplog):
    monkeypatch.setattr(tcp_peer, "SILENT_S", 0.5)
    first, second = make_peer(), make_peer()
    expected = drive(first, [asked("a", prompt), asked("o", prompt[::-1])]).tokens
    proxy = Proxy(first.ready.peer_address, **{fault: FIRST_BLOCK + 2 * first.ready.kv_bytes // first.ready.num_frames})
    second.add_request(asked("a", prompt, held=HeldBlocks(proxy.address, LENGTH // 16)))
    second.add_request(asked("o", prompt[::-1]))
    run, order = Run(), []
    while second.has_work():
        outputs = second.step()
        run.take(outputs)
        order += [each.request_id for each in outputs if each.finish_reason]
    assert run.tokens == expected
    assert fault != "stop" or order == ["o", "a"], "the other has not waited"
    stats = second.stats()
    assert set(stats.fetches_failed) == {reason}
    assert stats.frames_active == stats.running == stats.waiting == 0
    assert len([record for record in caplog.records if record.name == peer_store.__name__]) == 1
    proxy.close()


def test_a_peer_that_takes_longer_than_computing_is_given_up(prompt, make_peer, monkeypatch):
    monkeypatch.setattr(transfers, "PATIENCE_S", 0.3)
    monkeypatch.setattr(transfers, "UNMEASURED_BLOCK_S", 0.001)
    monkeypatch.setattr(transfers, "PIECE_BYTES", 1)
    first, second = make_peer(), make_peer()
    expected = drive(first, [asked("a", prompt)]).tokens
    proxy = Proxy(first.ready.peer_address, pause_s=0.1)
    assert drive(second, [asked("a", prompt, held=HeldBlocks(proxy.address, LENGTH // 16))]).tokens == expected
    stats = second.stats()
    assert set(stats.fetches_failed) <= {"slow"}
    assert stats.blocks_fetched < LENGTH // 16
    assert stats.blocks_loaded + stats.blocks_missed == LENGTH // 16
    assert stats.blocks_missed
    proxy.close()


def test_a_peer_that_is_gone_costs_no_request(prompt, make_peer):
    first, second = make_peer(), make_peer()
    expected = drive(first, [asked("a", prompt)]).tokens
    held = holding(first)
    first.tiers.peers.close()
    assert drive(second, [asked("a", prompt, held=held)]).tokens == expected
    assert second.stats().fetches_failed == {"unreachable": second.stats().blocks_missed}
    assert drive(second, [asked("b", prompt[::-1], held=held)]).last["b", 0].finish_reason == "length"


def test_what_the_peer_has_evicted_comes_from_its_lower_tiers_or_is_computed(prompt, make_peer, tmp_path, monkeypatch):
    first = make_peer(
        kv_memory=34 * FRAME_BYTES, kv_host_memory=11 * FRAME_BYTES, kv_disk_memory="1GiB", kv_disk_path=str(tmp_path)
    )
    second, third = make_peer(), make_peer()
    expected = drive(first, [asked("a", prompt)]).tokens
    drive(first, [asked(f"o{at}", [7 + at, *prompt[at:]]) for at in range(4)])
    first.tiers.transfers.flush()
    held = holding(first)
    assert drive(second, [asked("a", prompt, held=held)]).tokens == expected
    assert second.stats().blocks_fetched == LENGTH // 16
    with monkeypatch.context() as patch:
        patch.setattr(first.tiers.offload, "tiers", [])
        assert drive(third, [asked("a", prompt, held=held)]).tokens == expected
    assert 0 < third.stats().fetches_failed["missing"] <= LENGTH // 16


def test_engines_that_compute_other_bits_say_so_and_share_nothing(prompt, make_peer, caplog):
    first, second = make_peer(), make_peer(dtype="bfloat16")
    drive(first, [asked("a", prompt)])
    drive(second, [asked("a", prompt, held=holding(first))])
    assert second.stats().fetches_failed == {"other_format": second.stats().blocks_missed}
    assert "it holds" in caplog.text
    assert first.stats().blocks_served == 0


def test_two_engines_that_share_a_folder_find_what_the_other_has_kept(prompt, make_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(LoadTime, "pays", lambda *how: True)
    folder = {"kv_disk_memory": "1GiB", "kv_disk_path": str(tmp_path)}
    first, second = (make_engine(**{**SETTINGS, "kv_memory": 34 * FRAME_BYTES}, **folder) for _ in range(2))
    expected = drive(first, [asked("a", prompt)]).tokens
    drive(first, [asked(f"o{at}", [7 + at, *prompt[at:]]) for at in range(4)])
    first.tiers.transfers.flush()
    assert drive(second, [asked("a", prompt)]).tokens == expected
    assert second.stats().blocks_loaded == LENGTH // 16
    first.close()
    second.close()


def test_what_is_read_beside_steps_is_whole_or_not_there(prompt, make_peer):
    core = make_peer(kv_memory=34 * FRAME_BYTES)
    digests = []
    extend_chain(digests, core.root(asked("q", prompt)), prompt, 16)
    drive(core, [asked("a", prompt)])
    frames, during = core.executor.frames, []

    class Frames:
        def read(self, numbers):
            while during:
                during.pop()()
            return frames.read(numbers)

    served = ServedBlocks(core.memory, Frames(), core.tiers.offload, None, serves_pool=True)
    blocks = [(digest, 0) for digest in digests]
    truth = [record.copy() for _, record in served.find(blocks)]
    during.append(lambda: drive(core, [asked(f"o{at}", [7 + at, *prompt[at:]]) for at in range(4)]))
    assert served.find(blocks) == [None] * len(blocks), "their frames were others' when they were read"
    drive(core, [asked("a", prompt)])
    assert all(np.array_equal(found[1], record) for found, record in zip(served.find(blocks), truth, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_one_engine_has_begun_another_goes_on_with(prompt, make_peer, temperature):
    first, second = make_peer(), make_peer()
    whole = drive(make_peer(), [asked("q", prompt, temperature=temperature)]).tokens["q", 0]
    begun = drive(first, [asked("q", prompt, temperature=temperature, max_tokens=1)]).tokens["q", 0]
    rest = asked("q", prompt, temperature=temperature, held=holding(first))
    rest.answered = begun
    assert begun + drive(second, [rest]).tokens["q", 0] == whole
    assert second.stats().blocks_fetched == LENGTH // 16
