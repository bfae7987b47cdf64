"""Disk stores as a whole: lists them, and carries blocks from one machine to another in one file.

An archive is the line "pagemill KV archive 1", a line of JSON (the store's format), then the blocks' slots as they lie
in the store, checksums included, beginnings of chains first.
"""

from __future__ import annotations

import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import KVStoreError
from pagemill.kvcache.disk_store import DiskStore
from pagemill.kvcache.store_format import Slots, StoreFormat
from pagemill.memory.digest import extend_chain, namespace_root
from pagemill.memory.reach import leading, reach
from pagemill.memory.work import BlockName
from pagemill.namespace import Namespace

_FIRST_LINE = b"pagemill KV archive 1\n"
_FORMAT_BYTES = 1 << 16
_BATCH_BYTES = 16 << 20
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """Describes a store on disk: its folder, its blocks, and when one was last written or used (seconds since 1970)."""

    folder: Path
    format: StoreFormat
    blocks: int
    bytes: int
    used_s: float | None


def list_stores(root: Path) -> Iterator[StoreInfo | KVStoreError]:
    """Gives the stores under a folder, by name; for one that cannot be read, the error."""
    return map(_describe, _folders(root))


def _folders(root: Path) -> list[Path]:
    return sorted({path.parent for name in ("index.sqlite", "blocks.dat") for path in root.glob(f"*/{name}")})


def _describe(folder: Path) -> StoreInfo | KVStoreError:
    try:
        size = (folder / "blocks.dat").stat().st_size
        with closing(sqlite3.connect(f"file:{folder / 'index.sqlite'}?mode=ro", uri=True)) as db:
            format = StoreFormat.from_json(db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()[0])
            blocks, used_s = db.execute("SELECT COUNT(*), MAX(used_s) FROM blocks").fetchone()
    except FileNotFoundError:
        return KVStoreError(f"the KV store {folder} has lost its blocks.dat, and so all blocks; remove the folder")
    except (OSError, sqlite3.Error, ValueError, TypeError) as error:
        return KVStoreError(
            f"the index of the KV store {folder} cannot be read: {error}; an engine with the store's model and "
            "settings makes it again from the blocks when it starts; or remove the folder"
        )
    if folder.name != format.key:
        return KVStoreError(f"{folder} holds blocks of {format}; rename it {format.key}, or remove it")
    return StoreInfo(folder, format, blocks, size, used_s)


def open_store(root: Path, key: str) -> DiskStore:
    """Opens the one store whose key begins with `key`; it evicts nothing. Raises KVStoreError."""
    found = [folder for folder in _folders(root) if folder.name.startswith(key)]
    if len(found) != 1:
        known = ", ".join(folder.name for folder in _folders(root))
        count = f"{len(found)} KV stores" if found else "no KV store"
        way_out = f"take one of {known}" if known else "none is kept there"
        raise KVStoreError(f"{count} in {root} begin{'' if found else 's'} with {key!r}; {way_out}")
    info = _describe(found[0])
    if isinstance(info, KVStoreError):
        raise info
    return DiskStore(root, info.format, _NO_LIMIT)


def stored_prefixes(store: DiskStore, prefixes: Sequence[tuple[Namespace, Sequence[int]]]) -> list[list[BlockName]]:
    """Returns, for each prefix (namespace, token ids), all that is stored of what an engine would find of it, the
    beginning first: an engine needs all blocks of layer groups with full attention, and of one with a window those that
    the next token sees."""
    at = store.format
    stored: defaultdict[bytes, list[BlockName]] = defaultdict(list)
    for name in store.names():
        stored[name.digest].append(name)
    found = []
    for space, token_ids in prefixes:
        chain: list[bytes] = []
        with suppress(struct.error):  # ids that no token has
            root = namespace_root(space, bytes.fromhex(at.fingerprint), at.kv_format, at.numerics)
            extend_chain(chain, root, token_ids, at.block_size)
        held: defaultdict[int, set[bytes]] = defaultdict(set)
        for digest in chain:
            for name in stored.get(digest, ()):
                held[name.group].add(digest)
        end = _reach(chain, held, store.windows, at.block_size)
        found.append([name for digest in chain[:end] for name in stored.get(digest, ())])
    return found


def _reach(
    chain: Sequence[bytes], held: Mapping[int, Set[bytes]], windows: Sequence[int | None] | None, block_size: int
) -> int:
    """Returns how many leading blocks of a chain an engine finds whose pool is empty. Where no engine has opened the
    store yet, which would have said what windows its model has, that is as far as one layer group has them."""
    if windows is None:
        return max((leading(chain, len(chain), [digests]) for digests in held.values()), default=0)
    return reach(chain, windows, [held.get(group, set()) for group in range(len(windows))], block_size)


def export_store(store: DiskStore, file: BinaryIO, chosen: Sequence[BlockName] | None = None) -> int:
    """Writes a store's blocks, or those chosen, to a file, without broken ones. Returns how many they were."""
    file.write(_FIRST_LINE + store.format.to_json().encode() + b"\n")
    names = store.names() if chosen is None else chosen
    step = max(1, _BATCH_BYTES // store.slot_bytes)
    count = 0
    for first in range(0, len(names), step):
        for image in store.images(names[first : first + step]):
            file.write(image)
            count += 1
    return count


class Imported(NamedTuple):
    """Counts an archive's blocks, those of them that were new, and those that found no room."""

    blocks: int
    new: int
    left_out: int


def import_archive(root: Path, file: BinaryIO, limit_bytes: int) -> Imported:
    """Adds an archive's blocks to the store of their model, until that holds `limit_bytes`. Evicts nothing: what does
    not fit is left out, ends of chains first.

    Raises KVStoreError for a file that is no archive, is cut short, or has a broken block; those before it are kept.
    """
    format = _read_format(file)
    batches = _read_blocks(file, Slots(format.record_bytes))
    batch = next(batches, None)  # before there is a store for what may be no blocks
    total = new = left_out = 0
    with closing(DiskStore(root, format, _NO_LIMIT)) as store:
        while batch:
            there = store.holds([name[:2] for name, _ in batch])
            missing = [block for block, held in zip(batch, there, strict=True) if not held]
            room = 0 if left_out else max(0, limit_bytes // store.slot_bytes - store.num_blocks())
            new += store.write([name for name, _ in missing[:room]], [record for _, record in missing[:room]])
            left_out += len(missing[room:])
            total += len(batch)
            batch = next(batches, None)
    return Imported(total, new, left_out)


def _read_format(file: BinaryIO) -> StoreFormat:
    if file.readline(len(_FIRST_LINE)) != _FIRST_LINE:
        raise KVStoreError(f"{file.name} is no KV archive of this version")
    try:
        return StoreFormat.from_json(file.readline(_FORMAT_BYTES).decode())
    except (ValueError, RecursionError) as error:
        raise KVStoreError(
            f"{file.name} is damaged: its second line names no format of this version: {error}"
        ) from error


def _read_blocks(file: BinaryIO, slots: Slots) -> Iterator[list[tuple[BlockName, NDArray[np.uint8]]]]:
    """Gives an archive's blocks, some at a time. Raises KVStoreError behind the last that is whole."""
    step = max(1, _BATCH_BYTES // slots.nbytes) * slots.nbytes
    total = 0
    while images := file.read(step):
        blocks = []
        ends = range(slots.nbytes, len(images) + 1, slots.nbytes)
        for end in ends:
            if (block := slots.block_in(images[end - slots.nbytes : end])) is None:
                break
            blocks.append(block)
        total += len(blocks)
        if blocks:
            yield blocks
        if len(blocks) < len(ends):
            raise KVStoreError(f"block {total + 1:,} of {file.name} is broken; export it again")
        if len(images) % slots.nbytes:
            raise KVStoreError(
                f"{file.name} ends within a block, after {total} whole ones: it was cut short; export it again"
            )
