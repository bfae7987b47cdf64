"""Digests of weight files, over every byte, which are kept so that each file is read for them once.

pagemill's cache folder has an entry for each path: what the file was when it was read, and its digest. An entry of
another size, time or inode is of another file. What was written just now may be written again without any of these
changing, so its digest is not kept yet.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from pagemill.hub.registry import cache_dir
from pagemill.models.loading.checkpoint import MappedFile
from pagemill.models.loading.pieces import PIECE_BYTES, each_piece

logger = logging.getLogger(__name__)

LEAST_KEPT_BYTES = 32 << 20
"""Smaller files are read each time: that takes milliseconds."""
SETTLED_NS = 2 * 10**9
"""How old a file's times must be for its digest to be kept: longer than any file system takes to tell them apart."""
_PART_BYTES = 16 << 20


def file_digest(file: MappedFile) -> bytes:
    """Returns the SHA-256 of the xxh3_128 of each 16 MiB of a file, in order. Raises CorruptWeightsError for a file
    that becomes shorter meanwhile."""
    if file.size < LEAST_KEPT_BYTES:
        return digest_of(file)
    path = str(file.path.resolve())
    entry = cache_dir() / "digests" / f"{hashlib.sha256(path.encode()).hexdigest()[:32]}.json"
    state = [path, *file.state()]
    with suppress(OSError, ValueError, LookupError, TypeError):
        kept = json.loads(entry.read_text())
        if kept["file"] == state and len(digest := bytes.fromhex(kept["digest"])) == hashlib.sha256().digest_size:
            return digest
    digest = digest_of(file)
    if [path, *(now := file.state())] == state and time.time_ns() - max(now.modified_ns, now.changed_ns) > SETTLED_NS:
        try:
            _keep(entry, json.dumps({"file": state, "digest": digest.hex()}))
        except OSError as error:
            logger.warning("the digest of %s is not kept in %s, and computed at each start: %s", path, entry, error)
    return digest


def digest_of(file: MappedFile) -> bytes:
    """Reads a file on the threads of the load that is under way, and returns its digest, as `file_digest` does."""
    parts: list[bytes] = [b""] * -(-file.size // _PART_BYTES)

    def read(begin: int, end: int) -> None:
        part, buffer = xxhash.xxh3_128(), np.empty(min(PIECE_BYTES, end - begin), dtype=np.uint8)
        for at in range(begin, end, PIECE_BYTES):
            piece = buffer[: end - at]
            file.read(at, piece)
            part.update(piece.data)
        parts[begin // _PART_BYTES] = part.digest()

    each_piece(file.size, _PART_BYTES, read)
    return hashlib.sha256(b"".join(parts)).digest()


def _keep(entry: Path, text: str) -> None:
    """Writes an entry, which appears as a whole. Raises OSError."""
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, part = tempfile.mkstemp(dir=entry.parent)
    try:
        with open(number, "w") as file:
            file.write(text)
        os.replace(part, entry)
    except OSError:
        with suppress(OSError):
            os.unlink(part)
        raise
