"""Reads tool calls in the shapes that families of models write them in, out of a `Feed`.

A reader takes what stands behind a begin mark. It tells its `Listener` of a call as soon as the name is known and
arguments have begun, and of the arguments as they come. Raises `NotACallError` where the text is no call.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pagemill.text.answer.feed import Feed, Marks, Waiting
from pagemill.text.answer.formats import Shape, ToolCallFormat
from pagemill.text.answer.json_text import (
    MAX_DEPTH,
    NotACallError,
    as_json,
    expect,
    is_json,
    read_string,
    read_value,
)
from pagemill.text.answer.schema_types import type_of_json, types_of_property

Functions = Mapping[str, Mapping[str, Any]]
"""The functions that may be called: the schema of each one's parameters by its name."""

_MEMBERS = ("name", "arguments", "parameters", "function")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_KEY = re.compile(r"[^<>\s]+")
_VALUE_ENDS = Marks("</parameter>")
_LITERALS = {"true": True, "false": False, "null": None}
_PYTHON_PLAIN = re.compile(r"""[^'"()\[\]{}\\]+""")
_PYTHON_QUOTED = {quote: re.compile(rf"[^{quote}\\\n]+") for quote in "'\""}


class Listener(Protocol):
    """Hears of calls. What the feed has taken before is nobody's text any more once it has been told of."""

    def begin_call(self, name: str) -> None:
        """Hears that a function is called, and that its arguments follow."""

    def add_arguments(self, text: str) -> None:
        """Hears more of the arguments' JSON."""

    def stream_arguments(self, on: bool) -> None:
        """Hears that what the feed takes from now on is the arguments' JSON, or that their end has been taken."""

    def end_call(self) -> None:
        """Hears that a call is whole, with all that is written around its arguments."""


class CallParser:
    """Reads calls of one format."""

    def __init__(self, form: ToolCallFormat, functions: Functions, feed: Feed, listener: Listener) -> None:
        self._form = form
        self._functions = functions
        self._feed = feed
        self._listener = listener

    def read(self) -> Waiting[None]:
        """Takes the calls behind one begin mark."""
        shapes: dict[Shape, Callable[[], Waiting[None]]] = {
            "json": self._read_json,
            "named": self._read_named,
            "tags": self._read_tags,
            "pythonic": self._read_pythonic,
        }
        return shapes[self._form.shape]()

    def _check_name(self, name: str) -> str:
        if name not in self._functions:
            raise NotACallError
        return name

    # --- {"name": NAME, "arguments": {…}}, or a list of such ---

    def _read_json(self) -> Waiting[None]:
        feed = self._feed
        yield from feed.space()
        listed = yield from feed.literal("[")
        while True:
            yield from expect(feed, "{")
            yield from self._read_members()
            self._listener.end_call()
            yield from feed.space()
            if not ((yield from feed.literal(",")) or (yield from feed.literal(";"))):
                break
        if listed:
            yield from expect(feed, "]")

    def _read_members(self, outer: bool = True) -> Waiting[str]:
        """Takes an object's members and its closing bracket, and returns the function's name. Others mean nothing.

        outer: True where the call may be another object in this one, under the key "function".
        """
        feed, name, arguments, begun = self._feed, "", "", False
        while True:
            yield from feed.space()
            key = yield from read_string(feed)
            yield from expect(feed, ":")
            yield from feed.space()
            if key == "name" and not name:
                name = self._check_name((yield from read_string(feed)))
            elif key in ("arguments", "parameters") and not (begun or arguments):
                if name:
                    begun = yield from self._stream(name)
                else:
                    arguments = yield from self._value()
            elif key == "function" and outer and not (name or arguments) and (yield from feed.literal("{")):
                name, begun = (yield from self._read_members(outer=False)), True
            elif key == "function" and not name:
                name = self._check_name((yield from read_string(feed)))
            elif begun or key not in _MEMBERS:
                yield from read_value(feed)
            else:
                raise NotACallError
            yield from feed.space()
            if (yield from feed.literal("}")):
                break
            yield from expect(feed, ",")
        if not begun:
            if not name:
                raise NotACallError
            self._listener.begin_call(name)
            self._listener.add_arguments(_object_of(arguments))
        return name

    def _stream(self, name: str) -> Waiting[bool]:
        """Takes the arguments of a function that is known, and tells of them as they come."""
        if (yield from self._feed.peek()) != "{":
            text = _object_of((yield from self._value()))
            self._listener.begin_call(name)
            self._listener.add_arguments(text)
            return True
        self._listener.begin_call(name)
        self._listener.stream_arguments(True)
        yield from read_value(self._feed)
        self._listener.stream_arguments(False)
        return True

    def _value(self) -> Waiting[str]:
        """Takes a value and returns its JSON; that of the object in it, where arguments are written as a text."""
        feed = self._feed
        if (yield from feed.peek()) == '"':
            return (yield from read_string(feed))
        start = len(feed.taken)
        yield from read_value(feed)
        return "".join(feed.taken[start:])

    # --- NAME, then {…} ---

    def _read_named(self) -> Waiting[None]:
        feed = self._feed
        yield from feed.space()
        if (yield from feed.peek()) in ("[", "{"):
            yield from self._read_json()
            return
        name = self._check_name((yield from feed.run(_NAME)))
        for word in self._form.behind_name:
            if (yield from feed.literal(word)):
                break
        else:
            raise NotACallError
        yield from feed.space()
        if (yield from feed.peek()) != "{":
            raise NotACallError
        yield from self._stream(name)
        self._listener.end_call()

    # --- <function=NAME><parameter=KEY>VALUE</parameter>…</function> ---

    def _read_tags(self) -> Waiting[None]:
        feed, listener = self._feed, self._listener
        yield from expect(feed, "<function=")
        name = self._check_name((yield from feed.run(_NAME)))
        yield from expect(feed, ">")
        listener.begin_call(name)
        between, given = "{", set()
        while True:
            yield from feed.space()
            if not (yield from feed.literal("<parameter=")):
                break
            key = yield from feed.run(_KEY)
            if not key or key in given or not (yield from feed.literal(">")):
                raise NotACallError
            given.add(key)
            value = yield from self._tagged_value()
            types = types_of_property(key, self._functions[name])
            listener.add_arguments(f"{between}{as_json(key)}: {_typed(value, types)}")
            between = ", "
        listener.add_arguments("}" if given else "{}")
        yield from expect(feed, "</function>")
        listener.end_call()

    def _tagged_value(self) -> Waiting[str]:
        """Takes a parameter's text and its end tag. One line break on either side is not part of it."""
        parts = []
        while True:
            text, mark = yield from self._feed.before(_VALUE_ENDS)
            parts.append(text)
            if mark:
                return "".join(parts).removeprefix("\n").removesuffix("\n")
            if not text:
                raise NotACallError

    # --- NAME(KEY=value, …), alone or in a list ---

    def _read_pythonic(self) -> Waiting[None]:
        feed = self._feed
        yield from feed.space()
        listed = yield from feed.literal("[")
        while True:
            yield from feed.space()
            name = self._check_name((yield from feed.run(_NAME)))
            arguments = _arguments_of_call((yield from self._python_brackets()))
            self._listener.begin_call(name)
            self._listener.add_arguments(arguments)
            self._listener.end_call()
            space = yield from feed.space()
            follows = yield from feed.literal(",")
            if not follows and (listed or "\n" not in space or not _NAME.match((yield from feed.peek()))):
                break
        if listed:
            yield from expect(feed, "]")

    def _python_brackets(self) -> Waiting[str]:
        """Takes a pair of brackets with all that is between, and returns it."""
        feed, start, depth = self._feed, len(self._feed.taken), 0
        if (yield from feed.peek()) != "(":
            raise NotACallError
        while True:
            character = yield from feed.peek()
            if character in ("'", '"'):
                yield from self._python_text(character)
            elif character and character in "([{":
                depth += 1
                yield from feed.literal(character)
            elif character and character in ")]}":
                depth -= 1
                yield from feed.literal(character)
            elif not (yield from feed.run(_PYTHON_PLAIN)):
                raise NotACallError
            if depth > MAX_DEPTH:
                raise NotACallError
            if not depth:
                return "".join(feed.taken[start:])

    def _python_text(self, quote: str) -> Waiting[None]:
        feed = self._feed
        yield from feed.literal(quote)
        while not (yield from feed.literal(quote)):
            if (yield from feed.literal("\\")):
                yield from feed.literal((yield from feed.peek()))
            elif not (yield from feed.run(_PYTHON_QUOTED[quote])):
                raise NotACallError


def _object_of(text: str) -> str:
    """Returns arguments that were written before the name, or as a text. Without any, they are an empty object."""
    text = text.strip()
    if text in ("", "null"):
        return "{}"
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotACallError from None
    if not (text.startswith("{") and is_json(text)):
        raise NotACallError
    return text


def _typed(text: str, types: set[str]) -> str:
    """Returns a parameter's text as JSON: what it looks like, but where strings are allowed and that is not. types:
    what its schema allows; none where that does not say."""
    bare = text.strip()
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if is_json(text) and ("string" not in types or type_of_json(bare) in types - {"string"}):
        return bare
    return as_json(text)


def _arguments_of_call(text: str) -> str:
    """Returns the JSON of a call's keyword arguments, from `(KEY=value, …)`."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise NotACallError
        names = [keyword.arg for keyword in call.keywords]
        if None in names or len(set(names)) < len(names):
            raise NotACallError
        return as_json({keyword.arg: _python_value(keyword.value) for keyword in call.keywords})
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise NotACallError from None


def _python_value(node: ast.expr) -> Any:
    """Returns a literal's value; JSON's own words are taken for Python's."""
    return ast.literal_eval(_WithPythonsWords().visit(node))


class _WithPythonsWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_LITERALS[node.id]) if node.id in _LITERALS else node
