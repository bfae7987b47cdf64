"""KV stores as a whole: which there are, and blocks carried from one machine to another in one file.

An archive is the line "pagemill KV archive 1", a line of JSON (the store's format), then the blocks' slots as they lie
in the store, checksums included, beginnings of chains first.
"""

from __future__ import annotations

import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from pagemill.errors import KVStoreError
from pagemill.kvcache.disk_store import DiskStore
from pagemill.kvcache.store_format import StoreFormat
from pagemill.memory.digest import extend_chain, root_digest
from pagemill.memory.work import BlockName
from pagemill.namespace import Namespace

_FIRST_LINE = b"pagemill KV archive 1\n"
_BATCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A store on disk: its folder, what it holds, and when a block was last written or used (seconds since 1970)."""

    folder: Path
    format: StoreFormat
    blocks: int
    bytes: int
    used_s: float | None


def list_stores(root: Path) -> Iterator[StoreInfo | KVStoreError]:
    """The stores under a folder, by name; for one that can not be read, the error."""
    return map(_describe, sorted(root.glob("*/index.sqlite")))


def _describe(index: Path) -> StoreInfo | KVStoreError:
    try:
        with closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as db:
            format = StoreFormat.from_json(db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()[0])
            blocks, used_s = db.execute("SELECT COUNT(*), MAX(used_s) FROM blocks").fetchone()
    except (sqlite3.Error, ValueError, TypeError) as error:
        return KVStoreError(f"the index of the KV store {index.parent} can not be read: {error}")
    return StoreInfo(index.parent, format, blocks, (index.parent / "blocks.dat").stat().st_size, used_s)


def open_store(root: Path, key: str, limit_bytes: int | None = None) -> DiskStore:
    """The store whose key begins like that. Without a limit it keeps its size. Raises KVStoreError."""
    found = [info for info in list_stores(root) if isinstance(info, StoreInfo) and info.folder.name.startswith(key)]
    if len(found) != 1:
        known = ", ".join(info.folder.name for info in list_stores(root) if isinstance(info, StoreInfo))
        raise KVStoreError(f"{len(found)} KV stores in {root} begin with {key!r}; there are: {known or 'none'}")
    least = found[0].bytes or 1 << 62
    return DiskStore(root, found[0].format, least if limit_bytes is None else limit_bytes)


def stored_prefixes(store: DiskStore, prefixes: Sequence[tuple[Namespace, Sequence[int]]]) -> list[list[BlockName]]:
    """Of each prefix (whose, token ids) the blocks that an engine would find: from the first on without a gap, for all
    layer groups."""
    at = store.format
    stored: defaultdict[bytes, list[BlockName]] = defaultdict(list)
    for name in store.names():
        stored[name.digest].append(name)
    groups = max(map(len, stored.values()), default=0)
    found = []
    for space, token_ids in prefixes:
        chain: list[bytes] = []
        with suppress(struct.error):  # ids that no token has
            root = root_digest(bytes.fromhex(at.fingerprint), at.kv_format, at.numerics, str(space))
            extend_chain(chain, root, token_ids, at.block_size)
        whole = takewhile(lambda digest: len(stored.get(digest, ())) == groups, chain)
        found.append([name for digest in whole for name in stored.get(digest, ())])
    return found


def export_store(store: DiskStore, file: BinaryIO, chosen: Sequence[BlockName] | None = None) -> int:
    """Writes the whole ones of a store's blocks, or of those chosen, to a file; returns how many they were."""
    file.write(_FIRST_LINE + store.format.to_json().encode() + b"\n")
    names = store.names() if chosen is None else chosen
    step = max(1, _BATCH_BYTES // store.slot_bytes)
    count = 0
    for first in range(0, len(names), step):
        for image in store.images(names[first : first + step]):
            file.write(image)
            count += 1
    return count


def import_archive(root: Path, file: BinaryIO, limit_bytes: int) -> tuple[int, int]:
    """Adds an archive's blocks to the store of their model; returns (blocks read, blocks that were new).

    Raises KVStoreError for a file that is no archive, is cut short, or has a broken block; those before it are kept.
    """
    if file.readline(len(_FIRST_LINE)) != _FIRST_LINE:
        raise KVStoreError(f"{file.name} is no KV archive of this version")
    try:
        format = StoreFormat.from_json(file.readline(1 << 16).decode())
    except (ValueError, TypeError) as error:
        raise KVStoreError(f"{file.name} is damaged: its second line names no format") from error
    store = DiskStore(root, format, limit_bytes)
    try:
        step = max(1, _BATCH_BYTES // store.slot_bytes)
        total = new = 0
        while images := file.read(step * store.slot_bytes):
            count, rest = divmod(len(images), store.slot_bytes)
            new += store.write_images([images[i * store.slot_bytes : (i + 1) * store.slot_bytes] for i in range(count)])
            total += count
            if rest:
                raise KVStoreError(f"{file.name} ends within a block, after {total} whole ones: it was cut short")
        return total, new
    finally:
        store.close()
