"""FleetTenancy: what each tenant has at all replicas together, and which of its requests wait for its own limits.

A replica knows its own part alone. So the front end holds back what would exceed a limit that is a number: sequences
that run (`max_running`), and active blocks (`max_blocks`). Limits that are shares hold in each replica, and so in all.
What replicas are told of the others, so that shares and guarantees hold over all, is in `shares`.

It knows no clock and no Ray: the same code runs in the simulator.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pagemill.distributed.tenant_shares import TenantShares
from pagemill.engine.messages import EngineReady, EngineRequest
from pagemill.errors import TooManyWaitingError
from pagemill.tenant_limits import TenantLimits

ANYWHERE: Literal[""] = ""
"""A place: any replica."""


class Wanted(NamedTuple):
    """States what a request takes: sequences, the most blocks that they may come to, tokens of its prompt, the most of
    each sequence, and whether it becomes a pin."""

    tenant: str
    rows: int
    blocks: int
    prompt_tokens: int
    most_tokens: int
    pins: bool = False

    @classmethod
    def of(cls, asked: EngineRequest, facts: EngineReady) -> Wanted:
        """Returns what a request takes in engines of such facts."""
        rows, most, prompt_tokens = asked.num_sequences, asked.params.max_tokens, len(asked.prompt_token_ids)
        longest = facts.max_model_len if most is None else min(facts.max_model_len, prompt_tokens + most)
        blocks = rows * facts.num_groups * -(-longest // facts.block_size)
        return cls(asked.tenant, rows, blocks, prompt_tokens, longest, asked.pin is not None)


class Pinned(NamedTuple):
    """Says in which replica a tenant's pins are, empty for none now, and how many blocks of its `max_blocks` they
    take."""

    replica: str = ""
    blocks: int = 0


NOTHING = Pinned()


@dataclass
class _Known:
    """A request that has not ended. number: rises with the requests.

    replica: who has it; None while nobody does. begun: whether it has brought a token. answered: tokens that it has.
    counted: its active blocks, as they count in `shares`.
    """

    number: int
    wanted: Wanted
    replica: str | None = None
    begun: bool = False
    answered: int = 0
    counted: int = 0

    @property
    def blocks(self) -> int:
        """Returns how many blocks it has by now, if none is shared; none before its first token, since it may wait."""
        rows, wanted = self.wanted.rows, self.wanted
        if not self.begun:
            return 0
        tokens = min(rows * wanted.prompt_tokens + self.answered, rows * wanted.most_tokens)
        return -(-wanted.blocks * tokens // (rows * wanted.most_tokens))


class FleetTenancy:
    """Counts over all replicas. Limits of tenants that have not been set are none.

    limits: at the start, by tenant.
    """

    def __init__(self, limits: Mapping[str, TenantLimits]) -> None:
        self._limits = dict(limits)
        self._requests: dict[str, _Known] = {}
        self._of: defaultdict[str, dict[str, _Known]] = defaultdict(dict)
        """The same, by tenant."""
        self._begun: Counter[str] = Counter()
        """Sequences of requests that have brought a token, by tenant."""
        self._numbers = itertools.count()
        self._held: defaultdict[str, list[str]] = defaultdict(list)
        """Ids of requests that wait for their tenant's own limits, in the order in which they came."""
        self.shares = TenantShares(self._limits)

    def set_limits(self, tenant: str, limits: TenantLimits) -> None:
        """Gives a tenant other limits. Requests that replicas have stay there."""
        self._limits[tenant] = limits
        self.shares.forget_guarantee(tenant)

    def limits_blocks(self, tenant: str) -> bool:
        """Returns whether a tenant's active blocks are limited over all replicas."""
        limits = self._limits.get(tenant)
        return limits is not None and isinstance(limits.max_blocks, int)

    def check(self, tenant: str, rows: int) -> None:
        """Raises `TooManyWaitingError` for a request that may not wait beside those that its tenant has.

        rows: sequences that the replicas compute at once. As in an engine, those that can begin are not counted. One
        that has brought no token counts as waiting, since only its replica knows better.
        """
        limits = self._limits.get(tenant)
        if limits is None or limits.max_waiting is None:
            return
        begun, own = self._begun.total(), self._begun[tenant]
        waiting = sum(one.wanted.rows for one in self._of[tenant].values() if not one.begun)
        most = limits.number("max_running", rows, least=1)
        startable = rows - begun if most is None else min(rows - begun, most - own)
        waiting = max(0, waiting - max(0, startable))
        if waiting >= limits.max_waiting:
            raise TooManyWaitingError(
                f"{waiting} sequences of tenant {tenant!r} wait, over all replicas, and max_waiting is "
                f"{limits.max_waiting}; try again later, or raise that limit",
                param="tenant",
            )

    def place(self, request_id: str, wanted: Wanted, replicas: Collection[str], pinned: Pinned = NOTHING) -> str | None:
        """Returns the replica that a request must go to, `ANYWHERE`, or None: it is held back until others have ended.

        replicas: those that take requests. pinned: what the tenant's pins take.

        A tenant's requests go in the order in which they came; one that a replica has lost need not wait for those that
        are held back. Where one replica has all of them, it keeps `max_blocks`; several may have them only while the
        most that they may come to is within. Pins count as requests that do not end, and a tenant's are in one replica.
        """
        held = self._held[wanted.tenant]
        if is_new := request_id not in self._requests:
            self._requests[request_id] = _Known(next(self._numbers), wanted)
        one = self._of[wanted.tenant][request_id] = self._requests[request_id]
        self._put(one, None)
        is_held = request_id in held
        comes_first = held[0] == request_id if is_held else not (held and is_new)
        place = self._room_for(wanted, replicas, pinned) if comes_first else None
        if is_held and place is not None:
            held.pop(0)
        elif not is_held and place is None:
            insort(held, request_id, key=lambda each: self._requests[each].number)
        return place

    def note_sent(self, request_id: str, replica: str | None) -> None:
        """Notes which replica has a request; None: it waits for one."""
        if request_id in self._requests:
            self._put(self._requests[request_id], replica)

    def note_tokens(self, request_id: str, cached: int, answered: int) -> None:
        """Notes that a replica has brought tokens of an answer, having found `cached` of its prompt's. Ids that have
        ended are ignored."""
        one = self._requests.get(request_id)
        if one is not None and one.replica is not None:
            computed = answered + (0 if one.begun else max(0, one.wanted.prompt_tokens - cached))
            self.shares.note_computed(one.wanted.tenant, one.replica, computed)
            self._begun[one.wanted.tenant] += 0 if one.begun else one.wanted.rows
            one.begun = True
            one.answered += answered
            self._put(one, one.replica)

    def end(self, request_id: str) -> list[str]:
        """Ends a request, however it ended. Returns its tenant's that are held back, in their order: `place` says which
        of them may go now. Ids that have ended are ignored."""
        one = self._requests.pop(request_id, None)
        if one is None:
            return []
        self._put(one, None)
        del self._of[one.wanted.tenant][request_id]
        self._begun[one.wanted.tenant] -= one.wanted.rows * one.begun
        held = self._held[one.wanted.tenant]
        if request_id in held:
            held.remove(request_id)
        return [*held]

    def count_held(self) -> dict[str, int]:
        """Returns how many sequences are held back, by tenant."""
        return {
            tenant: sum(self._requests[each].wanted.rows for each in held)
            for tenant, held in self._held.items()
            if held
        }

    def _put(self, one: _Known, replica: str | None) -> None:
        """Counts a request, with the blocks that it has by now, at a replica; None: at none."""
        if one.replica is not None:
            self.shares.note_blocks(one.wanted.tenant, one.replica, -one.counted)
            self.shares.note_requests(one.wanted.tenant, one.replica, -1)
        one.replica, one.counted = replica, one.blocks
        if replica is not None:
            self.shares.note_blocks(one.wanted.tenant, replica, one.counted)
            self.shares.note_requests(one.wanted.tenant, replica, 1)

    def _room_for(self, wanted: Wanted, replicas: Collection[str], pinned: Pinned) -> str | None:
        """Returns where there is room for a request, as `place` does, whatever waits before it."""
        limits = self._limits.get(wanted.tenant)
        rows, blocks = (None, None) if limits is None else (limits.max_running, limits.max_blocks)
        if not isinstance(rows, int) and not isinstance(blocks, int):
            return ANYWHERE  # no limits, or shares, which each replica keeps
        others = [one for one in self._of[wanted.tenant].values() if one.replica]
        if isinstance(rows, int) and others and sum(one.wanted.rows for one in others) + wanted.rows > rows:
            return None
        if not isinstance(blocks, int):
            return ANYWHERE
        fits = sum(one.wanted.blocks for one in others) + pinned.blocks + wanted.blocks <= blocks
        home = pinned.replica if wanted.pins or pinned.blocks else ""
        if fits and not (wanted.pins and home):
            return ANYWHERE
        if fits:
            return home if home in replicas else None
        places = {place for place in (home, *(one.replica for one in others)) if place}
        if not places:
            return ANYWHERE
        return next(iter(places)) if len(places) == 1 and places <= {*replicas} else None
