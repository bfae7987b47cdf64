"""Feed: text that comes in pieces, for parsers that are generators and wait where they need more of it.

What a parser does depends on the text alone, never on where it is cut. Its work is linear: nothing is read twice.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Waiting: TypeAlias = Generator[None, None, T]
"""A parser's step: yields while it needs more text, and returns what it found."""

_SPACE = re.compile(r"[ \t\r\n]+")


class Feed:
    """Text that is taken from its front. `taken` gathers what parsers have taken since somebody cleared it."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self._text = ""
        self._at = 0
        self._ended = False

    def add(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self) -> None:
        """Says that no text follows."""
        self._ended = True

    def take_back(self) -> str:
        """Returns what was taken, and forgets it."""
        text = "".join(self.taken)
        self.taken.clear()
        return text

    def peek(self) -> Waiting[str]:
        """Returns the next character; "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def run(self, characters: re.Pattern[str]) -> Waiting[str]:
        """Takes all characters up to the first of another kind. characters: matches one or more of a kind."""
        parts: list[str] = []
        while (yield from self.peek()) and (match := characters.match(self._text, self._at)):
            parts.append(match[0])
            self._take(match.end())
        return "".join(parts)

    def word(self, characters: re.Pattern[str], kind: re.Pattern[str], most: int) -> Waiting[bool]:
        """Takes what `run` does if it is of a kind, all at once, and nothing otherwise.

        kind: matches all of it. most: characters of it at most.
        """
        while True:
            match = characters.match(self._text, self._at)
            end = match.end() if match else self._at
            if end < len(self._text) or self._ended or end - self._at > most:
                break
            yield
        if end - self._at > most or not kind.fullmatch(self._text, self._at, end):
            return False
        self._take(end)
        return True

    def space(self) -> Waiting[str]:
        """Takes white space."""
        return (yield from self.run(_SPACE))

    def literal(self, word: str) -> Waiting[bool]:
        """Takes a word if it comes next, and nothing otherwise."""
        while len(self._text) - self._at < len(word) and not self._ended:
            if not word.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(word, self._at):
            return False
        self._take(self._at + len(word))
        return True

    def cut(self, word: str) -> bool:
        """Takes the rest of a text that has ended within a word, and nothing otherwise."""
        is_cut = self._ended and self._at < len(self._text) and word.startswith(self._text[self._at :])
        if is_cut:
            self._take(len(self._text))
        return is_cut

    def before(self, marks: Marks, *, drops_cut: bool = False) -> Waiting[tuple[str, str]]:
        """Takes text in which no mark begins, and the mark behind it: "" if that is not certain yet. Both are "" at the
        end. drops_cut: the text does not have the mark within which it ends."""
        while True:
            match = marks.pattern.search(self._text, self._at)
            if match and not self._ended and marks.may_grow(self._text[match.start() : match.start() + marks.longest]):
                match = None
            whole = self._ended and not drops_cut
            start = match.start() if match else len(self._text) if whole else self._open_from(marks)
            if match or start > self._at or self._ended:
                text = self._text[self._at : start]
                self._take(match.end() if match else len(self._text) if self._ended else start)
                return text, match[0] if match else ""
            yield

    def _open_from(self, marks: Marks) -> int:
        """Returns where the longest end of the text begins that may become a mark."""
        first = max(self._at, len(self._text) - marks.longest + 1)
        ends = (at for at in range(first, len(self._text)) if marks.may_begin(self._text[at:]))
        return next(ends, len(self._text))

    def _take(self, end: int) -> None:
        self.taken.append(self._text[self._at : end])
        self._at = end


class Marks:
    """Words that are looked for together. One may be the beginning of another, and of those the longest is found."""

    def __init__(self, *words: str) -> None:
        self._words = sorted(filter(None, words), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self._words)) or r"(?!)")
        self.longest = max(map(len, words), default=0)

    def may_begin(self, text: str) -> bool:
        return any(word.startswith(text) for word in self._words)

    def may_grow(self, text: str) -> bool:
        """Returns whether a text that begins with a word may become a longer one."""
        return any(word.startswith(text) and word != text for word in self._words)
