"""Fits tools and tool calls to one chat template: templates differ in where they look for tools, and whether they write
calls themselves."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jinja2.nodes

from pagemill.errors import InvalidRequestError, shown
from pagemill.text.answer.formats import tool_calls_of

Place = Literal["tools", "xml_tools", "message"]

_KEY, _VALUE = "probe_key", "probe_value"


class ToolDialect:
    """Knows how one chat template takes tools and calls.

    reads: the variables that it asks for. render: renders variables with it, and raises what it raises.
    """

    def __init__(
        self,
        source: str,
        tree: jinja2.nodes.Template,
        reads: frozenset[str],
        render: Callable[[Mapping[str, Any]], str],
    ) -> None:
        self._render = render
        self._form = tool_calls_of(source)
        self._names_calls = "tool_calls" in source
        self.place: Place | None = next((name for name in ("tools", "xml_tools") if name in reads), None)
        """Where it looks for tools: in a variable, or in the system message; None for nowhere."""
        if self.place is None and _reads_tools(tree):
            self.place = "message"

    @property
    def takes_calls(self) -> bool:
        """True if messages may have tool calls: the template writes them, or it is known how its family does."""
        return self._writes_calls != "never" or self._knows_form

    @property
    def _knows_form(self) -> bool:
        """True if it is known how the model's family writes calls."""
        return self._form is not None and self._form.written is not None

    def variables(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """Returns the variables by which the template sees these tools, beside `tools`."""
        return {"xml_tools": _functions(tools)} if tools and self.place == "xml_tools" else {}

    def conversation(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """Returns messages, whose calls have arguments that are objects, as the template takes them. Raises
        `InvalidRequestError` for calls that are no objects with a function."""
        fitted = [self._with_calls(message) if message.get("tool_calls") else message for message in messages]
        if not tools or self.place != "message":
            return fitted
        if not fitted or fitted[0].get("role") != "system":
            fitted.insert(0, {"role": "system", "content": ""})
        return [{**fitted[0], "tools": _json(_functions(tools))}, *fitted[1:]]

    def _with_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message whose calls the template can write. It has a content, into which many templates look, but
        where they write calls of messages without one alone. Raises `InvalidRequestError` for what cannot be written.
        """
        message = {**message, "content": str(message.get("content", ""))}
        if self._writes_calls == "alone" and not message["content"].strip():
            message["content"] = None
        elif self._writes_calls != "always":
            return self._with_written_calls(message)
        if self._wants_texts:
            message["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return message

    def _with_written_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        if not self._knows_form:
            raise InvalidRequestError(
                "a message has tool_calls beside a content, of which this model's chat template writes one alone; send "
                "the calls without the content",
                param="messages",
            )
        written = [self._written(_function_of(call)) for call in message.pop("tool_calls")]
        return {**message, "content": "\n".join(filter(None, [message["content"], *written]))}

    def _written(self, function: Mapping[str, Any]) -> str:
        assert self._form is not None
        assert self._form.written is not None
        before, between, behind = self._form.written
        return f"{before}{function['name']}{between}{_json(function.get('arguments', {}))}{behind}"

    @functools.cached_property
    def _writes_calls(self) -> Literal["always", "alone", "never"]:
        """Says of which messages the template writes calls: of all, of those without a content, or of none.

        Where it refuses what it is asked here, it is taken to write them.
        """
        if not self._names_calls:
            return "never"
        beside_text = self._shows_calls("")
        if not beside_text and self._shows_calls(None):
            return "alone"
        return "never" if beside_text is False else "always"

    def _shows_calls(self, content: str | None) -> bool | None:
        """Returns whether a call changes the text, in a message of this content; None if the template refuses it."""
        shown: bool | None = None
        for tools in (None, [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]):
            without = [self._probe(each, tools=tools) for each in ("", None)]
            for arguments in ({_KEY: _VALUE}, _json({_KEY: _VALUE})):
                text = self._probe(content, _call(arguments), tools=tools)
                if text is not None:
                    shown = shown or text not in without
        return shown

    @functools.cached_property
    def _wants_texts(self) -> bool:
        """True if the template puts arguments into its text as they are, and so must be given JSON."""
        arguments, content = {_KEY: _VALUE}, None if self._writes_calls == "alone" else ""
        objects = self._probe(content, _call(arguments))
        as_text = self._probe(content, _call(_json(arguments)))
        return (objects is None or str(arguments) in objects) and _VALUE in (as_text or "")

    def _probe(self, content: str | None, *calls: Mapping[str, Any], tools: Any = None) -> str | None:
        """Returns what the template writes of a message; None if it refuses it."""
        message = {"role": "assistant", "content": content} | ({"tool_calls": [*calls]} if calls else {})
        messages = [{"role": "user", "content": "?"}, message]
        try:
            return self._render(
                {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": False}
            )
        except Exception:  # a template is a program, which may raise anything
            return None


def _call(arguments: Any) -> dict[str, Any]:
    return {"id": "0" * 9, "type": "function", "function": {"name": "f", "arguments": arguments}}


def _reads_tools(tree: jinja2.nodes.Template) -> bool:
    by_name = any(node.attr == "tools" for node in tree.find_all(jinja2.nodes.Getattr))
    return by_name or any(
        isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "tools"
        for node in tree.find_all(jinja2.nodes.Getitem)
    )


def _functions(tools: Sequence[Any]) -> list[Any]:
    return [tool.get("function", tool) if isinstance(tool, Mapping) else tool for tool in tools]


def _function_of(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        return function
    raise InvalidRequestError(
        f"a tool call is {shown(call)}; give {{'type': 'function', 'function': {{'name': …, 'arguments': …}}}}",
        param="messages",
    )


def _with_text(call: Any) -> dict[str, Any]:
    function = _function_of(call)
    return {**call, "function": {**function, "arguments": _json(function.get("arguments", {}))}}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
