"""Simulates links between replicas: blocks go to another one where that takes less time than computing them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from pagemill.kvcache.load_time import LoadTime, PrefillTime
from pagemill.memory.manager import MemoryManager
from pagemill.memory.work import Load
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.step_plan import StepPlan


@dataclass
class Network:
    """Joins replicas, each by one link that carries as much in as out, and one transfer at a time each way.

    block_s: seconds of a block on a link. latency_s: seconds before the first one.
    """

    block_s: float
    latency_s: float
    _sends_until_s: dict[int, float] = field(default_factory=dict)
    _receives_until_s: dict[int, float] = field(default_factory=dict)

    def send(self, source: int, target: int, blocks: int, now: float) -> float:
        """Returns when so many blocks that are asked for now have arrived."""
        begin = max(now, self._sends_until_s.get(source, 0.0), self._receives_until_s.get(target, 0.0))
        end = begin + self.latency_s + blocks * self.block_s
        self._sends_until_s[source] = self._receives_until_s[target] = end
        return end


class PeerBlocks:
    """Holds who has which blocks, as far as this replica was told, and the fetches under way.

    It does with names what `engine.tiers` and `kvcache.peer_store` do with bytes: the same estimates, learned for each
    peer, decide whether fetching pays. A block that its peer has evicted meanwhile does not arrive.

    number:   of this replica, in `memories`, which are those of all. Layer groups with a window must not be the only
              ones: what a peer has is told by its leading group.
    swap_blocks: as of a `LowerTier`, whose place it takes: none, since nothing is saved here.
    fetched:  blocks that have arrived. missed: blocks that were asked for in vain.
    """

    swap_blocks = 0

    def __init__(self, network: Network, number: int, memories: Sequence[MemoryManager]) -> None:
        self._network = network
        self._number = number
        self._memories = memories
        self._memory = memories[number]
        self._holders: dict[bytes, int] = {}
        self._loads: list[tuple[float, int, list[bool], dict[int, tuple[int, float]]]] = []
        self._load_times: dict[int, LoadTime] = {}
        self._prefill = PrefillTime()
        self.fetched = self.missed = 0

    @property
    def next_s(self) -> float:
        """When the next fetch ends; infinity if none is under way."""
        return self._loads[0][0] if self._loads else math.inf

    @property
    def fetch_times(self) -> dict[int, tuple[float, float]]:
        """Returns the seconds of a fetch, and of each of its blocks, by peer; those of which nothing is known are left
        out."""
        return {peer: line for peer, each in self._load_times.items() if (line := each.line)}

    def note_held(self, peer: int, digests: Sequence[bytes]) -> None:
        """Notes that another replica holds these blocks."""
        self._holders.update(dict.fromkeys(digests, peer))

    def stored(self, digests: Sequence[bytes], found: int, preempted: bool) -> int:
        """Returns up to which block of a chain to fetch, as `scheduling.loading.Stored` says."""
        reach = self._memory.reach(digests, lambda block: block[0] in self._holders)
        if reach == found:
            return reach
        blocks, tokens = self._memory.missing(digests[:reach]), (reach - found) * self._memory.block_size
        peer = self._holders[digests[blocks[-1].entry]]
        return reach if self._prefill.exceeds(self._load_time(peer), len(blocks), tokens) else found

    def finish_loads(self, scheduler: Scheduler, now: float) -> None:
        """Tells the scheduler of the fetches that have ended by now."""
        while self._loads and self._loads[0][0] <= now:
            _, ident, arrived, by_peer = heappop(self._loads)
            for peer, (blocks, seconds) in by_peer.items():
                self._load_time(peer).note(blocks, seconds)
            self.fetched += sum(arrived)
            self.missed += len(arrived) - sum(arrived)
            scheduler.finish_load(ident, arrived, now)

    def start_transfers(self, scheduler: Scheduler, now: float) -> float:
        """Begins fetches. No step waits for one."""
        for load in scheduler.take_loads():
            self._begin(load, now)
        return 0.0

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Notes how long a step took."""
        for each in self._load_times.values():
            each.note_step(seconds)
        self._prefill.note_step(plan.num_tokens, plan.num_generating, seconds)

    def _begin(self, load: Load, now: float) -> None:
        wanted: dict[int, list[int]] = {}
        arrived = [False] * len(load.blocks)
        for place, (digest, _) in enumerate(load.blocks):
            if (peer := self._holders.get(digest)) is not None:
                wanted.setdefault(peer, []).append(place)
        end, by_peer = now, dict[int, tuple[int, float]]()
        for peer, places in wanted.items():
            digests = [load.blocks[place][0] for place in places]
            for place, digest, there in zip(places, digests, self._memories[peer].are_published(digests), strict=True):
                arrived[place] = there
                if not there:
                    self._holders.pop(digest, None)
            if count := sum(arrived[place] for place in places):
                came_s = self._network.send(peer, self._number, count, now)
                by_peer[peer] = count, came_s - now
                end = max(end, came_s)
        heappush(self._loads, (end, load.id, arrived, by_peer))

    def _load_time(self, peer: int) -> LoadTime:
        return self._load_times.setdefault(peer, LoadTime())
