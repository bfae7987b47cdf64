"""FleetTenancy: what each tenant has at all replicas together, and which of its requests wait for its own limits.

A replica knows its own part alone. So the front end holds back what would exceed a limit that is a number: sequences
that run (`max_running`), and active blocks (`max_blocks`). Limits that are shares hold in each replica, and so in all.
What replicas are told of the others, so that shares and guarantees hold over all, is in `shares`.

It knows no clock and no Ray: the same code runs in the simulator.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
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

    replica: who has it; None while nobody does. is_held: whether it waits for its tenant's own limits. begun: whether
    it has brought a token. answered: tokens that it has. counted: its active blocks, as they count in `shares`.
    """

    number: int
    wanted: Wanted
    replica: str | None = None
    is_held: bool = False
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


@dataclass
class _Sums:
    """Counts what a tenant has over all replicas.

    rows: sequences of all its requests. begun: of those that have brought a token. sent: of those that replicas have.
    blocks: the most that these may come to. at: how many of these each replica has. held: numbers and ids of requests
    that wait for the tenant's own limits, in the order in which they came.
    """

    rows: int = 0
    begun: int = 0
    sent: int = 0
    blocks: int = 0
    at: Counter[str] = field(default_factory=Counter)
    held: list[tuple[int, str]] = field(default_factory=list)

    def count(self, replica: str, wanted: Wanted, more: Literal[1, -1]) -> None:
        """Counts that a replica has a request more, or fewer."""
        self.sent += more * wanted.rows
        self.blocks += more * wanted.blocks
        self.at[replica] += more
        if not self.at[replica]:
            del self.at[replica]


class FleetTenancy:
    """Counts over all replicas. Limits of tenants that have not been set are none.

    limits: at the start, by tenant.
    """

    def __init__(self, limits: Mapping[str, TenantLimits]) -> None:
        self._limits = dict(limits)
        self._requests: dict[str, _Known] = {}
        self._sums: defaultdict[str, _Sums] = defaultdict(_Sums)
        """Counts what each tenant has."""
        self._begun = 0
        """Counts sequences of requests that have brought a token."""
        self._numbers = itertools.count()
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
        begun, own = self._begun, self._sums[tenant].begun
        waiting = self._sums[tenant].rows - own
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
        sums = self._sums[wanted.tenant]
        if is_new := request_id not in self._requests:
            self._requests[request_id] = _Known(next(self._numbers), wanted)
            sums.rows += wanted.rows
        one = self._requests[request_id]
        self._put(one, None)
        comes_first = not self.is_behind(request_id) if one.is_held else not (sums.held and is_new)
        place = self._room_for(wanted, replicas, pinned) if comes_first else None
        if one.is_held and place is not None:
            sums.held.pop(0)
        elif not one.is_held and place is None:
            insort(sums.held, (one.number, request_id))
        one.is_held = place is None
        return place

    def is_behind(self, request_id: str) -> bool:
        """Returns whether a request is held back behind another of its tenant, so that `place` would not let it go."""
        one = self._requests.get(request_id)
        return one is not None and one.is_held and self._sums[one.wanted.tenant].held[0][0] != one.number

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
            if not one.begun:
                self._count_begun(one, one.wanted.rows)
                one.begun = True
            one.answered += answered
            self._put(one, one.replica)

    def end(self, request_id: str) -> Iterator[str]:
        """Ends a request, however it ended. Gives its tenant's that are held back, in their order, each once the one
        before it has gone: `place` says whether it may go now. Ids that have ended are ignored."""
        one = self._requests.pop(request_id, None)
        if one is None:
            return iter(())
        self._put(one, None)
        sums = self._sums[one.wanted.tenant]
        sums.rows -= one.wanted.rows
        if one.begun:
            self._count_begun(one, -one.wanted.rows)
        if one.is_held:
            del sums.held[bisect_left(sums.held, (one.number, request_id))]
        return _firsts(sums.held)

    def count_held(self) -> dict[str, int]:
        """Returns how many sequences are held back, by tenant."""
        return {
            tenant: sum(self._requests[each].wanted.rows for _, each in sums.held)
            for tenant, sums in self._sums.items()
            if sums.held
        }

    def _count_begun(self, one: _Known, more: int) -> None:
        """Counts sequences more of requests that have brought a token, or fewer."""
        self._begun += more
        self._sums[one.wanted.tenant].begun += more

    def _put(self, one: _Known, replica: str | None) -> None:
        """Counts a request, with the blocks that it has by now, at a replica; None: at none."""
        blocks, wanted = one.blocks, one.wanted
        if (replica, blocks) == (one.replica, one.counted):
            return
        if one.replica is not None:
            self.shares.note_blocks(wanted.tenant, one.replica, -one.counted)
            self.shares.note_requests(wanted.tenant, one.replica, -1)
            self._sums[wanted.tenant].count(one.replica, wanted, -1)
        one.replica, one.counted = replica, blocks
        if replica is not None:
            self.shares.note_blocks(wanted.tenant, replica, blocks)
            self.shares.note_requests(wanted.tenant, replica, 1)
            self._sums[wanted.tenant].count(replica, wanted, 1)

    def _room_for(self, wanted: Wanted, replicas: Collection[str], pinned: Pinned) -> str | None:
        """Returns where there is room for a request, as `place` does, whatever waits before it."""
        limits = self._limits.get(wanted.tenant)
        rows, blocks = (None, None) if limits is None else (limits.max_running, limits.max_blocks)
        if not isinstance(rows, int) and not isinstance(blocks, int):
            return ANYWHERE  # no limits, or shares, which each replica keeps
        others = self._sums[wanted.tenant]
        if isinstance(rows, int) and others.at and others.sent + wanted.rows > rows:
            return None
        if not isinstance(blocks, int):
            return ANYWHERE
        fits = others.blocks + pinned.blocks + wanted.blocks <= blocks
        home = pinned.replica if wanted.pins or pinned.blocks else ""
        if fits and not (wanted.pins and home):
            return ANYWHERE
        if fits:
            return home if home in replicas else None
        places = {place for place in (home, *others.at) if place}
        if not places:
            return ANYWHERE
        return next(iter(places)) if len(places) == 1 and places <= {*replicas} else None


def _firsts(held: list[tuple[int, str]]) -> Iterator[str]:
    """Gives the first of requests that are held back, as long as the one before has gone."""
    before = None
    while held and held[0] != before:
        before = held[0]
        yield before[1]
