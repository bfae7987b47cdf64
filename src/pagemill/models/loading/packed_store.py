"""PackedStore: a folder of packed weights, so that a later load maps what an earlier one has packed.

A file is named by a digest of all that decides its content (`packed_key`), written beside its place and renamed when it
is whole and on the disk. Whoever makes it holds a lock meanwhile; a process that wants the same waits, and maps it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

import pagemill
from pagemill import _kernels
from pagemill.errors import ConfigError
from pagemill.hub.private_files import lock_alone, open_private
from pagemill.models.loading.checkpoint import Checkpoint
from pagemill.models.loading.keep import Keep, Nothing
from pagemill.models.loading.packed_file import DamagedWeightsError, PackedFile, PackedWriter
from pagemill.models.sharding import Sharding

T = TypeVar("T")
logger = logging.getLogger(__name__)


def packed_key(
    checkpoint: Checkpoint,
    fingerprint: bytes,
    kernels: str,
    dtype: torch.dtype,
    quantization: str | None,
    sharding: Sharding | None,
) -> str:
    """Returns a digest of all that decides what packed weights are, hexadecimal.

    It covers the files' paths, sizes and times, the model's fingerprint, the code that reads and packs, the kernels'
    instruction set, and the part of the model that a rank holds. Weights of another version are not found.
    """
    files = [[str(file.path.resolve()), file.size, file.modified_ns] for file in checkpoint.files]
    part = None if sharding is None else [sharding.exchange.rank, sharding.exchange.size]
    content = [_code(), kernels, str(dtype), quantization, fingerprint.hex(), files, part]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@cache
def _code() -> str:
    """Returns the digest of the code that decides how weights are read and packed."""
    package = Path(pagemill.__file__).parent
    files = sorted(path for folder in ("models", "ops") for path in (package / folder).rglob("*.py"))
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return hashlib.sha256("".join([_kernels.sources, *digests]).encode()).hexdigest()


class PackedStore:
    """Holds packed weights of at most `limit_bytes`; those that were loaded longest ago make room.

    mapped_bytes: of what was loaded from here.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root, self.limit_bytes = root, limit_bytes
        self.mapped_bytes = 0

    def load(self, key: str, assemble: Callable[[Keep], T]) -> T:
        """Returns what `assemble` makes of the weights of this key, which it writes first if they are not there.

        What the disk does not take stays in memory, with a line in the log. Raises ConfigError for weights that take
        more than the limit, and what `assemble` does.
        """
        path = self.root / f"{key}.weights"
        for _ in range(2):
            found = self._open(path, key) or self._make(path, key, assemble)
            if found is None:
                break
            try:
                made = assemble(found)
            except DamagedWeightsError as error:
                self._drop(path, error)
                continue
            self.mapped_bytes += found.nbytes
            return made
        return assemble(Nothing())

    def _open(self, path: Path, key: str) -> PackedFile | None:
        """Maps a file; None if it is not there. What is damaged is removed."""
        try:
            found = PackedFile(path, key)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._drop(path, error)
            return None
        self._check_size(found.nbytes)
        self._make_room(path, found.nbytes)
        logger.info("packed weights are mapped from %s", path)
        return found

    def _drop(self, path: Path, error: Exception) -> None:
        logger.warning("packed weights in %s are damaged, and made anew: %s", path, error)
        with suppress(OSError):
            path.unlink()

    def _make(self, path: Path, key: str, assemble: Callable[[Keep], T]) -> PackedFile | None:
        """Writes a file, unless another process has done so meanwhile, and maps it; None if the disk does not take
        it."""
        part = path.with_suffix(".part")
        try:
            with _locked(part) as file:
                if (found := self._open(path, key)) is not None:
                    part.unlink()
                    return found
                writer = PackedWriter(file, lambda nbytes: self._make_room(part, nbytes))
                assemble(writer)
                self._check_size(writer.finish(key))
                part.rename(path)
                _sync(self.root)
        except OSError as error:
            logger.warning("packed weights are not kept in %s: %s", self.root, error)
            return None
        return self._open(path, key)

    def _check_size(self, nbytes: int) -> None:
        """Raises ConfigError for a file that never fits."""
        if nbytes > self.limit_bytes:
            raise ConfigError(
                f"weights_disk_memory is {self.limit_bytes} bytes, but the packed weights of this model take {nbytes}; "
                f"raise it, or leave it out",
                param="weights_disk_memory",
            )

    def _make_room(self, path: Path, nbytes: int) -> bool:
        """Removes other files until one of so many bytes fits. Returns False if it never does, and removes nothing."""
        if nbytes > self.limit_bytes:
            return False
        others = []
        for other in self.root.iterdir():
            with suppress(FileNotFoundError):
                if other.suffix in (".weights", ".part") and other != path and not _is_left_over(other):
                    stat = other.stat()
                    others.append((other.suffix == ".part", stat.st_mtime_ns, stat.st_size, other))
        total = sum(size for _, _, size, _ in others)
        for is_part, _, size, other in sorted(others):
            if total + nbytes <= self.limit_bytes or is_part:
                break
            logger.info("packed weights in %s make room", other)
            other.unlink(missing_ok=True)
            total -= size
        return True


@contextmanager
def _locked(part: Path) -> Iterator[int]:
    """Opens a file that is to be written, made empty, and locks it; waits for whoever has locked it. Removes it if the
    writing fails. Raises OSError."""
    while True:
        file = open_private(part)
        try:
            if not lock_alone(file):
                logger.info("waiting for another process, which packs the same weights")
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(part, file):  # it was renamed, or removed, while this process waited
                continue
            os.ftruncate(file, 0)
            try:
                yield file
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            return
        finally:
            os.close(file)


def _is_at(path: Path, file: int) -> bool:
    with suppress(FileNotFoundError):
        return path.stat().st_ino == os.fstat(file).st_ino
    return False


def _is_left_over(path: Path) -> bool:
    """Returns True, and removes the file, if it is a part whose writer has died."""
    if path.suffix != ".part":
        return False
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        left = lock_alone(file)
        if left:
            path.unlink(missing_ok=True)
        return left
    finally:
        os.close(file)


def _sync(folder: Path) -> None:
    """Waits until the disk has the names in a folder."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
