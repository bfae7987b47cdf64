"""Peers: engines that give each other the blocks that they hold. This engine's own server, and its store of others'."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from pagemill.engine.messages import Peering
from pagemill.errors import ConfigError, KVStoreError
from pagemill.kvcache.block_server import BlockServer, Found
from pagemill.kvcache.frame_access import FrameAccess
from pagemill.kvcache.offload_tiers import OffloadTiers
from pagemill.kvcache.peer_store import PeerStore
from pagemill.kvcache.store_format import StoreFormat
from pagemill.kvcache.tcp_peer import TcpPeer
from pagemill.memory.manager import MemoryManager
from pagemill.memory.work import BlockName

ROOT = bytes(32)
"""Stands for a parent that is not known: a block in a lower tier is asked for by its digest alone."""


class PeerLink:
    """Serves this engine's blocks, and knows those of others. Raises ConfigError where it cannot listen.

    address: where peers find it.
    """

    def __init__(self, peering: Peering, format: StoreFormat, store: PeerStore, blocks: ServedBlocks) -> None:
        self.store = store
        try:
            self._server = BlockServer(blocks.find, format, blocks.num_groups, peering.secret, peering.host)
        except OSError as error:
            raise ConfigError(
                f"kv_transfer_host is {peering.host!r}, where blocks cannot be served: {error}; give an address of "
                f"this machine, or switch kv_transfer off",
                param="kv_transfer_host",
            ) from error
        self.address = self._server.address

    def figures(self) -> dict[str, Any]:
        """Returns what `EngineStats` says of peers."""
        fetched, served = self.store.stats(), self._server.stats()
        return {
            "blocks_fetched": fetched.blocks,
            "fetched_bytes": fetched.bytes,
            "fetching_s": fetched.seconds,
            "fetches_failed": dict(fetched.failed),
            "blocks_served": served.blocks,
            "served_bytes": served.bytes,
            "peers_refused": served.refused,
        }

    def close(self) -> None:
        """Ends both directions. Nobody reads blocks of this engine any more."""
        self._server.close()
        self.store.close()


def peer_store(peering: Peering, format: StoreFormat) -> PeerStore:
    """Returns a store of what peers hold, over TCP."""
    return PeerStore(lambda address: TcpPeer(address, format, peering.secret), format.record_bytes)


class ServedBlocks:
    """Finds what peers ask for: in the pool, beside the steps, or else in the tiers below it. Thread-safe.

    serves_pool: False where published blocks are written to once more.
    """

    def __init__(
        self, memory: MemoryManager, frames: FrameAccess, tiers: OffloadTiers, format: StoreFormat, serves_pool: bool
    ) -> None:
        self._memory = memory
        self._frames = frames
        self._tiers = tiers
        self._format = format
        self._serves_pool = serves_pool
        self.num_groups = len(memory.windows)

    def find(self, blocks: Sequence[tuple[bytes, int]]) -> Found:
        """Returns the blocks (digest, group) that are there. What cannot be read is not there."""
        found: list[Any] = [None] * len(blocks)
        with suppress(KVStoreError, MemoryError, IndexError):
            if self._serves_pool:
                self._find_in_pool(blocks, found)
            self._find_below(blocks, found)
        return found

    def _find_in_pool(self, blocks: Sequence[tuple[bytes, int]], found: list[Any]) -> None:
        placed = [self._memory.find_placed(*block) for block in blocks]
        rows = [row for row, place in enumerate(placed) if place is not None]
        if not rows:
            return
        records, whole = self._frames.read([place.frame for place in placed if place is not None])
        for row, record, read in zip(rows, records, whole, strict=True):
            place = placed[row]
            if read and place is not None and self._memory.find_placed(*blocks[row]) == place:
                found[row] = place.name, record

    def _find_below(self, blocks: Sequence[tuple[bytes, int]], found: list[Any]) -> None:
        rows = [row for row, each in enumerate(found) if each is None]
        if not rows or not self._tiers.tiers:
            return
        records = np.empty((len(rows), self._format.record_bytes), dtype=np.uint8)
        sources = self._tiers.read_here([blocks[row] for row in rows], records)
        for row, record, source in zip(rows, records, sources, strict=True):
            if source is not None:
                found[row] = BlockName(*blocks[row], ROOT, 0), record
