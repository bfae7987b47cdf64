"""LowerTiers: host memory and disk below the device pool, seen as one store of blocks by digest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from pagemill.errors import KVStoreError
from pagemill.kvcache.disk_store import DiskStore
from pagemill.kvcache.host_store import HostStore
from pagemill.kvcache.records import Records
from pagemill.memory.work import BlockName


class LowerTiers:
    """At least one of the two. What host memory gives up goes to disk. Thread-safe."""

    def __init__(self, host: HostStore | None, disk: DiskStore | None, record_bytes: int) -> None:
        self.host = host
        self.disk = disk
        self.record_bytes = record_bytes

    def num_blocks(self) -> dict[str, int]:
        """How many blocks each tier holds; of a disk that can not say, nothing."""
        held = {} if self.host is None else {"host": len(self.host)}
        if self.disk is not None:
            with suppress(KVStoreError):
                held["disk"] = self.disk.stats().blocks
        return held

    def find(self, digests: Sequence[bytes], groups: int) -> int:
        """How many of `digests`, from the first on without a gap, are stored for all layer groups."""
        count = len(digests)
        for group in range(groups):
            reached = 0
            while step := max(tier.find(digests[reached:count], group) for tier in self._tiers()):
                reached += step
            count = min(count, reached)
        return count

    def holds(self, name: BlockName, lasting: bool = False) -> bool:
        """Whether a block is stored; with `lasting`, where it outlives the process, if there is such a tier."""
        tiers = self._tiers()[-1:] if lasting else self._tiers()
        return any(tier.find([name.digest], name.group) for tier in tiers)

    def read(self, blocks: Sequence[tuple[bytes, int]], out: Records) -> list[bool]:
        """Blocks (digest, group) into `out`, a record each; which of them were there."""
        found = [False] * len(blocks)
        for tier in self._tiers():
            missing = [row for row, whole in enumerate(found) if not whole]
            if not missing:
                break
            arrived = tier.read([blocks[row] for row in missing], [out[row] for row in missing])
            for row, whole in zip(missing, arrived, strict=True):
                found[row] = whole
        return found

    def write(self, names: Sequence[BlockName], records: Records) -> None:
        """Takes blocks in, in the highest tier. Raises KVStoreError if the disk takes no more."""
        if self.host is not None:
            spilled = self.host.write(names, records)
            names, records = [name for name, _ in spilled], [record for _, record in spilled]
        try:
            if self.disk is not None and names:
                self.disk.write(names, records)
        finally:
            if self.host is not None:
                self.host.let_go(names)

    def keep(self, names: Sequence[BlockName], records: Records) -> None:
        """Takes blocks in where they outlive the process, if there is such a tier."""
        if self.disk is not None:
            self.disk.write(names, records)
        else:
            self.write(names, records)

    def sink(self, count: int) -> None:
        """Stores what host memory holds on disk too, if there is one, `count` blocks at a time. None may be written
        meanwhile. Raises KVStoreError if the disk takes no more."""
        if self.host is not None and self.disk is not None:
            for names, records in self.host.parts(count):
                self.disk.write(names, records)

    def _tiers(self) -> list[HostStore | DiskStore]:
        return [tier for tier in (self.host, self.disk) if tier is not None]
