"""Pins: block tables that outlive the request that computed them, so that no policy ever evicts their blocks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass

from pagemill.errors import PinLimitError
from pagemill.memory.block_table import BlockTable, first_entry_in_window
from pagemill.memory.manager import MemoryManager
from pagemill.namespace import Namespace


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix of `num_tokens` tokens, whole blocks only, in a namespace.

    digests:   of its entries.
    blocks:    (digest, layer group) of each block that it holds.
    expires_s: when it ends; None: never. While it is being computed: how many seconds after that.
    table:     None while it is being computed.
    """

    name: str
    space: Namespace
    num_tokens: int
    digests: Sequence[bytes]
    expires_s: float | None
    blocks: list[tuple[bytes, int]]
    table: BlockTable | None = None


class Pins:
    """The pins of one memory, which together hold at most `share` of its pool.

    A pin counts from when its request is accepted, and a block of several pins counts once. Invariant: beside what is
    pinned, every accepted request can still run to its end alone.
    """

    def __init__(self, memory: MemoryManager, share: float) -> None:
        self._memory = memory
        self.share = share
        self._pins: dict[tuple[Namespace, str], Pin] = {}
        self._coming: dict[Hashable, Pin] = {}
        self._due = math.inf
        """No pin ends before."""
        self._blocks: defaultdict[str, Counter[tuple[bytes, int]]] = defaultdict(Counter)
        self.num_frames = 0
        """Frames that the pins hold, or will hold when they have been computed."""

    @property
    def pinnable(self) -> int:
        """Returns how many frames all pins together may hold."""
        return int(self.share * self._memory.num_frames)

    def held(self, tenant: str) -> int:
        """Returns how many of these frames hold one tenant's blocks; no two tenants have a block in common."""
        return len(self._blocks.get(tenant, ()))

    def leading(self, tenant: str, digests: Sequence[bytes]) -> int:
        """Returns how many leading entries of a prompt are sure to be found, since they are pinned, or will be.

        In a group with a window, a pin holds only the blocks that its last token sees. A prompt that continues the pin
        finds these; a prompt that differs before the pin's end may find nothing. So if a prompt leaves any of the pins
        that it begins with, this returns 0: the other pins could expire while their blocks are still held.
        """
        if not self.held(tenant):
            return 0
        if all(window is None for window in self._memory.windows):
            pinned = self._blocks[tenant]
            return next((at for at, digest in enumerate(digests) if (digest, 0) not in pinned), len(digests))
        pins = [pin for pin in (*self._pins.values(), *self._coming.values()) if pin.space.tenant == tenant]
        begun = [pin.digests for pin in pins if pin.digests[:1] == digests[:1] != []]
        behind = all(digests[len(pin) - 1 : len(pin)] == pin[-1:] for pin in begun)
        return max(map(len, begun), default=0) if behind else 0

    def reserve(
        self,
        owner: Hashable,
        name: str,
        space: Namespace,
        digests: Sequence[bytes],
        expires_s: float | None,
        most: int | None = None,
    ) -> None:
        """Makes room for a pin of the blocks with these digests, which `owner` is going to compute.

        most: the tenant's own limit, of blocks and of pins. Raises PinLimitError, and changes nothing, beyond that, the
        share of the pool, or of the tenant's quota.
        """
        memory = self._memory
        length = len(digests) * memory.block_size
        blocks = [
            (digest, group)
            for group, window in enumerate(memory.windows)
            for digest in digests[first_entry_in_window(length, window, memory.block_size) :]
        ]
        pinned, quota = self._blocks[space.tenant], memory.tenants[space.tenant].max_blocks
        more = len(set(blocks) - pinned.keys())
        limit = self.pinnable
        if more > (left := max(0, limit - self.num_frames)):
            raise PinLimitError(
                f"pin {name!r} takes {len(blocks)} KV blocks, {more} of them new, and {left} more may be pinned: "
                f"max_pinned_share ({self.share:g}) of the pool is {limit} of {memory.num_frames}; unpin something, "
                f"raise it, or raise kv_memory",
                param="prompt",
            )
        if len(pinned) + more > (own := int(self.share * min(quota, memory.num_frames))):
            raise PinLimitError(
                f"pin {name!r} takes {len(blocks)} KV blocks; with it tenant {space.tenant!r} would have "
                f"{len(pinned) + more} pinned, over max_pinned_share ({self.share:g}) of its max_blocks, {own} of "
                f"{quota}; unpin something, or raise the tenant's limit",
                param="prompt",
            )
        if most is not None and len(pinned) + more > most:
            raise PinLimitError(
                f"pin {name!r} takes {len(blocks)} KV blocks; with it tenant {space.tenant!r} would have "
                f"{len(pinned) + more} pinned, over its max_pinned_blocks, {most}; unpin something, or raise it",
                param="prompt",
            )
        replaces = (space, name) in self._pins
        pins, limit = self._count(space.tenant) + 1 - replaces, limit if most is None else most
        if pins > limit:
            raise PinLimitError(
                f"pin {name!r} would be number {pins} of tenant {space.tenant!r}, which can have no more pins than "
                f"pinned blocks, {limit}; unpin something, or raise that limit",
                param="name",
            )
        pinned.update(blocks)
        self._note_held(space.tenant)
        self._coming[owner] = Pin(name, space, length, digests, expires_s, blocks)

    def keep(self, owner: Hashable, table: BlockTable, now: float) -> None:
        """Pins the owner's table, which has been computed, and ends a pin of the same name.

        It expires `expires_s` seconds from now.
        """
        pin = self._coming.pop(owner)
        pin.table = self._memory.fork(table, pin.num_tokens)
        pin.expires_s = None if pin.expires_s is None else now + pin.expires_s
        self.unpin(pin.name, pin.space, now)
        self._pins[pin.space, pin.name] = pin
        self._due = min(self._due, math.inf if pin.expires_s is None else pin.expires_s)

    def drop(self, owner: Hashable) -> None:
        """Gives up the pin that this owner was to compute, if there is one: the owner has ended."""
        pin = self._coming.pop(owner, None)
        if pin is not None:
            self._forget(pin)

    def unpin(self, name: str, space: Namespace, now: float) -> bool:
        """Ends a pin; returns False if there is none of this name.

        Its blocks are cached from now on, unless somebody else holds them.
        """
        pin = self._pins.pop((space, name), None)
        if pin is None or pin.table is None:
            return False
        self._memory.close(pin.table, now)
        self._forget(pin)
        return True

    def expire(self, now: float) -> float:
        """Ends the pins whose time is over. Returns when the next one ends (inf: never)."""
        if self._due > now:
            return self._due
        for pin in self.list():
            if pin.expires_s is not None and pin.expires_s <= now:
                self.unpin(pin.name, pin.space, now)
        self._due = min((pin.expires_s for pin in self.list() if pin.expires_s is not None), default=math.inf)
        return self._due

    def lose(self, frames: Set[int], now: float) -> None:
        """Ends the pins that have blocks in these frames."""
        for pin in self.list():
            if pin.table is not None and self._memory.lies_in(pin.table, frames):
                self.unpin(pin.name, pin.space, now)

    def clear(self, now: float) -> None:
        """Ends all pins."""
        for pin in self.list():
            self.unpin(pin.name, pin.space, now)

    def list(self) -> list[Pin]:
        """Returns the pins, in the order in which they came."""
        return list(self._pins.values())

    def _count(self, tenant: str) -> int:
        """Returns how many pins a tenant has, those that are being computed included."""
        return sum(pin.space.tenant == tenant for pins in (self._pins, self._coming) for pin in pins.values())

    def _forget(self, pin: Pin) -> None:
        left = self._blocks[pin.space.tenant]
        left.subtract(pin.blocks)
        self._blocks[pin.space.tenant] = +left
        self._note_held(pin.space.tenant)

    def _note_held(self, tenant: str) -> None:
        account, held = self._memory.tenants[tenant], self.held(tenant)
        self.num_frames += held - account.pinned
        self._memory.tenants.note_pinned(account, held)
