"""ChatInOtherWords: a request of another API as one of chat, which names fields as that API does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from pagemill.errors import PagemillError
from pagemill.server.protocol.chat import ChatCompletionRequest
from pagemill.server.protocol.refusals import refusal_of

T = TypeVar("T", bound="ChatInOtherWords")


class ChatInOtherWords(ChatCompletionRequest):
    """Holds what chat is asked. What it refuses has the other API's names.

    OTHER_NAMES: of fields, by chat's. MOST_RENAMED: how often a name is replaced in a message at most; -1 for always.
    """

    OTHER_NAMES: ClassVar[Mapping[str, str]]
    MOST_RENAMED: ClassVar[int] = -1

    @classmethod
    def of(cls: type[T], fields: Mapping[str, Any]) -> T:
        """Returns the request with chat's fields; None means: not given. Raises `InvalidRequestError` children."""
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise cls._renamed(refusal_of(error.errors(), given, cls)) from None

    def in_own_words(self, error: PagemillError) -> PagemillError:
        return self._renamed(super().in_own_words(error))

    @classmethod
    def _renamed(cls, error: PagemillError) -> PagemillError:
        other = cls.OTHER_NAMES.get(error.param or "")
        if other is not None:
            error.message = error.message.replace(str(error.param), other, cls.MOST_RENAMED)
            error.param = other
        return error
