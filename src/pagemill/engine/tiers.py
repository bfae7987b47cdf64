"""What the engine has below its pool: which tiers, and whether bringing a block up is worth more than computing it."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from pagemill.config import EngineConfig
from pagemill.engine.messages import EngineRequest, Peering
from pagemill.engine.peering import PeerLink, ServedBlocks, peer_store
from pagemill.errors import ConfigError, EngineDeadError, KVMemoryError, KVStoreError
from pagemill.executor.interface import Executor, ExecutorFacts
from pagemill.hub.private_files import make_folder
from pagemill.kvcache.disk_store import DiskStore, file_bytes
from pagemill.kvcache.host_store import ENTRY_BYTES, CompressedStore, HostStore, host_arena
from pagemill.kvcache.load_time import PrefillTime
from pagemill.kvcache.offload_tiers import OffloadStore, OffloadTiers, Sources
from pagemill.kvcache.shared_store import SharedStore
from pagemill.kvcache.sizing import host_memory, parse_memory
from pagemill.kvcache.store_format import StoreFormat, default_root
from pagemill.kvcache.store_watch import StoreWatch
from pagemill.kvcache.transfers import Transfers, TransferStats
from pagemill.machine import num_gpus, usable_cores
from pagemill.memory.digest import extend_chain
from pagemill.memory.manager import MemoryManager, Residency
from pagemill.memory.work import Load, Save
from pagemill.scheduling.step_plan import StepPlan

logger = logging.getLogger(__name__)


COPYING_CORES = 8
"""At about 10 GB/s each, these keep up with the bus of a GPU."""
HOST_SHARE = 0.5
"""Share of the free host memory that the machine's GPUs take for evicted blocks if nobody has said how much."""


def copying_cores(idle: bool) -> int:
    """Returns how many cores copy blocks into host memory. idle: whether steps leave cores to others."""
    return min(COPYING_CORES, max(1, usable_cores() // 2)) if idle else 1


def asks_for_tiers(config: EngineConfig) -> bool:
    """Returns whether the settings name a lower tier."""
    return config.asks_for_host_memory or config.kv_disk_memory is not None


def host_bytes(config: EngineConfig, facts: ExecutorFacts, num_frames: int) -> int:
    """Returns the bytes of host memory for evicted blocks: as many as were asked for.

    If nobody has said, beside a GPU as many as the pool of `num_frames` has, so that whatever is preempted can come
    back. 0 if HOST_SHARE of what is free, shared with the machine's other GPUs, has no room for that, or the system
    gives no address space for it; and without prefix caching, which finds no evicted block.
    """
    if config.kv_host_memory is not None:
        return _host_bytes(config) if config.asks_for_host_memory else 0
    if not facts.has_own_memory or not config.enable_prefix_caching:
        return 0
    ranks, wanted = config.tensor_parallel_size, num_frames * facts.record_bytes
    room = int(HOST_SHARE * host_memory()[0] * ranks / max(ranks, num_gpus()))
    try:
        if wanted > room:
            raise KVMemoryError(f"{room >> 20} MiB are this engine's part of half of what is free")
        _ = host_arena(num_frames, facts.record_bytes)  # which takes no memory before it is written
    except KVMemoryError as error:
        logger.warning(
            "there is no host memory for evicted KV blocks: the pool has %d MiB, and %s; requests wait longer where "
            "the pool is short; kv_host_memory sets a size, or 0 for none",
            wanted >> 20,
            error,
        )
        return 0
    return wanted


class Streamed(NamedTuple):
    """Room for streamed blocks: frames, and the folder of their file; None for host memory."""

    frames: int = 0
    folder: Path | None = None

    @property
    def tier(self) -> str:
        """Returns the tier whose memory it takes: "host" or "disk"."""
        return "host" if self.folder is None else "disk"

    @property
    def description(self) -> str:
        """Returns what is said of it behind the pool's KV format; nothing if there are no frames."""
        where = "host memory" if self.folder is None else self.folder
        return f", and {self.frames} that stream from {where}" if self.frames else ""

    def of(self, tier: str, frame_bytes: int) -> int:
        """Returns how many bytes it takes of the "host" or the "disk" tier."""
        return self.frames * frame_bytes if tier == self.tier else 0


def streamed_room(config: EngineConfig, tiers: Sequence[str], least: int, most: int, frame_bytes: int) -> Streamed:
    """Returns room for `least` to `most` streamed blocks in the first of these lower tiers that has so much; else no
    room."""
    if "host" in tiers and config.asks_for_host_memory:
        frames = _host_bytes(config) // frame_bytes
        if frames >= least:
            return Streamed(min(frames, most))
    if "disk" in tiers and config.kv_disk_memory is not None and not config.kv_disk_shared:
        root = _disk_root(config)
        if (frames := _disk_bytes(config, root) // frame_bytes) >= least:
            return Streamed(min(frames, most), root)
    return Streamed()


def _host_bytes(config: EngineConfig) -> int:
    assert config.kv_host_memory is not None
    return parse_memory("kv_host_memory", config.kv_host_memory, host_memory()[0])


def _disk_root(config: EngineConfig) -> Path:
    return make_folder("kv_disk_path", config.kv_disk_path, default_root())


def _disk_bytes(config: EngineConfig, root: Path, held: int = 0) -> int:
    """Returns how many bytes the disk tier may have. Raises ConfigError children for a bad setting.

    held: bytes that an earlier run has stored already; the file system does not count them as free.
    """
    assert config.kv_disk_memory is not None
    room = shutil.disk_usage(root).free + held
    limit = parse_memory("kv_disk_memory", config.kv_disk_memory, room)
    if limit > room:
        logger.warning(
            "kv_disk_memory is %s, and %s has room for %.1f GiB: blocks are lost once that is full; lower it, or name "
            "another kv_disk_path",
            config.kv_disk_memory, root, room / 2**30,
        )  # fmt: skip
    return limit


def make_tiers(
    config: EngineConfig,
    executor: Executor,
    memory: MemoryManager,
    streamed: Streamed,
    host: int,
    publishes: bool,
    peering: Peering | None,
) -> Tiers | None:
    """Returns the tiers that the settings ask for, less what streamed blocks take of them, and what peers hold; None if
    there is nothing of all that.

    host: bytes of host memory for blocks, streamed ones included. Raises ConfigError for sizes too small, and where
    peers could not be served; KVStoreError for a bad folder.
    """
    facts = executor.facts
    record_bytes = facts.record_bytes
    format = StoreFormat(
        Path(config.model).stem, facts.fingerprint.hex(), facts.kv_format, facts.numerics, record_bytes
    )
    taken = {tier: streamed.of(tier, facts.frame_bytes) for tier in ("host", "disk")}
    own = _host_tier(config, facts, memory, max(0, host - taken["host"]), taken["host"]) if host else []
    left = host - taken["host"] if own and config.enable_prefix_caching else 0
    disk = [] if config.kv_disk_memory is None else _disk_tier(config, format, memory.windows, taken["disk"])
    tiers = [*own, *disk]
    watch = StoreWatch(disk[0], memory.leading) if disk and publishes else None
    where = f"{disk[0].capacity * record_bytes / 2**30:.1f} GiB on disk, in {disk[0].folder.parent}" if disk else ""
    if peering is None or not config.enable_prefix_caching:
        offload = OffloadTiers(tiers, record_bytes, records_changes=publishes)
        if not tiers:
            return None
        return Tiers(offload, executor, memory, config.preemption_mode, left, watch=watch, where=where)
    store = peer_store(peering, format)
    offload = OffloadTiers(tiers, record_bytes, store, publishes)
    drafts = config.asked_drafts is not None and config.asked_drafts.method == "draft_model"
    served = ServedBlocks(memory, executor.frames, offload, format, serves_pool=not drafts)
    peers = PeerLink(peering, format, store, served)
    return Tiers(offload, executor, memory, config.preemption_mode, left, peers, watch, where)


def _host_tier(
    config: EngineConfig, facts: ExecutorFacts, memory: MemoryManager, left: int, taken: int
) -> list[OffloadStore]:
    """Returns the host tier of `left` bytes, unless streamed blocks, which take so many, leave no room."""
    compressed = config.kv_host_compression == "zstd"
    capacity = left // (facts.record_bytes + compressed * 2 * ENTRY_BYTES)
    if capacity < 1 and not taken:
        raise ConfigError(
            f"kv_host_memory is {config.kv_host_memory!r}, but one block takes {facts.record_bytes} bytes; raise it",
            param="kv_host_memory",
        )
    if capacity < 1:
        return []
    if compressed:
        return [CompressedStore(left, facts.kv.itemsize, memory.wanted)]
    return [HostStore(capacity, facts.record_bytes, copying_cores(facts.overlaps), memory.wanted)]


def _disk_tier(
    config: EngineConfig, format: StoreFormat, windows: Sequence[int | None], taken: int
) -> list[DiskStore | SharedStore]:
    """Returns the disk tier, unless streamed blocks, which take so many bytes of it, leave no room."""
    root = _disk_root(config)
    if config.kv_disk_shared:
        return [SharedStore(root, format, _disk_bytes(config, root))]
    limit = _disk_bytes(config, root, file_bytes(root, format)) - taken
    return [DiskStore(root, format, limit, windows)] if limit > 2 * format.record_bytes or not taken else []


class Tiers:
    """The offload tiers, transfers to and from them, and what is known of their speed and of prefill's.

    host_bytes: host memory for evicted blocks.
    peers: engines that this one gives blocks to and fetches them from; None for none. watch: tells what is on disk;
    None where nobody asks for it, or there is none. where: says in words how much the disk tier takes, and where; empty
    if there is none.
    """

    def __init__(
        self,
        offload: OffloadTiers,
        executor: Executor,
        memory: MemoryManager,
        preemption_mode: str,
        host_bytes: int = 0,
        peers: PeerLink | None = None,
        watch: StoreWatch | None = None,
        where: str = "",
    ) -> None:
        self.offload = offload
        self.where = where
        self.host_bytes = host_bytes
        self.peers = peers
        self.watch = watch
        self.transfers = Transfers(executor.frames, offload)
        self._memory = memory
        self._preemption_mode = preemption_mode
        self.prefill = PrefillTime()

    @property
    def swap_blocks(self) -> int:
        """Returns how many blocks of preempted sequences host memory has room for, to come back from there."""
        return 0 if self._preemption_mode == "recompute" else self.host_bytes // self.offload.record_bytes

    def stored(self, digests: Sequence[bytes], found: int, preempted: bool) -> int:
        """Returns up to which block of a chain to load, as `scheduling.loading.Stored` says.

        Loads all that the stores have, or nothing if computing it takes less time by the speeds measured. For a
        preempted sequence the preemption mode decides: "swap" always loads, "recompute" never.
        """
        if preempted and self._preemption_mode == "recompute":
            return found
        swap = preempted and self._preemption_mode == "swap"
        sources = Sources(self.offload.where, digests)
        try:
            reach = self._memory.reach(digests, lambda block: sources[block] is not None)
        except KVStoreError as error:
            logger.warning("%s", error)
            return found
        if swap or reach == found:
            return reach
        blocks = self._memory.missing(digests[:reach])
        lowest = max(sources[digests[entry], group] or 0 for entry, group in blocks)
        load_time, tokens = self.transfers.load_time(lowest), (reach - found) * self._memory.block_size
        return reach if self.prefill.exceeds(load_time, len(blocks), tokens) else found

    def save(self, saves: Sequence[Save]) -> None:
        """Saves evicted blocks. Tenants have the parts of each tier that are guaranteed to them of the pool."""
        if saves:
            self._guarantee()
            self.transfers.save(saves)

    def load(self, load: Load) -> bool:
        """Begins a load. Returns False, with a warning, where that fails: then its blocks do not come."""
        try:
            self.transfers.load(load)
        except EngineDeadError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            logger.warning("a load of %d KV blocks could not be begun, which are computed: %s", len(load.blocks), what)
            return False
        return True

    def keep(self, saves: Sequence[Save]) -> None:
        """Keeps these blocks, and those in tiers that end with the process, where blocks outlive it."""
        self._guarantee()
        self.transfers.keep(saves)

    def _guarantee(self) -> None:
        memory = self._memory
        self.offload.guarantee({one.name: one.guaranteed_blocks / memory.num_frames for one in memory.tenants})

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Notes how long a step took."""
        for load_time in self.transfers.load_times.values():
            load_time.note_step(seconds)
        self.prefill.note_step(plan.num_tokens, plan.num_generating, seconds)
        self.transfers.block_s = self._memory.block_size * self.prefill.s_per_token / len(self._memory.windows)

    def note_held(self, request: EngineRequest, root: bytes) -> None:
        """Notes what a peer holds of a request's blocks, if it says so. root: where its chain begins."""
        held = request.held
        if held is not None and self.peers is not None and held.address != self.peers.address:
            size, digests = self._memory.block_size, list[bytes]()
            tokens = request.prompt_token_ids + request.answered
            extend_chain(digests, root, tokens[: held.num_blocks * size], size)
            self.peers.store.note_held(held.address, digests)

    def fetch_times(self) -> dict[str, tuple[float, float]]:
        """Returns the seconds that fetching blocks takes, by the peer's address: for all, and for each. A peer that is
        left alone takes for ever; one of which nothing is known is left out."""
        times, first = {}, len(self.offload.tiers)
        for peer in () if self.peers is None else self.peers.store.peers():
            load_time = self.transfers.load_times.get(first + peer.number)
            if peer.paused_s:
                times[peer.address] = math.inf, 0.0
            elif load_time is not None and (line := load_time.line) is not None:
                times[peer.address] = line
        return times

    def disk_time(self) -> tuple[float, float] | None:
        """Returns the seconds that loading blocks from disk takes, for all and for each; None while nothing is known,
        and where nothing on disk is told."""
        return None if self.watch is None else self.transfers.load_times[len(self.offload.tiers) - 1].line

    def close(self) -> None:
        """Waits for what is under way."""
        if self.watch is not None:
            self.watch.close()
        if self.peers is not None:
            self.peers.close()
        self.transfers.close()
        for tier in self.offload.tiers:
            tier.close()


def tier_figures(tiers: Tiers | None) -> dict[str, Any]:
    """Returns what `EngineStats` says of transfers, below the pool and among peers."""
    figures = asdict(TransferStats() if tiers is None else tiers.transfers.stats())
    if tiers is not None and tiers.peers is not None:
        figures |= tiers.peers.figures()
    return figures


def blocks_by_tier(streamed: Streamed, blocks: Residency) -> dict[str, int]:
    """Returns how many blocks lie in the pool ("device"), and, where contexts may be longer, in the streamed frames."""
    return {"device": blocks.resident, **({streamed.tier: blocks.streamed} if streamed.frames else {})}


def find_by_tier(
    memory: MemoryManager, streamed: Streamed, tiers: OffloadTiers | None, digests: Sequence[bytes]
) -> dict[str, int]:
    """Returns how many blocks a prompt that goes on behind a chain would find, each in the highest tier that has it.

    A tier that cannot be read counts as empty.
    """
    sources = None if tiers is None else Sources(tiers.where_here, digests)

    def is_stored(block: tuple[bytes, int]) -> bool:
        with suppress(KVStoreError):
            return sources is not None and sources[block] is not None
        return False

    digests = digests[: memory.reach(digests, is_stored)]
    found = blocks_by_tier(streamed, memory.chain_residency(digests))
    if tiers is not None and sources is not None:
        found |= {tier.name: found.get(tier.name, 0) for tier in tiers.tiers}
        for entry, group in memory.missing(digests):
            if (at := sources[digests[entry], group]) is not None:
                found[tiers.tiers[at].name] += 1
    return found
