"""Blocks that running sequences are about to compute, and the waiting sequences that need the same ones next.

They wait for those blocks instead of computing them twice.
"""

from __future__ import annotations

from pagemill.scheduling.sequence import Sequence


class PendingPrefixes:
    """digest -> the sequence that computes it. The first to claim a block keeps it."""

    def __init__(self) -> None:
        self._owner: dict[bytes, Sequence] = {}
        self._claims: dict[Sequence, list[tuple[int, bytes]]] = {}
        """Of each sequence, (index in its chain, digest) of what it has still to compute; the next one last."""

        self._waiters: dict[bytes, list[Sequence]] = {}

    def wait(self, digest: bytes, sequence: Sequence) -> bool:
        """If someone is computing this block, holds the sequence back until that has ended, one way or the other."""
        if digest not in self._owner:
            return False
        self._waiters.setdefault(digest, []).append(sequence)
        return True

    def add(self, sequence: Sequence, first: int) -> None:
        """The sequence is going to compute its full blocks from index `first` on, in order."""
        claims = [
            (index, digest)
            for index, digest in enumerate(sequence.digests[first:], start=first)
            if self._owner.setdefault(digest, sequence) is sequence
        ]
        if claims:
            claims.reverse()
            self._claims[sequence] = claims

    def computed(self, sequence: Sequence, num_blocks: int) -> list[Sequence]:
        """The sequence's first `num_blocks` blocks have been committed. Returns those that waited for them."""
        claims = self._claims.get(sequence)
        if claims is None:
            return []
        released: list[Sequence] = []
        while claims and claims[-1][0] < num_blocks:
            released += self._resolve(claims.pop()[1])
        if not claims:
            del self._claims[sequence]
        return released

    def drop(self, sequence: Sequence) -> list[Sequence]:
        """The sequence stops running; what it has not computed is open to others. Returns those that waited for it."""
        released: list[Sequence] = []
        for _, digest in self._claims.pop(sequence, ()):
            released += self._resolve(digest)
        return released

    def _resolve(self, digest: bytes) -> list[Sequence]:
        del self._owner[digest]
        return self._waiters.pop(digest, [])
