"""Answers: asks replicas, and waits for none that is silent while another answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from pagemill.distributed.changes import Changes
from pagemill.distributed.fleet_stats import FleetStats
from pagemill.distributed.replica_link import ReplicaLink, is_refusal
from pagemill.engine.queries import BlocksQuery, KVMapQuery, PinsQuery, Query, SequencesQuery, SetTenant, StatsQuery
from pagemill.engine.stats import EngineStats
from pagemill.errors import PagemillError

LOGGER = logging.getLogger(__name__)

ANSWER_S = 2.0
"""The longest time that a question waits for one replica where another has answered."""
IN_TIME = (BlocksQuery, KVMapQuery, PinsQuery, SequencesQuery, SetTenant, StatsQuery)
"""Questions that do not wait longer: they change nothing, or what a replica does later all the same, before requests
that come behind."""
CANNOT_DO = "replica %s could not do what the others have: %s"

A = TypeVar("A")


class Answers:
    """Collects what replicas answer. stats: what they have answered of their statistics."""

    def __init__(self) -> None:
        self.stats = FleetStats()
        self._silent: set[str] = set()
        """Replicas of which it has been said that they do not answer."""

    def leave(self, link: ReplicaLink) -> None:
        """Notes that the connection to a replica has ended."""
        self.stats.leave(link.name, engine_died=link.engine_died)
        self._silent.discard(link.name)

    async def ask(self, query: Query[A], links: Sequence[ReplicaLink]) -> dict[str, A | BaseException]:
        """Returns by replica what it answers, or why it does not, without those that are silent for too long. These are
        named once, are not waited for again until they answer, and what they answer later counts."""
        asking = {asyncio.create_task(self._ask_one(query, link)): link for link in links}
        limited = isinstance(query, IN_TIME)
        heard = [task for task, link in asking.items() if not (limited and link.name in self._silent)]
        await _answered(heard or [*asking], ANSWER_S if limited else None)
        done = {task for task in asking if task.done()}
        for task, link in asking.items():
            if task in done:
                continue
            task.add_done_callback(partial(self._note_late, link.name, query))
            if link.name not in self._silent:
                self._silent.add(link.name)
                LOGGER.warning("replica %s is silent; what is asked is answered without it", link.name)
        return {link.name: task.exception() or task.result() for task, link in asking.items() if task in done}

    def _note_late(self, replica: str, query: Query[Any], asked: asyncio.Task[Any]) -> None:
        """Notes that a silent replica answers. Logs a change that it refuses and others have made; one that is gone has
        nothing to do any more."""
        self._silent.discard(replica)
        error = None if asked.cancelled() else asked.exception()
        if error is not None and is_refusal(error) and Changes.is_one(query):
            LOGGER.error(CANNOT_DO, replica, error)

    async def _ask_one(self, query: Query[A], link: ReplicaLink) -> A:
        """Returns a replica's answer, and keeps its statistics. Raises why a replica that has left has none."""
        answer = await link.ask(query)
        if isinstance(answer, EngineStats):
            if link.death is not None:
                raise link.death
            self.stats.note(link.name, answer)
        return answer


def is_loss(answer: object) -> bool:
    """Returns whether what came of a question says that the replica is gone, and nothing of what was asked."""
    return isinstance(answer, BaseException) and not is_refusal(answer)


async def repeat(change: Query[Any], link: ReplicaLink) -> None:
    """Makes a replica do what the others have. Where it cannot, its requests are refused and others go on."""
    try:
        await link.ask(change)
    except PagemillError as error:
        LOGGER.error(CANNOT_DO, link.name, error)


async def _answered(asking: Sequence[asyncio.Task[Any]], timeout_s: float | None) -> None:
    """Waits until all have ended, or for a time, but not before one has answered: where nobody does, who asks is to
    notice. What has not ended goes on. timeout_s: None for no limit."""
    try:
        done, silent = await asyncio.wait(asking, timeout=timeout_s)
        while silent and all(is_loss(each.exception()) for each in done):
            more, silent = await asyncio.wait(silent, return_when=asyncio.FIRST_COMPLETED)
            done |= more
    except asyncio.CancelledError:
        for each in asking:
            each.cancel()
        raise
