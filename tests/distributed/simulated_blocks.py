"""The blocks of a simulated engine: real tiers, transfers, store of peers, server and wire, over a simulated pool.

A block's bytes follow from its digest, so that whoever uses another one is seen. Threads and sockets are simulated.
"""

import contextlib
import itertools
from collections import Counter, OrderedDict
from types import SimpleNamespace

import numpy as np
from simulated_threads import Pool, Process, Thread, sleep

from pagemill.engine.peering import PeerLink, ServedBlocks, peer_store
from pagemill.engine.tiers import Tiers
from pagemill.kvcache import (
    block_server,
    offload_tiers,
    peer_wire,
    tcp_peer,
    transfers,
)
from pagemill.kvcache import (
    peer_store as peer_store_module,
)
from pagemill.kvcache.frame_access import Reading
from pagemill.kvcache.offload_tiers import OffloadTiers
from pagemill.kvcache.peer_wire import PeerError
from pagemill.kvcache.store_format import StoreFormat
from pagemill.memory.offload import Placed
from pagemill.memory.work import BlockName, Load

BLOCK_SIZE, FRAMES, PIECES, RECORD = 4, 48, 2, 1024
FORMAT = StoreFormat("m", "ab" * 8, f"float32,{BLOCK_SIZE}", "reference", RECORD)
PIECE_BLOCKS = 1
"""Blocks of a piece of a load."""
READ_S = 0.04
"""How long a frame is read: it may be another block's meanwhile."""
LONGEST_OVER_S = tcp_peer.CONNECT_S + (tcp_peer.CONNECT_S + tcp_peer.SILENT_S) + tcp_peer.SILENT_S
"""How long a read from a peer may go on behind its deadline: a connection, a greeting and a part were begun before."""


def content(digest):
    """Returns the bytes of the block of this digest."""
    return np.frombuffer(digest * (RECORD // len(digest)), dtype=np.uint8).reshape(PIECES, -1)


class SimulatedPool:
    """Is a `MemoryManager` as far as tiers and peers ask it, and its frames' `FrameAccess`. What was used longest ago
    makes room."""

    block_size, windows, num_frames, tenants = BLOCK_SIZE, (None,), FRAMES, ()

    def __init__(self):
        self.frames = np.zeros((FRAMES, PIECES, RECORD // PIECES), dtype=np.uint8)
        self._free, self._placed = [*range(FRAMES)], OrderedDict()
        self._versions = itertools.count()
        self.changed = {}
        """By digest that has come or gone since it was told: whether it is there."""

    def take(self):
        """Returns a frame for a block; None where all are being written."""
        if not self._free and self._placed:
            digest, placed = self._placed.popitem(last=False)
            self.changed[digest] = False
            self._free.append(placed.frame)
        return self._free.pop() if self._free else None

    def give_back(self, frame):
        self.frames[frame] = 0xA5
        self._free.append(frame)

    def publish(self, digest, frame):
        if digest in self._placed:
            self.give_back(frame)
            return
        self._placed[digest] = Placed(BlockName(digest, 0, bytes(32), 0), frame, frame, next(self._versions))
        self.changed[digest] = True

    def find(self, digests):
        """Returns the records of a chain's beginning that is here."""
        here = list(itertools.takewhile(lambda digest: digest in self._placed, digests))
        for digest in reversed(here):
            self._placed.move_to_end(digest)
        return [self.frames[self._placed[digest].frame] for digest in here]

    def find_placed(self, digest, group):
        return self._placed.get(digest)

    def reach(self, digests, stored):
        return len([*itertools.takewhile(lambda each: each in self._placed or stored((each, 0)), digests)])

    def missing(self, digests):
        return [(entry, 0) for entry, digest in enumerate(digests) if digest not in self._placed]

    def read(self, frames):
        sleep(READ_S)
        return self.frames[frames].reshape(-1, RECORD), [True] * len(frames)

    def begin_read(self, frames):
        return Reading(*self.read(frames))

    def mark(self):
        return None

    def begin_writes(self):
        pass

    end_writes = begin_writes

    @contextlib.contextmanager
    def write(self, frames, after):
        yield [self.frames[frame] for frame in frames]


class LyingBlocks(ServedBlocks):
    """May give another block than it was asked for, or none."""

    lie = None

    def find(self, blocks):
        found = super().find(blocks)
        if self.lie == "another":
            return [each and (each[0]._replace(digest=each[0].digest[::-1]), each[1]) for each in found]
        return [None] * len(blocks) if self.lie == "none" else found


class WatchedPeer:
    """Passes a read on, and sees that its peer is asked only when it may be, and that what comes is what was asked for.

    note: takes what is wrong.
    """

    def __init__(self, peer, loop, note):
        self._peer, self._loop, self._note = peer, loop, note
        self._failures, self._paused_until_s = 0, 0.0
        self.missing, self.failed, self.came = set(), Counter(), 0

    def read(self, blocks, out, deadline_s):
        if self._loop.time() < self._paused_until_s:
            self._note("a peer that has failed was asked before its pause was over")
        if any(digest in self.missing for digest, _ in blocks):
            self._note("a peer was asked again for what it has no more")
        try:
            came = self._peer.read(blocks, out, deadline_s)
        except PeerError as error:
            self.failed[error.reason] += len(blocks)
            now_s = self._loop.time()
            if self._paused_until_s <= now_s:
                pause_s = min(peer_store_module.FIRST_PAUSE_S * 2**self._failures, peer_store_module.LONGEST_PAUSE_S)
                self._paused_until_s, self._failures = now_s + pause_s, self._failures + 1
            raise
        self._failures = 0
        for (digest, _), there, record in zip(blocks, came, out, strict=True):
            if not there:
                self.failed["missing"] += 1
                self.missing.add(digest)
            elif (record != content(digest)).any():
                self._note("a block came whose bytes are another's")
        self.came += sum(came)
        return came

    def close(self):
        self._peer.close()


class EngineBlocks:
    """Loads what peers hold, and serves what is in the pool. wrong: takes what goes wrong."""

    def __init__(self, links, peering, wrong):
        self.links, self.pool, self.wrong = links, SimulatedPool(), wrong
        self.process = Process(peering.host, wrong.append)
        self.watched, self._numbers, self._loads, self._ended = {}, itertools.count(), {}, 0
        with self.process:
            store = peer_store(peering, FORMAT)
            connect = store._connect  # noqa: SLF001
            store._connect = lambda address: self._watch(address, connect(address))  # noqa: SLF001
            offload = OffloadTiers([], RECORD, store)
            self.served = LyingBlocks(self.pool, self.pool, offload, FORMAT, serves_pool=True)
            peers = PeerLink(peering, FORMAT, store, self.served)
            self.tiers = Tiers(offload, SimpleNamespace(frames=self.pool), self.pool, "recompute", peers=peers)

    @property
    def address(self):
        return self.tiers.peers.address

    @property
    def loading(self):
        return bool(self._loads)

    def _watch(self, address, peer):
        self.watched[address] = WatchedPeer(peer, self.process.loop, self.wrong.append)
        return self.watched[address]

    def note_held(self, request, root, digests):
        """Notes what a peer is said to hold of a request's blocks."""
        self.tiers.note_held(request, root)
        if request.held is not None and request.held.address in self.watched:
            self.watched[request.held.address].missing.difference_update(digests[: request.held.num_blocks])

    def note_step(self, seconds, token_s):
        self.tiers.prefill.s_per_token = token_s
        self.tiers.note_step(SimpleNamespace(num_tokens=0, num_generating=0), seconds)

    def load(self, digests):
        """Begins to load what peers hold of a chain. Returns the load's number; None where nothing is to be loaded."""
        found = len(self.pool.find(digests))
        reach = self.tiers.stored(digests, found, False)
        missing = [digests[entry] for entry, _ in self.pool.missing(digests[:reach])]
        frames = [frame for _ in missing if (frame := self.pool.take()) is not None]
        missing = missing[: len(frames)]
        if not missing:
            return None
        load = Load(next(self._numbers), [(digest, 0) for digest in missing], frames)
        sources = {
            each for each in self.tiers.peers.store.where([(digest, 0) for digest in missing]) if each is not None
        }
        block_s = self.tiers.transfers.block_s or transfers.UNMEASURED_BLOCK_S
        patience_s = transfers.PATIENCE_S + 2 * len(missing) * block_s
        self._loads[load.id] = load, self.process.loop.time() + patience_s + len(sources) * LONGEST_OVER_S
        self.tiers.transfers.load(load)
        return load.id

    def finished(self):
        """Returns the numbers of the loads that are over, and takes in what they have brought."""
        over = self.tiers.transfers.finished()
        for number, arrived in over.items():
            load, until_s = self._loads.pop(number)
            self._ended += len(arrived)
            ended_s = self.tiers.transfers._loading_until  # noqa: SLF001
            if ended_s > until_s:
                self.wrong.append(f"a load took {ended_s - until_s} s longer than it may")
            for (digest, _), frame, there in zip(load.blocks, load.frames, arrived, strict=True):
                if there:
                    self.pool.publish(digest, frame)
                else:
                    self.pool.give_back(frame)
        return over.keys()

    def check(self):
        """Sees that all loads are over, and that what is counted adds up."""
        moved, fetched, watched = self.tiers.transfers.stats(), self.tiers.peers.store.stats(), self.watched.values()
        assert not self._loads
        assert moved.blocks_loaded + moved.blocks_missed == self._ended
        assert moved.blocks_loaded == fetched.blocks == sum(each.came for each in watched)
        assert fetched.bytes == fetched.blocks * RECORD
        failed = sum((each.failed for each in watched), Counter())
        assert failed.keys() == fetched.failed.keys()
        assert all(failed[reason] <= count for reason, count in fetched.failed.items())
        assert fetched.failed.total() <= moved.blocks_missed

    async def close(self):
        await self.process.run(self.tiers.close)


def simulate(monkeypatch, loop, links):
    """Lets blocks travel in simulated time."""
    clock = SimpleNamespace(monotonic=loop.time, sleep=sleep)
    for module in (block_server, offload_tiers, peer_store_module, peer_wire, tcp_peer, transfers):
        monkeypatch.setattr(module, "time", clock)
    for module in (block_server, tcp_peer):
        monkeypatch.setattr(module, "socket", links.as_module())
    monkeypatch.setattr(block_server, "threading", SimpleNamespace(Thread=Thread, Lock=block_server.threading.Lock))
    monkeypatch.setattr(transfers, "started", Pool)
    monkeypatch.setattr(transfers, "LEAST_PIECE_BYTES", PIECE_BLOCKS * RECORD)
