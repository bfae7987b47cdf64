"""What tools and tool calls are in bodies of chat: OpenAI's shapes, with limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_serializer

from pagemill.errors import InvalidRequestError
from pagemill.server.protocol.body import Body, Name, check_length
from pagemill.text.tool_messages import check_depth

MAX_TOOLS = 128
MAX_DOCUMENTS = 1024
MAX_OPTIONS = 64
"""Entries of `chat_template_kwargs`."""
MAX_CHARACTERS = 262144
"""Characters that tools, documents or template options may have, in all names and texts together; each number and each
list counts as one."""

MAX_ARGUMENTS = 1048576
"""Characters of arguments in all calls of a conversation."""
MAX_BRACKETS = 65536
"""Brackets `[` and `{` in them: where each begins a list or an object, templates take long to be given them."""

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class Function(Body):
    """A function that the model may call. parameters: a JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The schema that arguments are held to; without parameters, that of no arguments."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return nothing if self.parameters is None else self.parameters


class Tool(Body):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Returns the tool as chat templates take it: without `strict`, which says nothing to a model."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **function}}


class NamedFunction(Body):
    name: FunctionName


class NamedToolChoice(Body):
    """Makes the model call this function."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    """arguments: a JSON object, as text."""

    name: Name
    arguments: Annotated[str, Field(max_length=MAX_CHARACTERS)]


class ToolCallInMessage(Body):
    """A call of an earlier answer. index: what clients leave in that put it together from a stream."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude={"index"})


class Called(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of this answer. arguments: a JSON object, unless the answer was cut."""

    id: str
    type: Literal["function"] = "function"
    function: Called


class WhatIsNew(BaseModel):
    """Says nothing of fields that are None: clients put an answer together by writing each part's fields over those of
    the one before it."""

    @model_serializer
    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in self if value is not None}


class CalledDelta(WhatIsNew):
    name: str | None = None
    arguments: str


class ToolCallDelta(WhatIsNew):
    """What is new of a call: with its first part, its id and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledDelta


def check_for_template(body: Mapping[str, Any]) -> None:
    """Raises `InvalidRequestError` for tools, documents and template options that are too many, too long or nested too
    deep."""
    check_length("tools", body.get("tools"), MAX_TOOLS)
    check_length("documents", body.get("documents"), MAX_DOCUMENTS)
    check_length("chat_template_kwargs", body.get("chat_template_kwargs"), MAX_OPTIONS)
    for name in ("tools", "documents", "chat_template_kwargs"):
        check_size(name, body.get(name))


def check_arguments(calls: Sequence[Any]) -> None:
    """Raises `InvalidRequestError` where the messages of a conversation, with these `tool_calls`, have arguments that
    are too long."""
    functions = (
        call.get("function")
        for listed in calls
        if isinstance(listed, list)
        for call in listed
        if isinstance(call, dict)
    )
    given = (function.get("arguments") for function in functions if isinstance(function, dict))
    texts = [text for text in given if isinstance(text, str)]
    length, brackets = sum(map(len, texts)), sum(text.count("[") + text.count("{") for text in texts)
    if length > MAX_ARGUMENTS or brackets > MAX_BRACKETS:
        raise InvalidRequestError(
            f"arguments of tool calls have {length} characters, {brackets} of them opening brackets; give at most "
            f"{MAX_ARGUMENTS}, and {MAX_BRACKETS} brackets, and leave out earlier calls",
            param="messages",
        )


def check_size(name: str, value: Any) -> None:
    """Raises `InvalidRequestError` for a value of more than `MAX_CHARACTERS`, or nested deeper than templates take."""
    if sum(_sizes(value)) > MAX_CHARACTERS:
        raise InvalidRequestError(f"{name} have over {MAX_CHARACTERS} characters; send shorter ones", param=name)
    check_depth(name, value, name)


def _sizes(value: Any) -> Iterator[int]:
    left = [value]
    while left:
        part = left.pop()
        yield len(part) + 1 if isinstance(part, (str, list, dict)) else 1
        if isinstance(part, dict):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, list):
            left += part
