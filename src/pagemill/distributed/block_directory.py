"""BlockDirectory: which replicas have which blocks, and how much of a prompt each of them has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockDirectory:
    """Maps a block's digest to the replicas that hold it, as a bit for each.

    A block is held by a replica that has said so, and coming where a request is under way that computes it. Both count
    as found, since a request waits for a prefix that is being computed instead of computing it too. Digests are bytes
    of one length, however short; a replica is a number, small since it is the place of a bit.
    """

    def __init__(self) -> None:
        self._held: dict[bytes, int] = {}
        self._coming: dict[bytes, int] = {}
        self._claims: dict[tuple[int, bytes], int] = {}
        """Numbers of requests under way that bring a block, by replica and block."""

    def __len__(self) -> int:
        """Returns how many digests some replica holds."""
        return len(self._held)

    def count_holders(self, digest: bytes) -> int:
        """Returns how many replicas hold a block."""
        return self._held.get(digest, 0).bit_count()

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


def _note(found: dict[int, int], replicas: int, depth: int) -> None:
    """Notes a length for each replica whose bit is set."""
    while replicas and depth:
        lowest = replicas & -replicas
        found[lowest.bit_length() - 1] = depth
        replicas ^= lowest


def _clear(holders: dict[bytes, int], digest: bytes, bit: int) -> None:
    """Takes a bit from a digest's holders, and forgets a digest that has none left."""
    if left := holders.get(digest, 0) & ~bit:
        holders[digest] = left
    else:
        holders.pop(digest, None)
