"""Limits: what can be accepted beside what has been: requests, pins, limits of tenants, sizes of the pool.

Invariant: every request that has been accepted can run to its end alone, beside what is pinned.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Mapping

from pagemill.errors import InvalidRequestError, KVMemoryError, PinLimitError, RequestTooLargeError
from pagemill.memory.digest import extend_chain
from pagemill.scheduling.beam import blocks_needed
from pagemill.scheduling.sequence import Pinning, Request, Sequence
from pagemill.scheduling.state import SchedulerState
from pagemill.scheduling.tenancy import Live
from pagemill.tenant_limits import TenantLimits

logger = logging.getLogger(__name__)


def accept(state: SchedulerState, sequence: Sequence) -> None:
    """Takes in the request whose first sequence this is, or raises and changes nothing.

    If it sets no `max_tokens`, `max_len` becomes as many tokens as fit. If it is to be pinned, room is kept for the
    pin. Raises RequestTooLargeError if it could not even run alone, and TooManyWaitingError, UnknownTenantError,
    PinLimitError or InvalidRequestError.
    """
    request = sequence.request
    name, count = request.width
    if count > state.max_num_seqs:
        raise RequestTooLargeError.of_width(name, count, state.max_num_seqs)
    if request.params.max_tokens is None:
        request.max_len = _longest(state, sequence)
    state.tenants.check(request, *_most_blocks(state, sequence))
    if request.pin is not None:
        _reserve_pin(state, request, request.pin)


def set_tenants(state: SchedulerState, changed: Mapping[str, TenantLimits]) -> None:
    """Makes tenants known, or changes their limits, all at once.

    Raises ConfigError, and changes nothing, for limits that the pool, or a request already accepted, does not allow.
    """
    state.tenants.set(changed, _live(state))


def longest_sequence(state: SchedulerState, max_model_len: int) -> int:
    """Returns how many tokens a sequence that begins like no pin can have.

    Those are the ones whose K/V fit beside the pins, and a last one, which needs no place.
    """
    room, footprint = state.memory.num_frames - state.pins.num_frames, state.memory.footprint
    return bisect_right(range(max_model_len), room, key=lambda n: footprint.frames(n, state.chunk))


def least_frames(state: SchedulerState) -> int:
    """Returns the smallest pool that holds what is running now and keeps what is guaranteed.

    In it each request can run to its end alone, beside what is pinned. In a larger one it may not: guarantees that are
    shares of the pool are rounded down.
    """
    held, live = state.memory.num_frames - state.memory.num_available, _live(state)
    least = max([held, len(state.memory.windows), *(need for _, need, _ in live)])
    more = range(state.memory.num_frames - least)
    return least + bisect_left(more, True, key=lambda frames: state.tenants.refusal(least + frames, live) is None)


def check_size(state: SchedulerState, num_frames: int) -> None:
    """Raises KVMemoryError if with so many frames in the pool a request could not run to its end any more, or a
    tenant's guarantee not be kept."""
    refused = state.tenants.refusal(num_frames, _live(state))
    if refused is not None:
        raise KVMemoryError(
            f"the KV pool cannot have {num_frames} blocks now: {refused.reason}, or ask for another size",
            param="kv_memory",
        )


def _live(state: SchedulerState) -> Live:
    first = [siblings[0] for siblings in state.requests.values()]
    needs = [(sequence, *_most_blocks(state, sequence)) for sequence in first]
    return [(sequence.request, need - pinned, sequence.num_rows) for sequence, need, pinned in needs]


def _most_blocks(state: SchedulerState, sequence: Sequence) -> tuple[int, int]:
    """Returns the most blocks that a request's sequence may take, and how many of them pins hold."""
    pinned = state.pinned_entries(sequence)
    need = blocks_needed(state.memory, sequence.request, state.chunk, pinned)
    return need, state.memory.footprint.pinned(sequence.request.max_len - 1, state.chunk, pinned)


def _longest(state: SchedulerState, sequence: Sequence) -> int:
    """Returns how many of the `max_len` tokens that a request may have are sure to fit beside what is pinned.

    At least what it asks for, so that a refusal can state its need. The last token needs no place.
    """
    request, memory = sequence.request, state.memory
    pinned = state.pinned_entries(sequence)

    def lacks_room(num_tokens: int) -> bool:
        need = memory.footprint.frames(num_tokens - 1, state.chunk, pinned)
        return not state.tenants.fits(request, need, memory.footprint.pinned(num_tokens - 1, state.chunk, pinned))

    least = max(sequence.prompt_len + max(request.params.min_tokens, 1), len(sequence.tokens) + 1)
    return least + bisect_left(range(least + 1, request.max_len + 1), True, key=lacks_room)


def _reserve_pin(state: SchedulerState, request: Request, pin: Pinning) -> None:
    if not state.caches_prefixes:
        raise InvalidRequestError(
            f"pin {pin.name!r} could not be found again: enable_prefix_caching is False; set it", param="name"
        )
    digests: list[bytes] = []
    extend_chain(digests, request.root, request.prompt_token_ids, state.memory.block_size)
    most = state.tenants.max_pinned(request.tenant, state.pins.pinnable)
    state.pins.reserve(request.request_id, pin.name, pin.space, digests, pin.expires_s, most)
    refused = state.tenants.refusal(state.memory.num_frames, _live(state))
    if refused is None:
        return
    state.pins.drop(request.request_id)
    reason = refused.reason
    if refused.request is None or refused.request.tenant != request.tenant:
        logger.info("pin %r of tenant %r is refused: %s", pin.name, request.tenant, reason)
        what = "what others are guaranteed" if refused.request is None else "another request that was accepted"
        reason = f"{what} would not fit beside its {len(digests)} blocks; pin less, or try again later"
    raise PinLimitError(f"pin {pin.name!r} leaves too little: {reason}", param="prompt")
