"""Tools and tool calls, as conversations carry them and chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagemill.errors import InvalidRequestError, shown

MAX_DEPTH = 64
"""Lists and objects inside each other, in tools, documents, template options and a call's arguments."""

_HINT = "send a JSON object; a call that was cut has none: leave it out, or put its text into the message's content"


def functions_of(tools: Iterable[Any] | None) -> dict[str, Mapping[str, Any]]:
    """Returns the schema of the parameters of each function among `tools`, by name. What is no function has none."""
    found = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found


def with_arguments_as_objects(calls: Sequence[Any]) -> list[Any]:
    """Returns a message's tool calls with arguments that are JSON texts, as OpenAI writes them, as objects: templates
    write them in the model's own way. Raises `InvalidRequestError` for a text that is no JSON object."""
    return [_with_object(call) for call in calls]


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"]
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(
            f"a tool call's arguments are {shown(text)}, which is no JSON object; {_HINT}", param="messages"
        )
    check_depth("a tool call's arguments", arguments, "messages")
    return {**call, "function": {**function, "arguments": arguments}}


def check_depth(name: str, value: Any, param: str) -> None:
    """Raises `InvalidRequestError` for lists and objects that are nested deeper than `MAX_DEPTH`."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            part
            for each in level
            if isinstance(each, (dict, list))
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise InvalidRequestError(
        f"{name} are nested deeper than {MAX_DEPTH} lists and objects; make them flatter", param=param
    )
