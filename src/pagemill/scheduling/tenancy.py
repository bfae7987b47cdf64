"""Tenancy: each tenant's limits, and what it has running and waiting.

Blocks and their quotas are the memory manager's; see `memory/tenants.py`.
"""

from __future__ import annotations

import collections.abc as abc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pagemill.errors import (
    ConfigError,
    PoolTooSmallError,
    RequestTooLargeError,
    TenantShareTooSmallError,
    TooManyWaitingError,
    UnknownTenantError,
)
from pagemill.memory.manager import MemoryManager
from pagemill.memory.pins import Pins
from pagemill.memory.tenants import NO_QUOTA, Quota, Tenant, promised, refusal
from pagemill.scheduling.sequence import Request, Sequence
from pagemill.tenant_limits import DEFAULT_TENANT, TenantLimits

LEAST_PACE = 8
"""Prompt tokens that a step always takes of a tenant, however far it is ahead of others."""


@dataclass(slots=True, eq=False)
class TenantState:
    """Counts one tenant's sequences, and says what it may run.

    running: its running sequences. waiting: its waiting ones.
    late:    those of these for which there was no row when their request began; `max_waiting` does not count them.
    fresh:   those that began to wait since the last step was planned.
    rows:    rows of the persistent batch that it uses, those kept for forks included.
    max_rows: the most rows that it may use; NO_QUOTA if only those of all limit it.
    service: tokens computed for it, over its weight, see `WaitingQueue`.
    lead:    tokens computed for it beyond its share of what was computed meanwhile.
    """

    account: Tenant
    limits: TenantLimits
    max_rows: int
    running: int = 0
    waiting: int = 0
    late: int = 0
    fresh: int = 0
    rows: int = 0
    service: float = 0.0
    lead: float = 0.0
    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0

    def must_wait(self, free_rows: int) -> int:
        """Returns how many of those that wait cannot begin in the next step, the late ones left out.

        If the last step has left any of them waiting, all of them count. Else those count for which there is no row.
        """
        own, waiting = min(free_rows, self.max_rows - self.rows), self.waiting - self.late
        return waiting if self.waiting > self.fresh else max(0, waiting - max(0, own))

    def may_run(self, rows: int) -> bool:
        """Returns whether its own limit lets so many more sequences run."""
        return self.rows + rows <= self.max_rows

    def has_right_to(self, blocks: int) -> bool:
        """Returns whether so many more active blocks, and one for each running sequence to grow, are guaranteed."""
        return self.account.active + blocks + self.running <= self.account.kept_blocks

    def within_quota(self, blocks: int) -> bool:
        """Returns whether its own quota has room for so many more blocks, and one for each running sequence to grow."""
        return self.limits.max_blocks is None or blocks + self.running <= self.account.room


Live = abc.Sequence[tuple[Request, int, int]]
"""Requests that have been accepted; the most blocks that one sequence of each may take beside what is pinned; and the
rows that it needs to begin, or to begin again."""


class Refusal(NamedTuple):
    """Says why a pool could not keep limits, and the way out, to who sets them; and which accepted request could no
    longer run, if that is why."""

    reason: str
    request: Request | None = None


class Tenancy:
    """The tenants of one scheduler. One named "default" is always there."""

    def __init__(self, memory: MemoryManager, pins: Pins, max_num_seqs: int) -> None:
        """max_num_seqs: rows of all tenants."""
        self._memory = memory
        self._pins = pins
        self._max_num_seqs = max_num_seqs
        self._states = {DEFAULT_TENANT: TenantState(memory.tenants[DEFAULT_TENANT], TenantLimits(), NO_QUOTA)}

    def __iter__(self) -> Iterator[TenantState]:
        return iter(self._states.values())

    def __getitem__(self, name: str) -> TenantState:
        """Raises UnknownTenantError."""
        try:
            return self._states[name]
        except KeyError:
            raise UnknownTenantError.of(name, self._states) from None

    def set(self, changed: abc.Mapping[str, TenantLimits], live: Live) -> None:
        """Makes tenants known, or changes their limits, all at once.

        Raises ConfigError, and changes nothing, if the pool cannot keep what is promised, or if one of the requests
        that were accepted could no longer run.
        """
        frames = self._memory.num_frames
        refused = self.refusal(frames, live, changed)
        if refused is not None:
            whose = f"tenant {next(iter(changed))!r}" if len(changed) == 1 else "tenants"
            raise ConfigError(f"{whose}: {refused.reason}", param="tenants")
        self._memory.set_quotas({name: _quota(limits, frames) for name, limits in changed.items()})
        for name, limits in changed.items():
            account, state = self._memory.tenants[name], self._states.get(name)
            account.set_idle_timeout(limits.idle_timeout_s)
            if state is None:
                self._states[name] = TenantState(account, limits, self._rows(limits))
            else:
                state.limits, state.max_rows = limits, self._rows(limits)
                account.part_blocks = NO_QUOTA

    def note_parts(self, parts: abc.Mapping[str, int]) -> None:
        """Notes how many of the blocks that a fleet guarantees each tenant are its here, until that is said anew, or
        its limits change. Tenants that are not known are ignored."""
        for name, part in parts.items():
            if name in self._states:
                self._states[name].account.part_blocks = part

    def refusal(
        self, num_frames: int, live: Live, changed: abc.Mapping[str, TenantLimits] | None = None
    ) -> Refusal | None:
        """Returns why a pool of `num_frames` could not keep the limits beside `live`; None if it can.

        changed: limits that take the place of present ones.
        """
        limits = {name: state.limits for name, state in self._states.items()} | dict(changed or {})
        quotas = {name: _quota(each, num_frames) for name, each in limits.items()}
        pinned = {name: self._pins.held(name) for name in quotas}
        reason = refusal(quotas, num_frames, pinned)
        if reason is not None:
            return Refusal(reason)
        total = promised(quotas, pinned)
        for request, need, rows in live:
            most_rows = self._rows(limits[request.tenant])
            if rows > most_rows:
                return Refusal(
                    f"the request {request.request_id!r} needs {rows} sequences to run at once, and max_running of its "
                    f"tenant {request.tenant!r} would be {most_rows}; wait for its end, or allow so many",
                    request,
                )
            own = {request.tenant: quotas[request.tenant]}
            left = num_frames - total + promised(own, pinned)
            limit = min(quotas[request.tenant].most, left) - pinned[request.tenant]
            if need > limit:
                return Refusal(
                    f"the request {request.request_id!r} may grow to {request.max_len} tokens, which takes {need} "
                    f"blocks, and its tenant {request.tenant!r} could count on {limit} beside "
                    f"{pinned[request.tenant]} pinned; wait for its end, or leave it enough",
                    request,
                )
        return None

    def resized(self) -> None:
        """Sets the limits that are shares of the pool anew, since it has another size."""
        frames = self._memory.num_frames
        self._memory.set_quotas({name: _quota(state.limits, frames) for name, state in self._states.items()})

    def fits(self, request: Request, need: int, pinned: int) -> bool:
        """Returns whether each sequence of this request can count on `need` blocks, of which pins hold `pinned`.

        They must be within its tenant's quota, all together within the limit per request and, of a session's, per
        session, and be guaranteed to nobody else. Raises UnknownTenantError.
        """
        state, frames = self[request.tenant], self._memory.num_frames
        needs = {"max_blocks_per_request": self._total(request, need)}
        if request.in_session:
            needs["max_blocks_per_session"] = need
        limits = [(each, state.limits.number(which, frames)) for which, each in needs.items()]
        return need - pinned <= self._countable(state) and all(limit is None or each <= limit for each, limit in limits)

    def check(self, request: Request, need: int, pinned: int) -> None:
        """Refuses a request that can never run, or may not wait now.

        need: blocks that one of its sequences may take (of a search: all beams together); pins hold `pinned` of them.
        Raises UnknownTenantError, RequestTooLargeError or TooManyWaitingError.
        """
        state, frames, name = self[request.tenant], self._memory.num_frames, request.tenant
        limits, size, n = state.limits, self._memory.block_size, request.params.n
        asked, width = request.width
        grows = f"the request may grow to {request.max_len} tokens, which takes"
        param, shorter = "max_tokens", "lower max_tokens or the prompt's length"
        if not request.params.max_tokens:
            param, shorter = "prompt", "shorten the prompt"
        beside = f"{grows} {need - pinned} KV blocks of {size} tokens" + (f" beside {pinned} pinned" if pinned else "")
        if need - pinned > (left := frames - self._pins.num_frames):
            raise PoolTooSmallError(
                f"{beside}, but the pool has {frames}, of which pins leave {left}; {shorter}, or give the pool more "
                f"memory (kv_memory)",
                param=param,
                blocks=need - pinned,
            )
        countable = self._countable(state)
        if need - pinned > countable:
            quota = "no max_blocks" if limits.max_blocks is None else f"its max_blocks is {limits.max_blocks}"
            left = frames - self._promised_beside(state)
            raise TenantShareTooSmallError(
                f"{beside}, but tenant {name!r} can count on {countable} ({quota}; others leave it {left} of the "
                f"pool's {frames}, and its pins hold {self._pins.held(name)}); {shorter}, or raise the tenant's limit",
                param=param,
                blocks=need - pinned,
            )
        per_request = limits.number("max_blocks_per_request", frames)
        total = self._total(request, need)
        if per_request is not None and total > per_request:
            raise TenantShareTooSmallError(
                f"{grows} {total} KV blocks of {size} tokens with n={n}, but max_blocks_per_request of tenant {name!r} "
                f"is {per_request}; {shorter}, ask for fewer sequences, or raise the tenant's limit",
                param=param,
                blocks=total,
                limit="max_blocks_per_request",
            )
        per_session = limits.number("max_blocks_per_session", frames) if request.in_session else None
        if per_session is not None and need > per_session:
            raise TenantShareTooSmallError(
                f"the session may grow to {request.max_len} tokens, which takes {need} KV blocks of {size} tokens, but "
                f"max_blocks_per_session of tenant {name!r} is {per_session}; {shorter}, begin another session, "
                f"or raise the tenant's limit",
                param=param,
                blocks=need,
                limit="max_blocks_per_session",
            )
        if width > state.max_rows:
            raise RequestTooLargeError(
                f"{asked} is {width}, but max_running lets {state.max_rows} run at once for tenant {name!r}; ask for "
                f"fewer or raise it",
                param=asked,
            )
        if limits.max_waiting is None or request.is_admitted:
            return
        waiting = state.must_wait(self._max_num_seqs - sum(each.rows for each in self))
        if waiting >= limits.max_waiting:
            raise TooManyWaitingError(
                f"{waiting} sequences of tenant {name!r} wait, and max_waiting is {limits.max_waiting}; try again "
                f"later, or raise that limit",
                param="tenant",
            )

    @property
    def row_part(self) -> int:
        """Returns how many rows a tenant whose blocks are guaranteed may take from tenants that have more than that.

        All such parts are a quarter of the rows.
        """
        return max(1, self._max_num_seqs // (4 * len(self._states)))

    def may_have(self, name: str, num_frames: int, limit: str = "") -> int:
        """Returns how many blocks a tenant could have in a pool of so many frames, by one of its limits; without one,
        how many a sequence could count on beside pinned ones. Raises UnknownTenantError."""
        if limit:
            return self[name].limits.number(limit, num_frames) or 0
        quotas = {each.account.name: _quota(each.limits, num_frames) for each in self}
        own, held = quotas.pop(self[name].account.name), self._pins.held(name)
        left = num_frames - promised(quotas, {other: self._pins.held(other) for other in quotas})
        return min(own.most, left) - held

    def max_pinned(self, name: str, pinnable: int) -> int | None:
        """Returns how many of the blocks that may be pinned a tenant's pins may hold. Raises UnknownTenantError."""
        return self[name].limits.number("max_pinned_blocks", pinnable)

    def serve(self, planned: abc.Mapping[Sequence, int]) -> None:
        """Counts the tokens of a step as service. planned: how many of each sequence."""
        if len(self._states) == 1:
            return
        counts: Counter[str] = Counter()
        for sequence, count in planned.items():
            counts[sequence.request.tenant] += count
        total, weights = counts.total(), sum(self._states[name].limits.weight for name in counts)
        for name, state in self._states.items():
            own, weight = counts[name], state.limits.weight
            if own or state.lead:
                share = weight / (weights if own else weights + weight)
                state.service += own / weight
                state.lead = max(0.0, state.lead + own - share * total)

    def paced(self, planned: abc.Mapping[Sequence, int], chunk: int) -> dict[str, int]:
        """Returns how many prompt tokens of some tenants a step takes beside what is planned, the generating sequences.

        They are tenants that are ahead by more than a step's tokens, `chunk`, while others generate: a prompt token
        for every second generating sequence takes about a fifth of the step.
        """
        if len(self._states) == 1:
            return {}
        generating = {sequence.request.tenant for sequence in planned}
        most = max(LEAST_PACE, len(planned) // 2)
        return {name: most for name, state in self._states.items() if state.lead > chunk and generating - {name}}

    def _rows(self, limits: TenantLimits) -> int:
        rows = limits.number("max_running", self._max_num_seqs, least=1)
        return NO_QUOTA if rows is None else rows

    def _total(self, request: Request, need: int) -> int:
        """Returns how many blocks a request takes, one of whose sequences takes `need` (of a search: all beams do)."""
        apart = 0 if request.beam is not None else request.params.n - 1
        shared = self._memory.windows.count(None) * (len(request.prompt_token_ids) // self._memory.block_size)
        return need + apart * (need - shared)

    def _promised_beside(self, state: TenantState) -> int:
        """Returns how many blocks are out of a tenant's reach: what others are guaranteed, or have pinned."""
        return self._memory.tenants.promised - state.account.promised

    def _countable(self, state: TenantState) -> int:
        left = self._memory.num_frames - self._promised_beside(state)
        return min(state.account.max_blocks, left) - self._pins.held(state.account.name)


def _quota(limits: TenantLimits, num_frames: int) -> Quota:
    """Returns a tenant's quota in a pool of so many frames."""
    most = limits.number("max_blocks", num_frames)
    return Quota(limits.number("guaranteed_blocks", num_frames) or 0, NO_QUOTA if most is None else most)
