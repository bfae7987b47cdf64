"""PeerStore: blocks that other engines hold, as an offload store that is only read.

It asks nobody what is there. Who sends a request says which peer holds how much of its chain, and that is remembered by
digest until something newer is said, or the peer does not have it. A peer from which a block could not be had is left
alone for a while, which doubles each time; what it has is computed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pagemill.kvcache.frame_access import Places
from pagemill.kvcache.peer_wire import PeerError

logger = logging.getLogger(__name__)

MAX_KNOWN = 1 << 18
"""Blocks of which it is remembered who holds them; of more, those that were named longest ago are forgotten."""
MAX_PEERS = 1024
"""Peers that are remembered; of more, those that were named longest ago are forgotten."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 64.0
"""How long a peer is left alone: after a first failure, and at most."""


class Peer(Protocol):
    """Another engine, whatever carries its blocks here. Thread-safe."""

    def read(self, blocks: Sequence[tuple[bytes, int]], out: Places, deadline_s: float = math.inf) -> list[bool]:
        """Reads blocks as `OffloadStore.read` does, in a bounded time. Raises PeerError, "slow" behind a deadline by
        `time.monotonic()`."""

    def close(self) -> None: ...


@dataclass
class FetchStats:
    """Counts what came from peers since the start: blocks, their bytes, the seconds of the reads, each thread's apart;
    and blocks that were wanted and did not come, by reason (`peer_wire.REASONS`)."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)


@dataclass
class _Known:
    """A peer. paused_until_s: not asked before, by `time.monotonic()`; reason: of that. told: reasons that have been
    logged."""

    address: str
    peer: Peer
    failures: int = 0
    paused_until_s: float = 0.0
    reason: str = ""
    told: set[str] = field(default_factory=set)


class KnownPeer(NamedTuple):
    """Names a peer: its number as a source of blocks, its address, and for how many seconds it is left alone yet."""

    number: int
    address: str
    paused_s: float


class PeerStore:
    """Thread-safe. connect: makes a peer of an address, without a call to it. Numbers of peers are never used twice."""

    def __init__(self, connect: Callable[[str], Peer], record_bytes: int) -> None:
        self._connect = connect
        self._record_bytes = record_bytes
        self._lock = threading.Lock()
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._peers: dict[int, _Known] = {}
        self._next = 0
        self._holders: OrderedDict[bytes, int] = OrderedDict()
        self._stats = FetchStats()

    def stats(self) -> FetchStats:
        with self._lock:
            stats = self._stats
            return FetchStats(stats.blocks, stats.bytes, stats.seconds, stats.failed.copy())

    def note_held(self, address: str, digests: Sequence[bytes]) -> None:
        """Notes that the peer at this address holds these blocks, in every layer group."""
        with self._lock:
            number = self._number(address)
            for digest in digests:
                self._holders[digest] = number
                self._holders.move_to_end(digest)
            while len(self._holders) > MAX_KNOWN:
                self._holders.popitem(last=False)

    def where(self, blocks: Sequence[tuple[bytes, int]]) -> list[int | None]:
        """Returns the number of the peer from which each block (digest, group) is to be read; None if none is known, or
        it is left alone."""
        now = time.monotonic()
        with self._lock:
            return [self._asked(self._holders.get(digest), now) for digest, _ in blocks]

    def read(self, blocks: Sequence[tuple[bytes, int]], out: Places, deadline_s: float = math.inf) -> list[int | None]:
        """Reads blocks (digest, group) into `out`, a record each. Returns from which peer each came; None for those
        that could not be had by the deadline."""
        sources = self.where(blocks)
        self._count_left_out([block for block, source in zip(blocks, sources, strict=True) if source is None])
        found: list[int | None] = [None] * len(blocks)
        for number in {source for source in sources if source is not None}:
            rows = [row for row, source in enumerate(sources) if source == number]
            came = self._read(number, [blocks[row] for row in rows], [out[row] for row in rows], deadline_s)
            for row, there in zip(rows, came, strict=True):
                found[row] = number if there else None
        return found

    def peers(self) -> list[KnownPeer]:
        """Returns the peers that are known; some may be gone, since nobody says so here."""
        now = time.monotonic()
        with self._lock:
            return [
                KnownPeer(number, known.address, max(0.0, known.paused_until_s - now))
                for number, known in self._peers.items()
            ]

    def close(self) -> None:
        with self._lock:
            peers, self._peers = [*self._peers.values()], {}
            self._holders.clear()
        for each in peers:
            each.peer.close()

    def _number(self, address: str) -> int:
        """Returns a peer's number; makes it known if it is not."""
        if address not in self._numbers:
            self._numbers[address] = self._next
            self._peers[self._next] = _Known(address, self._connect(address))
            self._next += 1
            if len(self._numbers) > MAX_PEERS:
                _, oldest = self._numbers.popitem(last=False)
                self._peers.pop(oldest).peer.close()
        self._numbers.move_to_end(address)
        return self._numbers[address]

    def _asked(self, number: int | None, now: float) -> int | None:
        known = None if number is None else self._peers.get(number)
        return number if known is not None and known.paused_until_s <= now else None

    def _count_left_out(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Counts blocks that are not asked for because another could not be had just before."""
        with self._lock:
            for digest, _ in blocks:
                known = self._peers.get(self._holders.get(digest, -1))
                if known is not None:
                    self._stats.failed[known.reason] += 1

    def _read(self, number: int, blocks: Sequence[tuple[bytes, int]], out: Places, deadline_s: float) -> list[bool]:
        with self._lock:
            known = self._peers.get(number)
        if known is None:
            return [False] * len(blocks)
        begin = time.monotonic()
        try:
            came = known.peer.read(blocks, out, deadline_s)
        except PeerError as error:
            self._note_failure(known, error, len(blocks))
            return [False] * len(blocks)
        with self._lock:
            known.failures = 0
            stats, count = self._stats, sum(came)
            stats.blocks += count
            stats.bytes += count * self._record_bytes
            stats.seconds += time.monotonic() - begin
            if count < len(came):
                stats.failed["missing"] += len(came) - count
                for (digest, _), there in zip(blocks, came, strict=True):
                    if not there and self._holders.get(digest) == number:
                        del self._holders[digest]
        return came

    def _note_failure(self, known: _Known, error: PeerError, wanted: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._stats.failed[error.reason] += wanted
            if known.paused_until_s <= now:  # else another thread's read has failed at the same time
                known.paused_until_s = now + min(FIRST_PAUSE_S * 2**known.failures, LONGEST_PAUSE_S)
                known.failures += 1
            known.reason = error.reason
            first = error.reason not in known.told
            known.told.add(error.reason)
        if first:
            logger.warning("blocks of the replica at %s are computed, not fetched: %s", known.address, error)
