"""Reads JSON out of a `Feed` as it comes: what is no JSON is known at its first wrong character."""

from __future__ import annotations

import json
import re
from typing import Any

from pagemill.text.answer.feed import Feed, Waiting

MAX_DEPTH = 64
"""Lists and objects inside each other, in the arguments of a call."""

LONGEST_SCALAR = 1024
"""Characters of a number."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPED = re.compile(r'["\\/bfnrtu]')
_HEX = re.compile(r"[0-9a-fA-F]")
_WORD = re.compile(r"[-+.0-9a-zA-Z]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")


class NotACallError(Exception):
    """Text that was read as a tool call, or as a part of one, and is none."""


def read_value(feed: Feed, depth: int = 0) -> Waiting[None]:
    """Takes one value, with the white space before it. Raises `NotACallError`."""
    yield from feed.space()
    first = yield from feed.peek()
    if first == '"':
        yield from read_string(feed)
    elif first == "{":
        yield from _read_object(feed, depth)
    elif first == "[":
        yield from _read_list(feed, depth)
    elif not (yield from feed.word(_WORD, _SCALAR, LONGEST_SCALAR)):
        raise NotACallError


def read_string(feed: Feed) -> Waiting[str]:
    """Takes a string, and returns it as it is meant. Raises `NotACallError`."""
    yield from expect(feed, '"')
    parts = ['"']
    while not (yield from feed.literal('"')):
        if (yield from feed.literal("\\")):
            kind = yield from _one_of(feed, _ESCAPED)
            parts.append("\\" + kind)
            for _ in range(4 if kind == "u" else 0):
                digit = yield from _one_of(feed, _HEX)
                parts.append(digit)
            continue
        plain = yield from feed.run(_PLAIN)
        if not plain:
            raise NotACallError
        parts.append(plain)
    text: str = json.loads("".join(parts) + '"')
    return text


def expect(feed: Feed, word: str) -> Waiting[None]:
    """Takes a word behind white space. Raises `NotACallError` if another text stands there."""
    yield from feed.space()
    if not (yield from feed.literal(word)):
        raise NotACallError


def as_json(value: Any) -> str:
    """Returns a value as JSON. Raises `ValueError` for one that JSON does not have, or that is not Unicode."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def is_json(text: str) -> bool:
    """Returns whether a text is one JSON value that is not nested deeper than `MAX_DEPTH`."""
    feed = Feed()
    feed.add(text)
    feed.end()
    try:
        for _ in _read_all(feed):
            pass
    except NotACallError:
        return False
    return True


def _read_all(feed: Feed) -> Waiting[None]:
    yield from read_value(feed)
    yield from feed.space()
    if (yield from feed.peek()):
        raise NotACallError


def _read_object(feed: Feed, depth: int) -> Waiting[None]:
    yield from _open(feed, "{", depth)
    if (yield from _closed(feed, "}")):
        return
    while True:
        yield from feed.space()
        yield from read_string(feed)
        yield from expect(feed, ":")
        yield from read_value(feed, depth + 1)
        if (yield from _closed(feed, "}")):
            return
        yield from expect(feed, ",")


def _read_list(feed: Feed, depth: int) -> Waiting[None]:
    yield from _open(feed, "[", depth)
    if (yield from _closed(feed, "]")):
        return
    while True:
        yield from read_value(feed, depth + 1)
        if (yield from _closed(feed, "]")):
            return
        yield from expect(feed, ",")


def _open(feed: Feed, bracket: str, depth: int) -> Waiting[None]:
    yield from expect(feed, bracket)
    if depth >= MAX_DEPTH:
        raise NotACallError


def _closed(feed: Feed, bracket: str) -> Waiting[bool]:
    yield from feed.space()
    return (yield from feed.literal(bracket))


def _one_of(feed: Feed, characters: re.Pattern[str]) -> Waiting[str]:
    character = yield from feed.peek()
    if not characters.match(character):
        raise NotACallError
    yield from feed.literal(character)
    return character
