"""BlockDirectory: which replicas have which blocks, and how much of a prompt each of them has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Reach(NamedTuple):
    """States how many leading blocks of a chain a replica has, and how many of these on disk alone."""

    blocks: int
    loads: int


class BlockDirectory:
    """Maps a block's name to the replicas that hold it, as a bit for each.

    A block is held by a replica that has said so, and coming where a request is under way that computes it. Both count
    as found, since a request waits for a prefix that is being computed instead of computing it too. Names are bytes of
    one length, however short: a block has one for memory and one for disk. A replica is a number, small since it is the
    place of a bit.
    """

    def __init__(self) -> None:
        self._held: dict[bytes, int] = {}
        self._coming: dict[bytes, int] = {}
        self._claims: dict[tuple[int, bytes], int] = {}
        """Numbers of requests under way that bring a block, by replica and block."""

    def __len__(self) -> int:
        """Returns how many digests some replica holds."""
        return len(self._held)

    def store(self, replica: int, digests: Iterable[bytes]) -> None:
        """Notes that a replica holds blocks."""
        held, bit = self._held, 1 << replica
        for digest in digests:
            held[digest] = held.get(digest, 0) | bit

    def remove(self, replica: int, digests: Iterable[bytes]) -> None:
        """Notes that a replica holds blocks no more; others than it held are ignored."""
        for digest in digests:
            _clear(self._held, digest, 1 << replica)

    def claim(self, replica: int, digests: Iterable[bytes]) -> list[bytes]:
        """Notes that a request under way brings these blocks. Returns those that `settle` must be told of."""
        bit, claimed = 1 << replica, []
        for digest in digests:
            if not self._held.get(digest, 0) & bit:
                claimed.append(digest)
                self._claims[replica, digest] = self._claims.get((replica, digest), 0) + 1
                self._coming[digest] = self._coming.get(digest, 0) | bit
        return claimed

    def settle(self, replica: int, claimed: Iterable[bytes]) -> None:
        """Ends what `claim` has returned: these blocks are held by now, or do not come."""
        for digest in claimed:
            left = self._claims.pop((replica, digest)) - 1
            if left:
                self._claims[replica, digest] = left
            else:
                _clear(self._coming, digest, 1 << replica)

    def forget(self, replica: int) -> None:
        """Forgets what a replica holds. O(digests). Its claims must have been settled."""
        bit = 1 << replica
        for digest in [digest for digest, holders in self._held.items() if holders & bit]:
            _clear(self._held, digest, bit)

    def find(self, digests: Sequence[bytes], replicas: int, *, coming: bool = True) -> dict[int, int]:
        """Returns how many leading blocks of a chain each replica has, held or coming, for those that have any.

        replicas: the bits of those to look for. coming: False to leave out what is not held yet.
        """
        found: dict[int, int] = {}
        for depth, digest in enumerate(digests):
            have = self._held.get(digest, 0) | (self._coming.get(digest, 0) if coming else 0)
            if depth:
                _note(found, replicas & ~have, depth)
            replicas &= have
            if not replicas:
                return found
        _note(found, replicas, len(digests))
        return found

    def reach(
        self, digests: Sequence[bytes], on_disk: Sequence[bytes], replicas: int, *, coming: bool = True
    ) -> dict[int, Reach]:
        """Returns how much of a chain each replica has in memory and on disk, for those that have any on disk before
        what they lack. on_disk: names there of the same blocks. The other arguments are those of `find`."""
        blocks: dict[int, int] = {}
        loads: Counter[int] = Counter()
        """By the bits of replicas, how many blocks these alone have on disk alone."""
        for depth, (digest, below) in enumerate(zip(digests, on_disk, strict=True)):
            here = self._held.get(digest, 0) | (self._coming.get(digest, 0) if coming else 0)
            have = here | self._held.get(below, 0)
            if depth:
                _note(blocks, replicas & ~have, depth)
            replicas &= have
            if not replicas:
                break
            if loaded := replicas & ~here:
                loads[loaded] += 1
        else:
            _note(blocks, replicas, len(digests))
        by_replica: Counter[int] = Counter()
        for bits, count in loads.items():
            for number in _numbers(bits):
                by_replica[number] += count
        return {number: Reach(blocks[number], count) for number, count in by_replica.items()}


def _note(found: dict[int, int], replicas: int, depth: int) -> None:
    """Notes a length for each replica whose bit is set."""
    if depth:
        found.update(dict.fromkeys(_numbers(replicas), depth))


def _numbers(replicas: int) -> Iterator[int]:
    """Gives the numbers of the bits that are set."""
    while replicas:
        lowest = replicas & -replicas
        yield lowest.bit_length() - 1
        replicas ^= lowest


def _clear(holders: dict[bytes, int], digest: bytes, bit: int) -> None:
    """Takes a bit from a digest's holders, and forgets a digest that has none left."""
    if left := holders.get(digest, 0) & ~bit:
        holders[digest] = left
    else:
        holders.pop(digest, None)
