"""KV events: which blocks can be found, and which no longer, as they come and go, for whoever routes requests.

Only the leading layer group counts: a match needs all of its blocks. Nothing is recorded unless somebody asks for it
when the memory system is made, and then each event costs one entry of a dict.
"""

from __future__ import annotations

from typing import NamedTuple

from pagemill.memory.prefix_index import PrefixIndex


class KVEvents(NamedTuple):
    """Digests of blocks that can be found now and could not before, and the reverse; each at most once."""

    stored: list[bytes]
    removed: list[bytes]


class RecordedIndex(PrefixIndex):
    """A `PrefixIndex` that remembers what has come and gone since it was last asked."""

    _changed: dict[bytes, bool] | None = None
    """By digest, whether it came last. A block that goes and comes back between two questions counts as stored again:
    that is one entry too many, and never a wrong one."""

    def publish(self, block: int, group: int, digest: bytes, parent: bytes, tokens: bytes, depth: int) -> None:
        super().publish(block, group, digest, parent, tokens, depth)
        if group == self.leading:
            self._note(digest, True)

    def forget(self, block: int, group: int) -> None:
        digest = self.digest[block]
        super().forget(block, group)
        if group == self.leading:
            self._note(digest, False)

    def take_events(self) -> KVEvents:
        """Returns what has changed since the last call, or since the start."""
        changed, self._changed = self._changed or {}, None
        stored = [digest for digest, came in changed.items() if came]
        return KVEvents(stored, [digest for digest, came in changed.items() if not came])

    def _note(self, digest: bytes, came: bool) -> None:
        if self._changed is None:
            self._changed = {}
        self._changed[digest] = came
