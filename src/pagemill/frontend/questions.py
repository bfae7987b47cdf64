"""Questions: the queries that an engine has been asked, until their answers come."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, TypeVar

from pagemill.engine.messages import Failure
from pagemill.engine.queries import Answer, Query, Question
from pagemill.errors import PagemillError

A = TypeVar("A")


class Questions:
    """Keeps those of one engine. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}

    def pose(self, query: Query[A]) -> tuple[Question, asyncio.Future[A]]:
        """Returns the message that asks, and its answer to come. The question is forgotten once nobody waits for it."""
        question = Question(next(self._ids), query)  # type: ignore[arg-type]
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._open[question.id] = answer
        answer.add_done_callback(lambda _: self._open.pop(question.id, None))
        return question, answer

    def take(self, message: Answer) -> None:
        """Takes an answer. Ignores one that nobody waits for any more."""
        answer = self._open.pop(message.id, None)
        if answer is None or answer.done():
            return
        if isinstance(message.answer, Failure):
            answer.set_exception(message.answer.to_error())
        else:
            answer.set_result(message.answer)

    def refuse(self, error: PagemillError) -> None:
        """Answers every question with an error."""
        for answer in [*self._open.values()]:
            if not answer.done():
                answer.set_exception(error)
