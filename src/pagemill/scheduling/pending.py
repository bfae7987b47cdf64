"""Blocks that running sequences are about to compute, or loads to bring up, and the waiting sequences that need them.

They wait for those blocks instead of computing them twice.
"""

from __future__ import annotations

import collections.abc as abc
from collections.abc import Hashable

from pagemill.scheduling.sequence import Sequence


class PendingPrefixes:
    """digest -> its owner: the sequence that computes it, or the id of a load. The first to claim a block keeps it."""

    def __init__(self) -> None:
        self.owner: dict[bytes, Hashable] = {}
        self._claims: dict[Hashable, list[tuple[int, bytes]]] = {}
        """Of each owner, (index in its chain, digest) of what is still to come; the next one last."""

        self.waiters: dict[bytes, list[Sequence]] = {}

    def owned(self, digest: bytes) -> bool:
        return digest in self.owner

    def wait(self, digest: bytes, sequence: Sequence) -> bool:
        """If someone is computing this block, holds the sequence back until that has ended, one way or the other."""
        if digest not in self.owner:
            return False
        self.waiters.setdefault(digest, []).append(sequence)
        return True

    def add(self, owner: Hashable, digests: abc.Sequence[bytes], first: int) -> None:
        """The full blocks of this chain from index `first` on are going to come, in order."""
        claims = [
            (index, digest)
            for index, digest in enumerate(digests[first:], start=first)
            if self.owner.setdefault(digest, owner) is owner
        ]
        if claims:
            claims.reverse()
            self._claims[owner] = claims

    def computed(self, owner: Hashable, num_blocks: int) -> list[Sequence]:
        """The owner's first `num_blocks` blocks have been committed. Returns those that waited for them."""
        claims = self._claims.get(owner)
        if claims is None:
            return []
        released: list[Sequence] = []
        while claims and claims[-1][0] < num_blocks:
            released += self._resolve(claims.pop()[1])
        if not claims:
            del self._claims[owner]
        return released

    def drop(self, owner: Hashable) -> list[Sequence]:
        """Nothing more comes from this owner; the rest is open to others. Returns those that waited for it."""
        released: list[Sequence] = []
        for _, digest in self._claims.pop(owner, ()):
            released += self._resolve(digest)
        return released

    def _resolve(self, digest: bytes) -> list[Sequence]:
        del self.owner[digest]
        return self.waiters.pop(digest, [])
