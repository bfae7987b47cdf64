"""MeasuredChoice: which attention is the fastest on this machine, measured once per model's shapes and kept."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from pagemill.attention.interface import AttentionBackend, AttentionBatch, GroupBatch, HostLengths, LayerCache
from pagemill.attention.support import AttentionNeeds
from pagemill.hub.private_files import open_private

logger = logging.getLogger(__name__)

Times = dict[str, float]
DECODE_ROWS, DECODE_KEYS, PREFILL_KEYS = 32, 2048, 2048
"""One step of so many rows with so many keys each, and one prompt."""
_NARROW = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Torch's names of KV formats whose names are others."""
REPEATS = 3


class MeasuredChoice:
    """Picks the backend with the least time of a decode step and a prompt, and keeps the times in a file.

    file: JSON, times in seconds by machine and shapes, then by the backend's own name, which tells its version. A file
    that is damaged, or lacks one of the backends, is measured anew. machine: the GPU and its driver. time_of: seconds.
    """

    def __init__(
        self,
        file: Path,
        machine: str,
        needs: AttentionNeeds,
        time_of: Callable[[AttentionBackend], float],
    ) -> None:
        self._file = file
        self._key = f"{machine}, {needs}"
        self._time_of = time_of

    def __call__(self, backends: Mapping[str, AttentionBackend]) -> str:
        """Returns the fastest one's name. One that fails counts as the slowest. Raises RuntimeError if all fail."""
        with self._alone():
            kept = self._read()
            times = kept.get(self._key, {})
            if set(times) != {backend.name for backend in backends.values()}:
                times = {backend.name: self._seconds(backend) for backend in backends.values()}
                self._write(kept | {self._key: times})
        fastest = min(backends, key=lambda name: times[backends[name].name])
        if times[backends[fastest].name] == float("inf"):
            raise RuntimeError(f"no attention runs on this GPU: {', '.join(times)} failed")
        return fastest

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds while no other process measures: the ranks of a model must choose alike."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            lock = open_private(self._file.with_name(f"{self._file.name}.lock"))
        except OSError:  # nothing is kept there either
            yield
            return
        try:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _seconds(self, backend: AttentionBackend) -> float:
        try:
            return self._time_of(backend)
        except Exception as error:  # a library may fail in any way, such as without a compiler
            logger.warning("attention %s does not run here: %s", backend.name, error)
            return float("inf")

    def _read(self) -> dict[str, Times]:
        try:
            kept = json.loads(self._file.read_text())
            return {
                str(key): {str(name): float(seconds) for name, seconds in times.items()} for key, times in kept.items()
            }
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def _write(self, kept: dict[str, Times]) -> None:
        partial = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(kept, indent=1))
            partial.replace(self._file)
        except OSError as error:
            logger.warning("times of attention are not kept: %s", error)


def time_attention(backend: AttentionBackend, needs: AttentionNeeds, device: torch.device) -> float:
    """Returns the seconds of a decode step and a prompt with a model's heads, over a scattered cache. One backend alone
    takes 4 bits, and is not timed."""
    block_size, kv_heads = needs.block_size, needs.kv_heads
    entries = -(-max(DECODE_KEYS, PREFILL_KEYS) // block_size)
    frames = DECODE_ROWS * entries
    shape = (frames, kv_heads, block_size, needs.head_dim)
    key = torch.zeros(shape, dtype=getattr(torch, _NARROW.get(needs.kv_format, needs.kv_format)), device=device)
    value = torch.zeros_like(key) if needs.value_dim is None else key[..., : needs.value_dim]
    scales = torch.ones(2, *shape[:3], dtype=torch.float32, device=device).unbind() if needs.kv_format == "int8" else ()
    cache = LayerCache(key, value, *scales)
    tables = torch.randperm(frames, device=device, dtype=torch.int32).view(DECODE_ROWS, entries)
    total = 0.0
    for rows, keys, queries in ((DECODE_ROWS, DECODE_KEYS, 1), (1, PREFILL_KEYS, PREFILL_KEYS)):
        tokens = rows * queries
        batch = AttentionBatch(
            query_start=torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=device),
            context_lens=torch.full((rows,), keys, dtype=torch.int32, device=device),
            positions=torch.arange(keys - queries, keys, dtype=torch.int64, device=device).repeat(rows),
            groups=(GroupBatch(tables[:rows], torch.full((tokens,), -1, dtype=torch.int64, device=device)),),
            max_query_len=queries,
            max_context_len=keys,
            host=HostLengths(
                *(torch.full((rows,), length, dtype=torch.int32, device="cpu") for length in (queries, keys))
            ),
        )
        query = torch.randn(tokens, needs.heads, needs.head_dim, dtype=torch.float32, device=device).to(needs.dtype)
        took = []
        for _ in range(1 + REPEATS):  # the first compiles
            _wait(device)
            begin = time.perf_counter()
            backend.attend(query, cache, batch, 0, scale=needs.head_dim**-0.5, soft_cap=needs.soft_cap)
            _wait(device)
            took.append(time.perf_counter() - begin)
        total += min(took[1:])
    return total


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
