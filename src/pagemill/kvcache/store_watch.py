"""StoreWatch: follows what a store on disk holds, in a thread of its own, so that no step waits for the disk.

A store may hold millions of blocks when an engine starts, and other processes may write to it. So it is listed in
pages, which wait to be taken, a few at most; then it is looked at for changes from time to time, whoever makes them.
"""

from __future__ import annotations

import logging
import threading
import time

from pagemill.errors import KVStoreError
from pagemill.kvcache.offload_tiers import FollowedStore

logger = logging.getLogger(__name__)

PAGE = 2048
"""Blocks that are read at a time, and taken."""
MOST_WAITING = 4 * PAGE
"""Blocks that wait to be taken, beyond which no more are read."""
FULL_S = 0.05
"""How soon it is looked again whether some of them have been taken."""
LOOK_S = 0.5
"""How often a store is looked at in which nothing more was found."""
LOOK_SHARE = 0.2
"""The largest share of the time that looking may take."""
AGAIN_S = 30.0
"""After how long a store is listed again that could not be read."""


class StoreWatch:
    """Tells which blocks of a layer group a store holds. `take` belongs to one thread, the engine's."""

    def __init__(self, store: FollowedStore, group: int) -> None:
        self._store = store
        self._group = group
        self._found: dict[bytes, bool] = {}
        self._told: set[bytes] = set()
        """Blocks that were found and have not left; a new listing shows which of them have left unseen."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kv-watch", daemon=True)
        self._thread.start()

    @property
    def has_more(self) -> bool:
        """Returns whether there is something to take."""
        return bool(self._found)

    def take(self) -> dict[bytes, bool]:
        """Returns digests of blocks that have come to the store (True) or left it (False), PAGE at most."""
        with self._lock:
            first = [*zip(range(PAGE), self._found, strict=False)]
            return {digest: self._found.pop(digest) for _, digest in first}

    def close(self) -> None:
        """Ends the thread. The store may be closed then."""
        self._closing.set()
        self._thread.join()

    def _follow(self) -> None:
        wait_s, failed = 0.0, False
        pages = self._store.follow(self._group, PAGE)
        listed: set[bytes] | None = set()  # until all that the store has is listed
        while not self._closing.wait(wait_s):
            if len(self._found) >= MOST_WAITING:
                wait_s = FULL_S
                continue
            begin_s = time.monotonic()
            try:
                page = next(pages)
            except KVStoreError as error:
                if not failed:
                    logger.warning("what is on disk is not told to other replicas: %s", error)
                pages, listed = self._store.follow(self._group, PAGE), set()
                wait_s, failed = AGAIN_S, True
                continue
            if listed is not None:
                listed |= page.keys()
                if not page:
                    page, listed = dict.fromkeys(self._told - listed, False), None
            for digest, held in page.items():
                (self._told.add if held else self._told.discard)(digest)
            with self._lock:
                self._found |= page
            took_s, failed = time.monotonic() - begin_s, False
            wait_s = took_s / LOOK_SHARE if page else LOOK_S
