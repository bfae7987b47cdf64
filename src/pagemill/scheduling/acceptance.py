"""Acceptance: what can be accepted beside what has been: requests, pins, limits of tenants, sizes of the pool."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from pagemill.errors import InvalidRequestError, KVMemoryError, PinLimitError, RequestTooLargeError
from pagemill.memory.digest import extend_chain
from pagemill.memory.manager import MemoryManager
from pagemill.memory.pins import Pins
from pagemill.scheduling.admission import Admission
from pagemill.scheduling.beam import blocks_needed
from pagemill.scheduling.sequence import Pinning, Request, Sequence
from pagemill.scheduling.tenancy import Live, Tenancy
from pagemill.tenant_limits import TenantLimits


class Acceptance:
    """Invariant: every request that has been accepted can run to its end alone, beside what is pinned.

    requests: the scheduler's, their sequences that have not finished. chunk: the most tokens of a step.
    """

    def __init__(
        self,
        memory: MemoryManager,
        tenants: Tenancy,
        pins: Pins,
        admission: Admission,
        requests: dict[str, list[Sequence]],
        *,
        chunk: int,
        max_num_seqs: int,
        enable_prefix_caching: bool,
    ) -> None:
        self._memory = memory
        self._tenants = tenants
        self._pins = pins
        self._admission = admission
        self._requests = requests
        self._chunk = chunk
        self._max_num_seqs = max_num_seqs
        self._caching = enable_prefix_caching

    def accept(self, sequence: Sequence) -> None:
        """Takes a new request, of which this is the first sequence, or raises and changes nothing: RequestTooLargeError
        if even alone it could never run, TooManyWaitingError, UnknownTenantError, PinLimitError, InvalidRequestError.

        What its `max_tokens` leaves open is settled: `max_len` becomes as many tokens as fit. For a pin, room is kept.
        """
        request = sequence.request
        name, count = request.width
        if count > self._max_num_seqs:
            raise RequestTooLargeError(
                f"{name} is {count}, but max_num_seqs lets {self._max_num_seqs} sequences run at once; ask for fewer "
                f"or raise it",
                param=name,
            )
        if request.params.max_tokens is None:
            request.max_len = self._longest(sequence)
        self._tenants.check(request, *self._most_blocks(sequence), self._max_num_seqs)
        if request.pin is not None:
            self._reserve_pin(request, request.pin)

    def set_tenant(self, name: str, limits: TenantLimits) -> None:
        """Makes a tenant known, or changes its limits. Raises ConfigError, and changes nothing, for what can not be
        kept, of the pool or of the requests that have been accepted."""
        self._tenants.set(name, limits, self._live())

    def longest_sequence(self, max_model_len: int) -> int:
        """Tokens that a sequence that begins like no pin can have: those whose K/V fit beside the pins, and a last one,
        which needs no place."""
        room, needs = self._memory.num_frames - self._pins.num_frames, self._memory.needs
        return bisect_right(range(max_model_len), room, key=lambda n: needs.frames(n, self._chunk))

    @property
    def least_frames(self) -> int:
        """The smallest pool that holds what is running now, in which each request can run to its end alone, beside what
        is pinned, and what is guaranteed can be kept."""
        held, live = self._memory.num_frames - self._memory.num_available, self._live()
        least = max([held, len(self._memory.windows), *(need for _, need, _ in live)])
        more = range(self._memory.num_frames - least)
        return least + bisect_left(more, True, key=lambda frames: self._tenants.refusal(least + frames, live) is None)

    def check_size(self, num_frames: int) -> None:
        """Raises KVMemoryError if with so many frames in the pool a request could not run to its end any more, or a
        tenant's guarantee not be kept."""
        refusal = self._tenants.refusal(num_frames, self._live())
        if refusal is not None:
            raise KVMemoryError(
                f"the KV pool can not have {num_frames} blocks now: {refusal}, or ask for another size",
                param="kv_memory",
            )

    def _live(self) -> Live:
        first = [siblings[0] for siblings in self._requests.values()]
        needs = [(sequence, *self._most_blocks(sequence)) for sequence in first]
        return [(sequence.request, need - pinned, sequence.num_rows) for sequence, need, pinned in needs]

    def _most_blocks(self, sequence: Sequence) -> tuple[int, int]:
        """The most blocks that a request's sequence may take, and how many of them pins hold."""
        pinned = self._admission.pinned(sequence)
        need = blocks_needed(self._memory, sequence.request, self._chunk, pinned)
        return need, self._memory.needs.pinned(sequence.request.max_len - 1, self._chunk, pinned)

    def _longest(self, sequence: Sequence) -> int:
        """How many of the `max_len` tokens that a request may have fit for certain, beside what is pinned; at least
        what it asks for, so that it is refused with its need. The last token needs no place."""
        request, memory = sequence.request, self._memory
        pinned = self._admission.pinned(sequence)

        def lacks_room(num_tokens: int) -> bool:
            need = memory.needs.frames(num_tokens - 1, self._chunk, pinned)
            return not self._tenants.fits(request, need, memory.needs.pinned(num_tokens - 1, self._chunk, pinned))

        least = sequence.prompt_len + max(request.params.min_tokens, 1)
        return least + bisect_left(range(least + 1, request.max_len + 1), True, key=lacks_room)

    def _reserve_pin(self, request: Request, pin: Pinning) -> None:
        if not self._caching:
            raise InvalidRequestError(
                f"pin {pin.name!r} could not be found again: enable_prefix_caching is False; set it", param="name"
            )
        digests: list[bytes] = []
        extend_chain(digests, request.root, request.prompt_token_ids, self._memory.block_size)
        self._pins.reserve(request.request_id, pin.name, pin.space, digests, pin.expires_s)
        refusal = self._tenants.refusal(self._memory.num_frames, self._live())
        if refusal is not None:
            self._pins.drop(request.request_id)
            raise PinLimitError(
                f"pin {pin.name!r} leaves too little: {refusal}",
                param="prompt",
            )
