"""What an engine tells who routes: which blocks came, and what work takes, only where it is asked to."""

import math
from types import SimpleNamespace

import pytest

from pagemill.distributed.replica import BLOCKS_AT_ONCE, in_parts, split_digests
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import DIGEST_BYTES, Held, name_in_memory, name_on_disk
from pagemill.engine.publishing import DISK_S, LISTING_S, STORING_S, Publisher
from pagemill.engine.tiers import Tiers
from pagemill.kvcache import peer_store
from pagemill.kvcache.load_time import LoadTime
from pagemill.kvcache.peer_store import KnownPeer, PeerStore
from pagemill.kvcache.peer_wire import PeerError
from pagemill.memory.kv_events import KVEvents


def test_times_that_have_moved_are_told_without_any_block():
    publisher = Publisher(SimpleNamespace(take_events=lambda: KVEvents([], [])), None, 512)
    assert publisher.take() is None
    publisher.note_step(1.0, 1000, 0)
    told = publisher.take()
    assert (told.token_s, told.tokens) == (1e-3, 1000)
    publisher.note_step(0.11, 90, 0)
    assert publisher.take() is None
    publisher.note_step(0.2, 110, 0)
    told = publisher.take()
    assert (told.token_s, told.tokens) == (pytest.approx(1.31 / 1200), 1200), "of all, not of the last"
    publisher.note_step(2e-2, 0, 1)
    assert publisher.take().step_s == 2e-2


def test_an_engine_that_does_not_publish_tells_nothing():
    made = object.__new__(EngineCore)  # without a model: what is told concerns none
    made._publisher = None
    assert made.take_held() is None


def test_the_time_of_fetches_is_told_of_each_peer_and_for_ever_of_one_left_alone(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(peer_store, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Gone:
        def read(self, blocks, out, deadline_s):
            raise PeerError("gone", "it is")

    store = PeerStore(lambda address: Gone(), 8)
    store.note_held("fast:1", [b"a"])
    store.note_held("slow:1", [b"b"])
    times = {source: LoadTime() for source in range(3)}
    for source, seconds in ((0, 7.0), (1, 1.0), (2, 9.0)):
        for _ in range(2):
            times[source].note(1, seconds)
    tiers = object.__new__(Tiers)
    tiers.peers, tiers.watch = SimpleNamespace(store=store), None
    tiers.transfers = SimpleNamespace(load_times=times)
    tiers.offload = SimpleNamespace(tiers=["host"], take_changed=list, in_memory=list)
    memory = SimpleNamespace(take_events=lambda: KVEvents([], []), leading=0, are_published=list)
    publisher = Publisher(memory, tiers, 512)

    def told_s():
        held = publisher.take()
        return held and {address: sum(line) for address, line in held.fetch_s.items()}

    assert told_s() == {"fast:1": 1.0, "slow:1": 9.0}
    store.read([(b"b", 0)], [None])
    assert told_s() == {"fast:1": 1.0, "slow:1": math.inf}
    assert told_s() is None
    store.note_held("new:1", [b"c"])
    assert told_s() is None
    now[0] += peer_store.FIRST_PAUSE_S
    assert told_s() == {"fast:1": 1.0, "slow:1": 9.0}


def test_an_engine_at_rest_looks_again_while_blocks_are_stored_or_a_peer_is_left_alone():
    tiers = SimpleNamespace(peers=None, transfers=SimpleNamespace(storing=False), watch=None)
    publisher = Publisher(SimpleNamespace(), tiers, 512)
    assert publisher.again_s() == math.inf
    peers = [KnownPeer(0, "a:1", 0.0), KnownPeer(1, "b:1", 3.0), KnownPeer(2, "c:1", 8.0)]
    tiers.peers = SimpleNamespace(store=SimpleNamespace(peers=lambda: peers))
    assert publisher.again_s() == 3.0
    tiers.transfers.storing = True
    assert publisher.again_s() == STORING_S < 1.0
    assert Publisher(SimpleNamespace(), None, 512).again_s() == math.inf


def test_what_is_on_disk_is_told_by_names_of_its_own_with_the_time_of_loads():
    first, second = bytes(range(32)), bytes(range(32, 64))
    assert len({name for digest in (first, second) for name in (name_in_memory(digest), name_on_disk(digest))}) == 4
    assert {len(name_in_memory(first)), len(name_on_disk(first))} == {DIGEST_BYTES}
    changes, load_time = [{}, {first: False, second: True}, {}, {}, {}], LoadTime()
    tiers = object.__new__(Tiers)
    tiers.peers, tiers.transfers = None, SimpleNamespace(load_times={0: LoadTime(), 1: load_time}, storing=False)
    tiers.offload = SimpleNamespace(tiers=["host", "disk"], take_changed=list, in_memory=lambda blocks: [])
    tiers.watch = SimpleNamespace(take=lambda: changes.pop(0), has_more=True)
    events = [KVEvents([], []), KVEvents([first], [])] + [KVEvents([], [])] * 3
    memory = SimpleNamespace(take_events=lambda: events.pop(0), leading=0, are_published=list)
    publisher = Publisher(memory, tiers, 512)
    assert publisher.take() is None
    held = publisher.take()
    assert held.stored == name_in_memory(first) + name_on_disk(second)
    assert held.removed == name_on_disk(first)
    assert held.disk_s is None
    assert publisher.take() is None
    for _ in range(2):
        load_time.note(4, 2.0)
    held = publisher.take()
    assert (held.stored, held.removed) == (b"", b"")
    assert held.disk_s[0] + 4 * held.disk_s[1] == 2.0
    assert publisher.take() is None
    assert publisher.again_s() == LISTING_S
    tiers.watch.has_more = False
    assert publisher.again_s() == DISK_S


@pytest.mark.parametrize("count", [0, 1, 3 * BLOCKS_AT_ONCE + 1])
def test_a_new_front_end_is_told_of_many_blocks_in_parts(count):
    blocks = {number.to_bytes(DIGEST_BYTES, "little") for number in range(count)}
    parts = [*in_parts(Held(removed=b"12345678", token_s=0.5), blocks)]
    assert {(part.removed, part.token_s) for part in parts} == {(b"", 0.5)}
    told = [split_digests(part.stored) for part in parts]
    assert max(map(len, told)) <= BLOCKS_AT_ONCE
    assert {name for part in told for name in part} == blocks
