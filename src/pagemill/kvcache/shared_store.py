"""SharedStore: the disk tier in a folder that several machines mount, such as NFS, or an object store behind a file
system. A block is a file by itself, so nothing is locked, and no process needs to know of the others.

In `<model, format and kernels>.shared`, a block's path is its name (`shared_files`), and its file's content a header
with a checksum, and the record. A file appears whole, by being renamed, and never changes. Which files there are is
known from listing the folders, which a thread does from time to time: no step waits for the network. Nor does one wait
for that thread, which takes the interpreter, and the lock, for moments only, and rests between them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import KVStoreError
from pagemill.kvcache.frame_access import Place, Places, Records
from pagemill.kvcache.offload_tiers import Spill
from pagemill.kvcache.shared_files import (
    SHARD,
    TENANT_FILE,
    TENANT_FOLDER,
    Block,
    folder_of,
    name_at,
    path_of,
    shard_of,
    tenant_folder,
    write_whole,
)
from pagemill.kvcache.store_format import HEAD_BYTES, StoreFormat, head_of, is_whole
from pagemill.memory.tier_shares import TierShares
from pagemill.memory.work import BlockName
from pagemill.tenant_limits import DEFAULT_TENANT

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
LOOK_SHARE = 0.1
"""The largest share of the time that listing folders may take."""
REST_S = 0.0005
"""The shortest rest behind each folder, and behind each page of what is learned."""
PAGE = 1000
"""How many blocks are learned or forgotten while the lock is held."""
FIRST_LOOK_S = 2.0
"""The longest wait for the first look, when the store is opened."""
TOUCH_S = 60.0
"""Other processes learn of a block's use if it was last told so long ago."""
TICK_S = 1e-6
"""The least difference between times of use."""
AHEAD_S = 60.0
"""A time of use that lies further in the future is one by a clock that was wrong, and counts as now."""
UNFINISHED_S = 3600.0
"""A file that has not been finished for so long never will be."""


class _Found:
    """Collects blocks that a look has found, in texts and numbers, which garbage collection does not visit."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._used_s, self._depths = array("d"), array("q")

    def add(self, path: str, used_s: float, depth: int) -> None:
        self._paths.append(path)
        self._used_s.append(used_s)
        self._depths.append(depth)

    def pages(self) -> Iterator[list[tuple[str, float]]]:
        """Gives paths and times of use, PAGE at a time, what was used longest ago first, of it a chain's end."""
        order = np.lexsort((-np.array(self._depths), np.array(self._used_s)))
        for first in range(0, len(order), PAGE):
            yield [(self._paths[at], self._used_s[at]) for at in order[first : first + PAGE].tolist()]


class SharedStore:
    """Implements `OffloadStore`. Thread-safe. Raises KVStoreError for a folder that cannot be used, and for what it
    refuses.

    limit_bytes: the most that all blocks of this model, format and set of kernels may take, whoever wrote them. Of the
    tenant that has borrowed most, what was used longest ago makes room, a chain's end first. Processes see each other's
    blocks with their next look, so that together they may have more than the limit by what they write in between.
    """

    name = "disk"
    lasting = True

    def __init__(self, root: Path, format: StoreFormat, limit_bytes: int) -> None:
        self.format = format
        self.folder = root / f"{format.key}.shared"
        self.block_bytes = HEAD_BYTES + format.record_bytes
        self.capacity = limit_bytes // self.block_bytes
        if not self.capacity:
            raise KVStoreError(
                f"the KV store may take {limit_bytes} bytes, but one block takes {self.block_bytes}; raise "
                f"kv_disk_memory"
            )
        self.shares = TierShares(self.capacity)
        self._known: dict[Block, str] = {}
        """Blocks by name, with their paths."""
        self._shards: dict[str, set[str]] = {}
        """The same paths, by the folder that they lie in."""
        self._tenants: dict[str, str] = {}
        """The tenants, by the names of their folders."""
        self._order: dict[str, OrderedDict[Block, float]] = {}
        self._touched: dict[Block, float] = {}
        self._changed: dict[Block, None] | None = None
        """Blocks that have come or gone and are not told to who follows; None while nobody does."""
        self._lock = threading.RLock()
        self._closing, self._looked = threading.Event(), threading.Event()
        self._looks_fail = False
        self._rested_s = self._latest_s = 0.0
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.listdir(self.folder)
        except OSError as error:
            raise KVStoreError(f"the KV store {self.folder} cannot be opened: {error}") from error
        self._thread = threading.Thread(target=self._keep_looking, name="shared KV store", daemon=True)
        self._thread.start()
        self._looked.wait(FIRST_LOOK_S)

    # What is there

    def holds(self, blocks: Sequence[Block]) -> list[bool]:
        with self._lock:
            return [block in self._known for block in blocks]

    def names(self) -> list[BlockName]:
        """Returns the names of all blocks, beginnings of chains first."""
        with self._lock:
            paths = [(path, self._tenants[tenant_folder(path)]) for path in self._known.values()]
        names = (name_at(*each) for each in paths)
        return sorted((name for name in names if name is not None), key=lambda name: name.depth)

    def blocks_by_tenant(self) -> dict[str, int]:
        with self._lock:
            return {tenant: len(order) for tenant, order in self._order.items() if order}

    def follow(self, group: int, most: int) -> Iterator[dict[bytes, bool]]:
        """Implements `FollowedStore.follow`, for one caller; what other machines do counts from the next look on."""
        with self._lock:
            self._changed = dict.fromkeys(self._known)
        while True:
            with self._lock:
                blocks = [self._changed.popitem()[0] for _ in range(min(most, len(self._changed)))]
                page = {block[0]: block in self._known for block in blocks if block[1] == group}
                more = bool(self._changed)
            if page or not more:
                yield page

    # Looking

    def look(self) -> None:
        """Tells other processes what was used since the last look, and finds out which blocks they have written and
        removed. Rests between folders, so that it takes LOOK_SHARE of the time. Raises OSError."""
        self._rested_s = 0.0
        self._tell()
        found = _Found()
        for shard in self._list_shards():
            begin_s = time.monotonic()
            self._compare(shard, found)
            if self._rest(time.monotonic() - begin_s):
                return
        for page in found.pages():
            with self._lock:
                for path, used_s in page:
                    self._learn(path, used_s)
            if self._rest(0.0):
                return

    def _rest(self, took_s: float) -> bool:
        """Rests, but for the first look no longer than it must, and returns whether the store is being closed."""
        begin_s = time.monotonic()
        rest_s = took_s * (1 / LOOK_SHARE - 1) if self._looked.is_set() else 0.0
        closing = self._closing.wait(max(REST_S, rest_s))
        self._rested_s += time.monotonic() - begin_s
        return closing

    def _list_shards(self) -> list[str]:
        """Returns the paths of the folders in which blocks lie, and of those that have gone with their blocks."""
        shards: dict[str, None] = {}
        for folder in filter(TENANT_FOLDER.fullmatch, os.listdir(self.folder)):
            with suppress(FileNotFoundError, NotADirectoryError):
                self._charge(folder, self._whose(folder))
                found = filter(SHARD.fullmatch, os.listdir(self.folder / folder))
                shards |= dict.fromkeys(f"{folder}/{shard}" for shard in found)
        with self._lock:
            return [*shards, *(self._shards.keys() - shards)]

    def _whose(self, folder: str) -> str:
        """Returns the tenant whose folder this is. Where its file does not say so, it is written again if that is known
        anyway; if not, the folder counts as the default tenant's until one of its blocks is stored."""
        path = self.folder / folder / TENANT_FILE
        if (content := _content(path)) is not None and folder_of(tenant := content.decode(errors="replace")) == folder:
            return tenant
        with self._lock:
            tenant = self._tenants.get(folder, DEFAULT_TENANT)
        if folder_of(tenant) == folder:
            with suppress(OSError):
                write_whole(path, [tenant.encode()], self._next_s())
        return tenant

    def _charge(self, folder: str, tenant: str) -> None:
        """Notes whose a folder is. What was another's before is found by the next look."""
        with self._lock:
            if self._tenants.get(folder, tenant) != tenant:
                for shard in [shard for shard in self._shards if tenant_folder(shard) == folder]:
                    self._forget_files(list(self._shards[shard]))
            self._tenants[folder] = tenant

    def _compare(self, shard: str, found: _Found) -> None:
        """Lists a folder. Forgets blocks that have left it, adds those that are new to `found`, and removes files that
        some process has left unfinished."""
        with self._lock:
            before = set(self._shards.get(shard, ()))
        listed = set[str]()
        with suppress(FileNotFoundError, NotADirectoryError):
            listed = {f"{shard}/{file}" for file in os.listdir(self.folder / shard)}
        gone = list(before - listed)
        for first in range(0, len(gone), PAGE):
            with self._lock:
                self._forget_files(gone[first : first + PAGE])
        for path in listed - before:
            with suppress(FileNotFoundError):
                name, used_s = name_at(path, ""), (self.folder / path).stat().st_mtime
                if name is not None:
                    found.add(path, _past(used_s), name.depth)
                elif time.time() - used_s > UNFINISHED_S:
                    os.unlink(self.folder / path)

    def _tell(self) -> None:
        """Tells other processes what was used since the last time, and keeps alive what says whose it is."""
        with self._lock:
            touched, self._touched = self._touched, {}
            files = {self._known[block]: used_s for block, used_s in touched.items() if block in self._known}
        files |= {f"{tenant_folder(path)}/{TENANT_FILE}": used_s for path, used_s in files.items()}
        for path, used_s in files.items():
            with suppress(OSError):
                os.utime(self.folder / path, (used_s, used_s))

    def _keep_looking(self) -> None:
        wait_s = 0.0
        while not self._closing.wait(wait_s):
            began_s = time.monotonic()
            try:
                self.look()
                self._looks_fail = False
            except OSError as error:
                if not self._looks_fail:
                    logger.warning(
                        "the KV store %s cannot be listed: %s; what is known of it stays", self.folder, error
                    )
                self._looks_fail = True
            self._looked.set()
            took_s = time.monotonic() - began_s
            wait_s = max(LOOK_EVERY_S, (took_s - self._rested_s) / LOOK_SHARE) - took_s

    # Reading and writing

    def read(self, blocks: Sequence[Block], out: Places) -> list[bool]:
        """Reads blocks (digest, group) into `out`, a record each. Returns which of them were there, whole; the other
        records hold nothing of use. A broken block is removed."""
        with self._lock:
            paths = [self._known.get(block) for block in blocks]
        image = np.empty(self.block_bytes, dtype=np.uint8)
        return [
            path is not None and self._read_one(block, path, image, place)
            for block, path, place in zip(blocks, paths, out, strict=True)
        ]

    def _read_one(self, block: Block, path: str, image: NDArray[np.uint8], place: Place) -> bool:
        try:
            with (self.folder / path).open("rb", buffering=0) as file:
                taken = 0
                while count := file.readinto(image[taken:].data):
                    taken += count
        except OSError:
            with self._lock:
                self._forget(block)
            return False
        head, record = np.split(image, [HEAD_BYTES])
        if taken != self.block_bytes or not is_whole(head, record, *block):
            self._remove(block, path)
            return False
        place[:] = record.reshape(place.shape)
        return True

    def use(self, blocks: Sequence[Block]) -> None:
        """Notes a use; other processes learn of it with the next look."""
        now_s = time.time()
        with self._lock:
            for block in reversed(blocks):
                if (path := self._known.get(block)) is not None:
                    order = self._order[self._tenants[tenant_folder(path)]]
                    if abs(now_s - order[block]) > TOUCH_S:
                        order[block] = self._touched[block] = self._next_s()
                    order.move_to_end(block)

    def write(self, names: Sequence[BlockName], records: Records, spill: Spill | None = None) -> int:
        """Stores what is not known to be stored, contents [record_bytes] each, and returns how many blocks that were.
        Blocks that make room end here: nothing goes to `spill`. Blocks that would have to make room at once are not
        stored, a chain's end first. Raises KVStoreError if the folder takes no more."""
        with self._lock:
            fresh = [(name, record) for name, record in zip(names, records, strict=True) if name[:2] not in self._known]
        left_out = self._make_room(Counter(name.tenant for name, _ in fresh))
        stored = 0
        for name, record in sorted(fresh, key=lambda each: each[0].depth, reverse=True):
            if left_out[name.tenant] > 0:
                left_out[name.tenant] -= 1
                continue
            used_s, path = self._next_s(), path_of(name)
            try:
                self._write_one(name, path, record, used_s)
            except OSError as error:
                raise KVStoreError(
                    f"the KV store {self.folder} took no more blocks: {error}; free disk space, lower its limit, or "
                    f"see that {self.folder.parent} is there and may be written to"
                ) from error
            with self._lock:
                self._learn(path, used_s)
            stored += 1
        return stored

    def _write_one(self, name: BlockName, path: str, record: NDArray[np.uint8], used_s: float) -> None:
        file, folder = self.folder / path, self.folder / tenant_folder(path)
        for each in (self.folder, folder, file.parent):  # somebody may have removed any of them
            each.mkdir(mode=0o700, exist_ok=True)
        if _content(folder / TENANT_FILE) != (content := name.tenant.encode()):
            write_whole(folder / TENANT_FILE, [content], used_s)
        self._charge(folder.name, name.tenant)
        write_whole(file, [head_of(name, record), record.tobytes()], used_s)

    def close(self) -> None:
        """Tells others what was used last."""
        self._closing.set()
        self._thread.join()
        self._tell()

    # Room

    def _make_room(self, coming: Counter[str]) -> Counter[str]:
        """Removes blocks until those that are coming, so many of each tenant, fit. Returns how many of each tenant's
        find no room."""
        with self._lock:
            held = Counter({tenant: len(order) for tenant, order in self._order.items()})
        giving = self.shares.giving(held + coming)
        for tenant in giving:
            while giving[tenant] > 0 and (longest := self._longest_unused(tenant)) is not None:
                self._remove(*longest)
                giving[tenant] -= 1
        return giving

    def _longest_unused(self, tenant: str) -> tuple[Block, str] | None:
        """Returns the tenant's block whose last use, by this process or another, is longest ago, and its path; None if
        it has none."""
        while True:
            with self._lock:
                block, known_s = next(iter(self._order.get(tenant, {}).items()), (None, 0.0))
                if block is None:
                    return None
                path = self._known[block]
            try:
                said_s = (self.folder / path).stat().st_mtime
                if (used_s := _past(said_s)) != said_s:
                    os.utime(self.folder / path, (used_s, used_s))
                elif used_s - known_s < TICK_S:
                    return block, path
            except OSError:
                return block, path
            with self._lock:
                if (order := self._order[tenant]).get(block) == known_s:
                    order[block] = used_s
                    order.move_to_end(block)

    def _remove(self, block: Block, path: str) -> None:
        with suppress(OSError):
            (self.folder / path).unlink()
        with self._lock:
            self._forget(block)

    def _next_s(self) -> float:
        """Returns the time, a later one each time unless the clock was set back."""
        with self._lock:
            self._latest_s = max(time.time(), _past(self._latest_s) + TICK_S)
            return self._latest_s

    # What is known, by whoever has the lock

    def _learn(self, path: str, used_s: float) -> None:
        tenant = self._tenants[tenant_folder(path)]
        name = name_at(path, tenant)
        if name is None or (block := name[:2]) in self._known:
            return
        self._note_change(block)
        self._known[block] = path
        self._shards.setdefault(shard_of(path), set()).add(path)
        self._order.setdefault(tenant, OrderedDict())[block] = used_s

    def _forget(self, block: Block) -> None:
        if (path := self._known.pop(block, None)) is not None:
            self._shards[shard_of(path)].discard(path)
            del self._order[self._tenants[tenant_folder(path)]][block]
            self._touched.pop(block, None)
            self._note_change(block)

    def _forget_files(self, paths: Sequence[str]) -> None:
        for path in paths:
            if (name := name_at(path, "")) is not None:
                self._forget(name[:2])

    def _note_change(self, block: Block) -> None:
        if self._changed is not None:
            self._changed[block] = None


def _past(used_s: float) -> float:
    """Returns a time of use; now, if it lies too far in the future."""
    now_s = time.time()
    return now_s if used_s > now_s + AHEAD_S else used_s


def _content(path: Path) -> bytes | None:
    """Returns what a file holds; None if there is none."""
    with suppress(FileNotFoundError):
        return path.read_bytes()
    return None
