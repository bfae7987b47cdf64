"""What the engine has below its pool: which tiers, and whether bringing a block up is worth more than computing it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from pagemill.config import EngineConfig
from pagemill.errors import ConfigError, KVStoreError
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.disk_store import DiskStore, StoreFormat, default_root
from pagemill.kvcache.host_store import HostStore
from pagemill.kvcache.lower_tiers import LowerTiers
from pagemill.kvcache.sizing import device_memory, parse_memory
from pagemill.kvcache.transfers import Transfers

logger = logging.getLogger(__name__)

MIN_PREFILL_TOKENS = 64
"""Steps of fewer tokens say nothing about the speed of prefill."""


def wants_tiers(config: EngineConfig) -> bool:
    return config.kv_host_memory is not None or config.kv_disk_memory is not None


def make_tiers(config: EngineConfig, pool: DevicePool, fingerprint: bytes, kv_format: str, numerics: str) -> Tiers:
    """The tiers that the settings ask for. Raises ConfigError for sizes too small, KVStoreError for a bad folder."""
    record_bytes = pool.record_bytes
    host = disk = None
    if config.kv_host_memory is not None:
        free, _ = device_memory(torch.device("cpu"))
        capacity = parse_memory("kv_host_memory", config.kv_host_memory, free) // record_bytes
        if capacity < 1:
            raise ConfigError(
                f"kv_host_memory is {config.kv_host_memory!r}, but one block takes {record_bytes} bytes; raise it",
                param="kv_host_memory",
            )
        host = HostStore(capacity, record_bytes)
    if config.kv_disk_memory is not None:
        root = default_root() if config.kv_disk_path is None else Path(config.kv_disk_path).expanduser()
        root.mkdir(parents=True, exist_ok=True)
        limit = parse_memory("kv_disk_memory", config.kv_disk_memory, shutil.disk_usage(root).free)
        name = Path(config.model).stem
        disk = DiskStore(root, StoreFormat(name, fingerprint.hex(), kv_format, numerics, record_bytes), limit)
    return Tiers(LowerTiers(host, disk, record_bytes), pool, config.preemption_mode)


class Tiers:
    """Transfers to and from the lower tiers, and what is known of their speed and of prefill's."""

    def __init__(self, lower: LowerTiers, pool: DevicePool, preemption_mode: str) -> None:
        self.lower = lower
        self.transfers = Transfers(pool, lower)
        self._groups = len(pool.groups.groups)
        self._block_size = pool.block_size
        self._preemption_mode = preemption_mode
        self._prefill_s_per_token = 0.0

    def stored(self, digests: Sequence[bytes], preempted: bool) -> int:
        """Of a chain's digests, how many from the first on are to be loaded: as many as can be in less time than it
        takes to compute their tokens, as far as both have been measured. For a preempted sequence the preemption mode
        may say all that there are, what is still being stored included, or none."""
        if preempted and self._preemption_mode == "recompute":
            return 0
        swap = preempted and self._preemption_mode == "swap"
        try:
            found = self.lower.find(digests, self._groups)
            if swap and found < len(digests):
                self.transfers.flush()
                found = self.lower.find(digests, self._groups)
        except KVStoreError as error:
            logger.warning("%s", error)
            return 0
        stats = self.transfers.stats()
        if swap or not found or not stats.loaded or not self._prefill_s_per_token:
            return found
        load_s = found * self._groups * stats.loading_s / stats.loaded
        return found if load_s < found * self._block_size * self._prefill_s_per_token else 0

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in this time."""
        if num_tokens >= MIN_PREFILL_TOKENS:
            each, known = seconds / num_tokens, self._prefill_s_per_token
            self._prefill_s_per_token = 0.8 * known + 0.2 * each if known else each

    def close(self) -> None:
        """Waits for what is under way."""
        self.transfers.close()
        if self.lower.disk is not None:
            self.lower.disk.close()
