"""SharedStore: the disk tier in a folder that several machines mount, such as NFS, or an object store behind a file
system. A block is a file by itself, so nothing is locked, and no process needs to know of the others.

`<model, format and kernels>/<tenant>/<first byte of the digest>/<name>`: the file's name is the block's, and its
content a header with a checksum, and the record. A file appears whole, by being renamed, and never changes. Which files
there are is known from listing the folders, which a thread does from time to time: no step waits for the network.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import KVStoreError
from pagemill.kvcache.frame_access import Place, Places, Records
from pagemill.kvcache.offload_tiers import Spill
from pagemill.kvcache.store_format import HEAD_BYTES, StoreFormat, head_of, is_whole
from pagemill.memory.tier_shares import TierShares
from pagemill.memory.work import BlockName

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
LOOK_SHARE = 0.1
"""The largest share of the time that listing folders may take."""
FIRST_LOOK_S = 2.0
"""The longest wait for the first look, when the store is opened."""
TOUCH_S = 60.0
"""Other processes learn of a block's use if it was last told so long ago."""
TICK_S = 1e-6
"""The least difference between times of use."""
UNFINISHED_S = 3600.0
"""A file that has not been finished for so long never will be."""
_TENANT_FILE = "tenant"

Block = tuple[bytes, int]


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
        self._known: dict[Block, BlockName] = {}
        self._order: dict[str, OrderedDict[Block, float]] = {}
        self._touched: dict[Block, float] = {}
        self._changed: dict[Block, None] | None = None
        """Blocks that have come or gone and are not told to who follows; None while nobody does."""
        self._lock = threading.RLock()
        self._closing, self._looked = threading.Event(), threading.Event()
        self._looks_fail = False
        self._latest_s = 0.0
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
            return sorted(self._known.values(), key=lambda name: name.depth)

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

    def look(self) -> None:
        """Tells other processes what was used since the last look, and finds out which blocks they have written and
        removed. Raises OSError."""
        self._tell()
        with self._lock:
            before = set(self._known)
        found = dict(self._list())
        with self._lock:
            for block in before - found.keys():
                self._forget(block)
            new = [found[block] for block in found.keys() - self._known.keys() - before]
            for name, used_s in sorted(new, key=lambda each: (each[1], -each[0].depth)):
                self._learn(name, used_s)

    def _list(self) -> Iterator[tuple[Block, tuple[BlockName, float]]]:
        """Gives blocks, with their names and times of use. Times of blocks that are known are not asked for. Leaves out
        tenants whose name is damaged, until one of their blocks is stored. Removes files that some process has left
        unfinished."""
        for folder in self.folder.iterdir():
            with suppress(FileNotFoundError, NotADirectoryError):
                tenant = (folder / _TENANT_FILE).read_bytes().decode(errors="replace")
                for shard in folder.glob("??") if _folder_of(tenant) == folder.name else ():
                    for entry in os.scandir(shard):
                        if (found := self._look_at(entry, tenant)) is not None:
                            yield found

    def _look_at(self, entry: os.DirEntry[str], tenant: str) -> tuple[Block, tuple[BlockName, float]] | None:
        """Returns what `_list` gives of a file; None if it is no block, or another process has removed it meanwhile."""
        with suppress(FileNotFoundError):
            if (name := _parse(entry.name, tenant)) is not None:
                return name[:2], (name, 0.0 if name[:2] in self._known else entry.stat().st_mtime)
            if time.time() - entry.stat().st_mtime > UNFINISHED_S:
                os.unlink(entry)
        return None

    def _tell(self) -> None:
        """Tells other processes what was used since the last time."""
        with self._lock:
            touched, self._touched = self._touched, {}
            paths = [
                (self._path(name), used_s) for block, used_s in touched.items() if (name := self._known.get(block))
            ]
        for path, used_s in paths:
            with suppress(OSError):
                os.utime(path, (used_s, used_s))

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
            wait_s = max(LOOK_EVERY_S, (time.monotonic() - began_s) / LOOK_SHARE)

    # Reading and writing

    def read(self, blocks: Sequence[Block], out: Places) -> list[bool]:
        """Reads blocks (digest, group) into `out`, a record each. Returns which of them were there, whole; the other
        records hold nothing of use. A broken block is removed."""
        with self._lock:
            names = [self._known.get(block) for block in blocks]
        image = np.empty(self.block_bytes, dtype=np.uint8)
        return [name is not None and self._read_one(name, image, place) for name, place in zip(names, out, strict=True)]

    def _read_one(self, name: BlockName, image: NDArray[np.uint8], place: Place) -> bool:
        try:
            with self._path(name).open("rb", buffering=0) as file:
                taken = 0
                while count := file.readinto(image[taken:].data):
                    taken += count
        except OSError:
            with self._lock:
                self._forget(name[:2])
            return False
        head, record = np.split(image, [HEAD_BYTES])
        if taken != self.block_bytes or not is_whole(head, record, name.digest, name.group):
            self._remove(name)
            return False
        place[:] = record.reshape(place.shape)
        return True

    def use(self, blocks: Sequence[Block]) -> None:
        """Notes a use; other processes learn of it with the next look."""
        now_s = time.time()
        with self._lock:
            for block in reversed(blocks):
                if (name := self._known.get(block)) is not None:
                    order = self._order[name.tenant]
                    if now_s - order[block] > TOUCH_S:
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
            used_s = self._next_s()
            try:
                self._write_one(name, record, used_s)
            except OSError as error:
                raise KVStoreError(
                    f"the KV store {self.folder} took no more blocks: {error}; free disk space, or lower its limit"
                ) from error
            with self._lock:
                self._learn(name, used_s)
            stored += 1
        return stored

    def _write_one(self, name: BlockName, record: NDArray[np.uint8], used_s: float) -> None:
        path = self._path(name)
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        tenant, content = path.parent.parent / _TENANT_FILE, name.tenant.encode()
        if _content(tenant) != content:
            self._write_whole(tenant, [content], used_s)
        self._write_whole(path, [head_of(name, record), record.tobytes()], used_s)

    def _write_whole(self, path: Path, parts: list[bytes], used_s: float) -> None:
        """Lets a file appear with all of its content."""
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.unfinished")
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.writelines(parts)
            os.utime(unfinished, (used_s, used_s))
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

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
            while giving[tenant] > 0 and (name := self._longest_unused(tenant)) is not None:
                self._remove(name)
                giving[tenant] -= 1
        return giving

    def _longest_unused(self, tenant: str) -> BlockName | None:
        """Returns the tenant's block whose last use, by this process or another, is longest ago; None if it has
        none."""
        while True:
            with self._lock:
                block, known_s = next(iter(self._order.get(tenant, {}).items()), (None, 0.0))
                if block is None:
                    return None
                name = self._known[block]
            try:
                used_s = self._path(name).stat().st_mtime
            except OSError:
                return name
            if used_s - known_s < TICK_S:
                return name
            with self._lock:
                if (order := self._order[tenant]).get(block) == known_s:
                    order[block] = used_s
                    order.move_to_end(block)

    def _remove(self, name: BlockName) -> None:
        with suppress(OSError):
            self._path(name).unlink()
        with self._lock:
            self._forget(name[:2])

    def _next_s(self) -> float:
        """Returns the time, always a later one."""
        with self._lock:
            self._latest_s = max(time.time(), self._latest_s + TICK_S)
            return self._latest_s

    def _learn(self, name: BlockName, used_s: float) -> None:
        self._note_change(name[:2])
        self._known[name[:2]] = name
        self._order.setdefault(name.tenant, OrderedDict())[name[:2]] = used_s

    def _forget(self, block: Block) -> None:
        if (name := self._known.pop(block, None)) is not None:
            del self._order[name.tenant][block]
            self._touched.pop(block, None)
            self._note_change(block)

    def _note_change(self, block: Block) -> None:
        if self._changed is not None:
            self._changed[block] = None

    def _path(self, name: BlockName) -> Path:
        digest = name.digest.hex()
        file = f"{digest}-{name.parent.hex()}-{name.group}-{name.depth}"
        return self.folder / _folder_of(name.tenant) / digest[:2] / file


def _content(path: Path) -> bytes | None:
    """Returns what a file holds; None if there is none."""
    with suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def _folder_of(tenant: str) -> str:
    """Returns the name of the folder of a tenant's blocks."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:24]


def _parse(file: str, tenant: str) -> BlockName | None:
    """Returns the name of the block in a file of this name; None for other files."""
    try:
        digest, parent, group, depth = file.split("-")
        return BlockName(bytes.fromhex(digest), int(group), bytes.fromhex(parent), int(depth), tenant)
    except ValueError:
        return None
