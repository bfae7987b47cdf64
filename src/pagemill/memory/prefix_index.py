"""PrefixIndex: finds published blocks by what they hold.

One hash map per layer group from digest to block, and the tree of blocks, parent to children, so that a match can go on
inside one more block. A block is published if and only if it is in here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

from pagemill.memory.block_table import first_entry_in_window
from pagemill.memory.digest import TOKEN_BYTES, pack_tokens
from pagemill.memory.reach import fit_windows, leading, reach

MAX_CANDIDATES = 8
"""Children of one parent, beginning with the same token, that are compared; the latest published come first."""


class Match(NamedTuple):
    """A prefix that was found.

    num_tokens: its length. blocks: by group, its blocks, -1 before the group's window. first_held: by group, the first
    entry that is not -1.
    """

    num_tokens: int
    blocks: list[array[int]]
    first_held: list[int]


class PrefixIndex:
    """Columns are indexed by block id; digest, parent and tokens are b"" for a block that is not published.

    digest: its name; parent: digest of the block before it, or the chain's root; tokens: its tokens, packed (bytes, not
    integers: a published block costs about 0.4 KB, and makes no object that the garbage collector tracks); depth: how
    many blocks stand before it in its chain.

    children: the latest published child, by its parent's digest and its own first token.
    Children are linked for one group only, the leading one: a full-attention group where there is one, since a match
    needs all of its blocks. Siblings form a doubly linked list through two arrays.
    """

    def __init__(self, capacity: int, block_size: int, windows: Sequence[int | None]) -> None:
        self.digest: list[bytes] = []
        self.parent: list[bytes] = []
        self.tokens: list[bytes] = []
        self.depth = array("i")
        self.by_digest: tuple[dict[bytes, int], ...] = tuple({} for _ in windows)
        self.children: dict[bytes, int] = {}
        self._next = array("i")
        self._previous = array("i")
        self._block_size = block_size
        self._windows = tuple(windows)
        self._full = tuple(self.by_digest[group] for group, window in enumerate(windows) if window is None)
        self._windowed = tuple(
            (window, self.by_digest[group]) for group, window in enumerate(windows) if window is not None
        )
        self.leading = self._windows.index(None) if None in self._windows else 0
        self.grow(capacity)

    def grow(self, capacity: int) -> None:
        """Makes room for block ids below `capacity`, if there is less."""
        more = max(0, capacity - len(self.digest))
        for names in (self.digest, self.parent, self.tokens):
            names.extend([b""] * more)
        self.depth.extend(array("i", bytes(4 * more)))
        for links in (self._next, self._previous):
            links.extend(array("i", [-1]) * more)

    def publish(self, block: int, group: int, digest: bytes, parent: bytes, tokens: bytes, depth: int) -> None:
        """Makes a block findable. Its digest must not be published in its group, nor the block under another."""
        self.by_digest[group][digest] = block
        self.digest[block] = digest
        self.parent[block] = parent
        self.tokens[block] = tokens
        self.depth[block] = depth
        if group == self.leading:
            key = parent + tokens[:TOKEN_BYTES]
            sibling = self.children.get(key, -1)
            self.children[key] = block
            self._previous[block] = -1
            self._next[block] = sibling
            if sibling >= 0:
                self._previous[sibling] = block

    def forget(self, block: int, group: int) -> None:
        """Makes a published block unfindable."""
        digest, parent, tokens = self.digest[block], self.parent[block], self.tokens[block]
        del self.by_digest[group][digest]
        self.digest[block] = self.parent[block] = self.tokens[block] = b""
        if group == self.leading:
            before, after = self._previous[block], self._next[block]
            if after >= 0:
                self._previous[after] = before
            if before >= 0:
                self._next[before] = after
            elif after >= 0:
                self.children[parent + tokens[:TOKEN_BYTES]] = after
            else:
                del self.children[parent + tokens[:TOKEN_BYTES]]

    def count_children(self) -> int:
        """Counts the blocks that can be reached as somebody's child, along the links, O(published)."""
        count = 0
        for block in self.children.values():
            while block >= 0:
                count += 1
                block = self._next[block]
        return count

    def match(self, digests: Sequence[bytes], root: bytes, token_ids: Sequence[int], limit: int) -> Match:
        """Returns the longest prefix of `token_ids[:limit]` that can be found: whole blocks, then a part of one more.

        digests: of the full blocks, as many as are known. In groups with full attention a match needs all blocks; in a
        group with a window, only those that the next query (at position num_tokens) still sees.
        """
        size = self._block_size
        whole = leading(digests, min(len(digests), limit // size), self._full)
        chain = list(digests[:whole])
        length = whole * size
        tail = token_ids[length : min(limit, length + size)]
        if tail:
            inside, digest = self._inside(chain[-1] if chain else root, tail)
            if inside:
                length += inside
                chain.append(digest)
        if self._windowed:
            length = fit_windows(chain, length, self._windowed, size)
        entries = -(-length // size)
        first_held = [first_entry_in_window(length, window, size) for window in self._windows]
        blocks = [
            array("i", [-1] * first + [published[digest] for digest in chain[first:entries]])
            for first, published in zip(first_held, self.by_digest, strict=True)
        ]
        return Match(length, blocks, first_held)

    def reach(self, digests: Sequence[bytes], below: Callable[[tuple[bytes, int]], bool]) -> int:
        """Returns how many leading blocks a match would have if blocks that are stored elsewhere were published too.

        below: says of (digest, group) whether it is stored.
        """
        either = [_Either(group, published, below) for group, published in enumerate(self.by_digest)]
        return reach(digests, self._windows, either, self._block_size)

    def _inside(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, bytes]:
        """Finds the child of `parent` whose first tokens agree longest with `token_ids`.

        Returns how many agree, and that child's digest.
        """
        wanted = pack_tokens(token_ids)
        best, best_digest = 0, b""
        for block in self._siblings(parent + wanted[:TOKEN_BYTES]):
            tokens, digest = self.tokens[block], self.digest[block]
            common = _common_tokens(tokens, wanted)
            if common > best and all(digest in published for published in self._full):
                best, best_digest = common, digest
        return best, best_digest

    def _siblings(self, key: bytes) -> Iterator[int]:
        block = self.children.get(key, -1)
        for _ in range(MAX_CANDIDATES):
            if block < 0:
                return
            yield block
            block = self._next[block]


class _Either:
    """Digests of a group's blocks that are published, or that lie below."""

    def __init__(self, group: int, published: Container[bytes], below: Callable[[tuple[bytes, int]], bool]) -> None:
        self._group = group
        self._published = published
        self._below = below

    def __contains__(self, digest: object) -> bool:
        assert isinstance(digest, bytes)
        return digest in self._published or self._below((digest, self._group))


def _common_tokens(tokens: bytes, wanted: bytes) -> int:
    """Returns how many leading tokens two packed runs share."""
    if tokens.startswith(wanted):
        return len(wanted) // TOKEN_BYTES
    for byte, (a, b) in enumerate(zip(tokens, wanted, strict=False)):
        if a != b:
            return byte // TOKEN_BYTES
    return min(len(tokens), len(wanted)) // TOKEN_BYTES
