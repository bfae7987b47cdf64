"""OffloadTiers: a chain of offload stores below the device pool, such as host memory and disk, seen as one."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import KVStoreError
from pagemill.kvcache.frame_access import Places, Records
from pagemill.memory.tier_shares import TierShares
from pagemill.memory.work import BlockName

Spill = Callable[[Sequence[BlockName], Records], None]
"""Takes in the blocks that make room in the tier above."""


LOOK_AHEAD = 64
"""The blocks of a chain that are looked up together: each look-up on disk costs more than another block in it."""


class OffloadStore(Protocol):
    """Stores blocks by digest and layer group. Thread-safe, though only one thread writes. It takes and gives records
    in host memory, and raises KVStoreError where its medium fails.

    name: what statistics and metrics call it.
    lasting: True if what it holds outlives the process; then so does what tiers below it hold.
    capacity: the most blocks that it holds.
    shares: who gives way if it is full.
    """

    name: str
    lasting: bool
    capacity: int
    shares: TierShares

    def blocks_by_tenant(self) -> dict[str, int]: ...

    def holds(self, blocks: Sequence[tuple[bytes, int]]) -> list[bool]:
        """Returns which of these blocks (digest, group) are here."""

    def read(self, blocks: Sequence[tuple[bytes, int]], out: Places) -> list[bool]:
        """Reads blocks (digest, group) into `out`, a record each. Returns which of them were here; the others' records
        are undefined."""

    def use(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Notes that these blocks were used just now, the first of them last: others make room before them."""

    def write(self, names: Sequence[BlockName], records: Records, spill: Spill) -> object:
        """Takes blocks in. A block that makes room for them ends, or goes to `spill` and is found here until that
        returns. It is one of the tenant that gives way by `shares`, the one of its blocks that was used longest ago."""

    def names(self) -> Sequence[BlockName]:
        """Returns the names of the blocks that it holds; if these end with the process, those used last first."""

    def close(self) -> None: ...


class FollowedStore(OffloadStore, Protocol):
    """An `OffloadStore` whose blocks outlive the process, and may be others' too."""

    def follow(self, group: int, most: int) -> Iterator[dict[bytes, bool]]:
        """Gives, page by page and without end, the digests of a layer group's blocks that are held (True), and of those
        that are no more (False): first all that the store has, `most` at a time, then what changes; an empty page where
        there is nothing to tell now, the first of them behind all that the store has. Raises KVStoreError, and has
        ended then."""


class RemoteStore(Protocol):
    """Reads blocks that lie in other engines. Thread-safe. It takes none, and no block leaves an engine for it."""

    def where(self, blocks: Sequence[tuple[bytes, int]]) -> list[int | None]:
        """Returns a number from 0 on for where each block (digest, group) is to be read; None for those that nobody
        has. Returns at once."""

    def read(self, blocks: Sequence[tuple[bytes, int]], out: Places, deadline_s: float) -> list[int | None]:
        """Reads blocks (digest, group) into `out`, a record each. Returns the number from where each came; None for
        those that did not by the deadline, in seconds of `time.monotonic()`."""


class OffloadTiers:
    """Chains stores, the highest first. What one gives up goes to the next. Thread-safe.

    remote: where blocks are looked for that no store has; None for nowhere. Its numbers count behind the tiers' as
    sources of blocks. records_changes: whether `take_changed` says what has come and gone in memory.
    """

    def __init__(
        self,
        tiers: Sequence[OffloadStore],
        record_bytes: int,
        remote: RemoteStore | None = None,
        records_changes: bool = False,
    ) -> None:
        self.tiers = tiers
        self.record_bytes = record_bytes
        self._remote = remote
        self.lasting = any(tier.lasting for tier in tiers)
        self._kept = next((at for at, tier in enumerate(tiers) if tier.lasting), 0)
        self._in_memory = [tier for tier in tiers if not tier.lasting]
        self._coming: dict[tuple[bytes, int], tuple[NDArray[np.uint8], Callable[[], None] | None]] = {}
        self._records_changes = records_changes and bool(self._in_memory)
        self._moved: list[tuple[bytes, int]] = []
        self._changed: list[tuple[bytes, int]] = []
        self._lock = threading.Lock()

    def guarantee(self, parts: Mapping[str, float]) -> None:
        """Keeps these parts of each tier for tenants, by name, from the next write on."""
        for tier in self.tiers:
            tier.shares.parts = parts

    def blocks_by_tenant(self) -> dict[str, dict[str, int]]:
        """Returns how many blocks each tier holds, by its name and tenants', without tiers that cannot say."""
        held = {}
        for tier in self.tiers:
            with suppress(KVStoreError):
                held[tier.name] = tier.blocks_by_tenant()
        return held

    def holds(self, blocks: Sequence[tuple[bytes, int]], lasting: bool = False) -> list[bool]:
        """Returns which blocks (digest, group) are stored here; with `lasting`, which are where they outlive the
        process, if there is such a tier."""
        found = self._locate(blocks, [None] * len(blocks), self._kept) if lasting else self.where_here(blocks)
        return [source is not None for source in found]

    def where(self, blocks: Sequence[tuple[bytes, int]]) -> list[int | None]:
        """Returns from which tier each block (digest, group) is to be read, counted from the highest, those of other
        engines last; None for those that are nowhere."""
        found = self.where_here(blocks)
        return self._ask_remote(found, lambda remote, rows: remote.where([blocks[row] for row in rows]))

    def are_remote(self, blocks: Sequence[tuple[bytes, int]]) -> bool:
        """Returns whether any of these blocks may have to come from another engine. Returns at once."""
        return self._remote is not None and any(each is not None for each in self._remote.where(blocks))

    def read(self, blocks: Sequence[tuple[bytes, int]], out: Places, deadline_s: float = math.inf) -> list[int | None]:
        """Reads blocks (digest, group) into `out`, a record each. Returns from which tier each came, as `where` does;
        None for those that were nowhere. Behind a deadline, by `time.monotonic()`, other engines are not waited for."""
        found = self.read_here(blocks, out)
        if time.monotonic() > deadline_s:
            return found
        return self._ask_remote(
            found,
            lambda remote, rows: remote.read([blocks[row] for row in rows], [out[row] for row in rows], deadline_s),
        )

    def read_here(self, blocks: Sequence[tuple[bytes, int]], out: Places) -> list[int | None]:
        """Reads blocks as `read` does, but for those of other engines."""
        with self._lock:
            coming = [self._coming.get(block) for block in blocks]
        found: list[int | None] = [None] * len(blocks)
        for row, entry in enumerate(coming):
            if entry is not None:
                record, wait = entry
                if wait is not None:
                    wait()
                out[row][:] = record.reshape(out[row].shape)
                found[row] = 0
        return self._search(
            found, lambda tier, rows: tier.read([blocks[row] for row in rows], [out[row] for row in rows])
        )

    def use(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Notes that these blocks (digest, group) were used just now, the first of them last."""
        for tier in self.tiers:
            tier.use(blocks)

    def announce(self, names: Sequence[BlockName], records: Records, wait: Callable[[], None] | None = None) -> None:
        """Counts blocks as being in the highest tier until they are written, which is about to happen. Records may
        still be on their way: they are there when `wait` has returned."""
        with self._lock:
            self._coming.update((name[:2], (record, wait)) for name, record in zip(names, records, strict=True))

    def write(self, names: Sequence[BlockName], records: Records) -> None:
        """Takes blocks in, in the highest tier. Raises KVStoreError if a tier takes no more."""
        self._take_in(0, names, records)

    def keep(self, names: Sequence[BlockName], records: Records) -> None:
        """Takes blocks in where they outlive the process, if there is such a tier."""
        self._take_in(self._kept, names, records)

    def _take_in(self, at: int, names: Sequence[BlockName], records: Records) -> None:
        try:
            self._write(at, names, records)
        finally:
            with self._lock:
                for name in names:
                    self._coming.pop(name[:2], None)
                self._changed += self._moved
            self._moved = []

    def take_changed(self) -> list[tuple[bytes, int]]:
        """Returns the blocks (digest, group) that may have come to a tier that ends with the process, or left one,
        since the last call, if that is recorded. Blocks that are announced count from when they are written."""
        with self._lock:
            changed, self._changed = self._changed, []
        return changed

    def in_memory(self, blocks: Sequence[tuple[bytes, int]]) -> list[bool]:
        """Returns which blocks (digest, group) are in tiers that end with the process, or announced."""
        with self._lock:
            here = [bool(self._in_memory) and block in self._coming for block in blocks]
        for tier in self._in_memory:
            here = [known or held for known, held in zip(here, tier.holds(blocks), strict=True)]
        return here

    def keepable(self, names: Sequence[BlockName]) -> list[BlockName]:
        """Returns those of `names`, used last first, and of the blocks here that end with the process, that have room
        where blocks outlive it, by the shares of their tenants. Raises KVStoreError."""
        ending = (name for tier in self.tiers[: self._kept] for name in tier.names())
        names = list(dict.fromkeys([*names, *ending]))
        lasting = self.tiers[self._kept :]
        held = sum((Counter(tier.blocks_by_tenant()) for tier in lasting), Counter[str]())
        kept = self.holds([name[:2] for name in names], lasting=True)
        here = Counter(name.tenant for name in compress(names, kept))
        coming = Counter(name.tenant for name in names) - here
        shares = TierShares(sum(tier.capacity for tier in lasting), lasting[0].shares.parts)
        left_out = shares.giving(held + coming) - (held - here)
        keepable = []
        for name in reversed(names):
            if left_out[name.tenant] > 0:
                left_out[name.tenant] -= 1
            else:
                keepable.append(name)
        return keepable[::-1]

    def sink(self, names: Sequence[BlockName], count: int) -> None:
        """Stores these blocks where they outlive the process too, unless they are there, `count` at a time. Raises
        KVStoreError if a tier takes no more."""
        kept = self.holds([name[:2] for name in names], lasting=True)
        sinking = [name for name, there in zip(names, kept, strict=True) if not there]
        for first in range(0, len(sinking), count):
            part = sinking[first : first + count]
            records = np.empty((len(part), self.record_bytes), dtype=np.uint8)
            there = [source is not None for source in self.read([name[:2] for name in part], records)]
            self.keep(list(compress(part, there)), records[there])

    def where_here(self, blocks: Sequence[tuple[bytes, int]]) -> list[int | None]:
        """Returns from where to read blocks as `where` does, but for those of other engines."""
        with self._lock:
            found = [0 if block in self._coming else None for block in blocks]
        return self._locate(blocks, found)

    def _ask_remote(
        self, found: list[int | None], ask: Callable[[RemoteStore, Sequence[int]], list[int | None]]
    ) -> list[int | None]:
        """Fills in where rows come from that no tier has, by what is told of them."""
        missing = [row for row, source in enumerate(found) if source is None]
        if self._remote is not None and missing:
            for row, number in zip(missing, ask(self._remote, missing), strict=True):
                found[row] = None if number is None else len(self.tiers) + number
        return found

    def _locate(
        self, blocks: Sequence[tuple[bytes, int]], found: list[int | None], highest: int = 0
    ) -> list[int | None]:
        return self._search(found, lambda tier, rows: tier.holds([blocks[row] for row in rows]), highest)

    def _search(
        self, found: list[int | None], ask: Callable[[OffloadStore, Sequence[int]], list[bool]], highest: int = 0
    ) -> list[int | None]:
        """Fills in the highest tier that has each row, where `found` has none yet. ask: returns which rows a tier
        has."""
        for at, tier in enumerate(self.tiers[highest:], highest):
            missing = [row for row, source in enumerate(found) if source is None]
            if missing:
                for row, there in zip(missing, ask(tier, missing), strict=True):
                    found[row] = at if there else None
        return found

    def _write(self, at: int, names: Sequence[BlockName], records: Records) -> None:
        if self._records_changes:
            self._moved += [name[:2] for name in names]
        if at < len(self.tiers):
            self.tiers[at].write(names, records, partial(self._write, at + 1))


class Sources:
    """Looks up from which tier each block of a chain is to be read; None for those that are nowhere. Raises
    KVStoreError.

    where: `OffloadTiers.where`, or `where_here`.
    """

    def __init__(
        self, where: Callable[[Sequence[tuple[bytes, int]]], list[int | None]], digests: Sequence[bytes]
    ) -> None:
        self._where = where
        self._digests = digests
        self._entries = {digest: entry for entry, digest in enumerate(digests)}
        self._known: dict[tuple[bytes, int], int | None] = {}

    def __getitem__(self, block: tuple[bytes, int]) -> int | None:
        if block not in self._known:
            entry, group = self._entries[block[0]], block[1]
            near = [(digest, group) for digest in self._digests[entry : entry + LOOK_AHEAD]]
            unknown = [each for each in near if each not in self._known]
            self._known.update(zip(unknown, self._where(unknown), strict=True))
        return self._known[block]
